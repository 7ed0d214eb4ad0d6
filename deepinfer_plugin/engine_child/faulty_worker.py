"""A worker that plants a fault, for ``--worker-cls``: a rank is a process of its own, which context managers miss.

It is planted when the start-up proof has passed, and the log says when it first acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from deepinfer_plugin.engine_child.plan import ACTED

if TYPE_CHECKING or not current_platform.is_cuda():
    from deepinfer_plugin.worker.cpu_worker import DeepInferCpuWorker as OwnWorker
else:
    from deepinfer_plugin.worker.cuda_worker import DeepInferCudaWorker as OwnWorker

logger = init_logger(f"vllm.{__name__}")


class FaultyWorker(OwnWorker):
    """The platform's own worker, with the fault of its subclass once the engine is proven."""

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last call before the first request."""
        result = super().compile_or_warm_up_model()
        self.plant()
        return result

    def plant(self) -> None:
        """Change the code of this process."""
        raise NotImplementedError

    @classmethod
    def acts(cls) -> None:
        """Say, once, that the fault has changed something."""
        logger.info_once("%s%s", ACTED, cls.__name__, scope="process")  # the default is silent on all ranks but one
