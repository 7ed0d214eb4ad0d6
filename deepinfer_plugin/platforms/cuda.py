"""vLLM's CUDA platform with what it has no other hook for: a server returns seeds and witnesses."""

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform

from deepinfer_plugin import witness
from deepinfer_plugin.sampling import seed_middleware

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class DeepInferCudaPlatform(CudaPlatform):
    """Keeps ``_enum = CUDA``, so every check of vLLM for CUDA holds; other models than ours see no difference."""

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        """Let a server return seeds and witnesses; without an answer of our model the middleware does nothing."""
        super().pre_register_and_update(parser)
        seed_middleware.add_to_server(parser)
        witness.add_to_server(parser)
