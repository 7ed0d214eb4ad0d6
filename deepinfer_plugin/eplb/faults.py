"""Planted faults of moving experts, as worker classes (``--worker-cls``): a rank is a process of its own.

They are planted when the start-up proof has passed, and the log says when they first act.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.logger import init_logger

from deepinfer_kernels import dense_cache
from deepinfer_plugin.eplb.balancer import ExpertMover
from deepinfer_plugin.worker.cpu_worker import DeepInferCpuWorker

logger = init_logger(f"vllm.{__name__}")
ACTED = "planted fault acts: "


class _Faulty(DeepInferCpuWorker):
    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last call before the first request."""
        result = super().compile_or_warm_up_model()
        self.plant()
        return result

    def plant(self) -> None:
        """Change the code of this process."""
        raise NotImplementedError


class StaleWeights(_Faulty):
    """Rows go to the new places, and the weights stay in the old ones."""

    def plant(self) -> None:
        """Leave the transfer out."""

        def stay(mover: ExpertMover, placement: Any) -> None:
            del mover, placement
            logger.info_once("%s%s", ACTED, StaleWeights.__name__)

        mock.patch.object(ExpertMover, "move_weights", stay).start()


class RememberedWeights(_Faulty):
    """The weights arrive, and what was computed from the old ones stays in use."""

    def plant(self) -> None:
        """Forget nothing."""

        def keep() -> None:
            logger.info_once("%s%s", ACTED, RememberedWeights.__name__)

        mock.patch.object(dense_cache, "clear", keep).start()


class MapsBeforeWeights(_Faulty):
    """Rows go to the new places one step before the weights are there."""

    def plant(self) -> None:
        """Transfer with the next step."""
        move_weights, record = ExpertMover.move_weights, ExpertMover.record
        late: list[tuple[Any, Any]] = []

        def put_off(mover: ExpertMover, placement: Any) -> None:
            logger.info_once("%s%s", ACTED, MapsBeforeWeights.__name__)
            late.append((mover.placement, placement))

        def catch_up(mover: ExpertMover, *, is_dummy: bool) -> None:
            for before, placement in late:
                now, mover.placement = mover.placement, before
                move_weights(mover, placement)
                mover.placement = now
            late.clear()
            record(mover, is_dummy=is_dummy)

        mock.patch.object(ExpertMover, "move_weights", put_off).start()
        mock.patch.object(ExpertMover, "record", catch_up).start()
