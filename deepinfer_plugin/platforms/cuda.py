"""vLLM's CUDA platform with the one thing that it has no other hook for: the server returns seeds."""

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform

from deepinfer_plugin.sampling import seed_middleware

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class DeepInferCudaPlatform(CudaPlatform):
    """Keeps ``_enum = CUDA``, so every check of vLLM for CUDA holds; other models than ours see no difference."""

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        """Let the server of a command line return seeds; without an answer of our model the middleware does nothing."""
        super().pre_register_and_update(parser)
        seed_middleware.add_to_server(parser)
