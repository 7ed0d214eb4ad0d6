"""Planted faults of moving experts, each a worker class (``--worker-cls``), see ``FaultyWorker``."""

from __future__ import annotations

from typing import Any
from unittest import mock

from deepinfer_kernels import dense_cache
from deepinfer_plugin.engine_child.faulty_worker import FaultyWorker
from deepinfer_plugin.eplb.balancer import ExpertMover


class StaleWeights(FaultyWorker):
    """Rows go to the new places, and the weights stay in the old ones."""

    def plant(self) -> None:
        """Leave the transfer out."""

        def stay(mover: ExpertMover, placement: Any) -> None:
            del mover, placement
            StaleWeights.acts()

        mock.patch.object(ExpertMover, "move_weights", stay).start()


class RememberedWeights(FaultyWorker):
    """The weights arrive, and what was computed from the old ones stays in use."""

    def plant(self) -> None:
        """Forget nothing."""

        def keep() -> None:
            RememberedWeights.acts()

        mock.patch.object(dense_cache, "clear", keep).start()


class MapsBeforeWeights(FaultyWorker):
    """Rows go to the new places one step before the weights are there."""

    def plant(self) -> None:
        """Transfer with the next step."""
        move_weights, record = ExpertMover.move_weights, ExpertMover.record
        late: list[tuple[Any, Any]] = []

        def put_off(mover: ExpertMover, placement: Any) -> None:
            MapsBeforeWeights.acts()
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
