"""vLLM's plug for balancing, filled with ours: the model runner calls it around every step on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.eplb_utils import EPLBController

from deepinfer_plugin import metrics
from deepinfer_plugin.eplb.balancer import ExpertMover, LoadRecorder
from deepinfer_plugin.metrics import MoeBalance
from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, ParallelConfig


class ExpertBalancing(EPLBController):
    """Stands in the model runner where vLLM's own controller was. Warm-up steps neither count nor move."""

    def __init__(self, parallel_config: ParallelConfig, device: torch.device) -> None:
        super().__init__(parallel_config, device)
        self._model: DeepseekV41ForCausalLM | None = None
        self._recorder: LoadRecorder | None = None
        self._mover: ExpertMover | None = None
        self._alone = MoeBalance()
        self._num_tokens = 0

    def prepare_load(self) -> None:
        """vLLM would make its own state here."""

    def maybe_register_speculator(self, speculator: Any, speculative_config: Any, load_dummy_weights: bool) -> bool:
        """The experts of the draft blocks stay where they are."""
        del speculator, speculative_config, load_dummy_weights
        return False

    def maybe_register_model(self, model: nn.Module, model_config: ModelConfig) -> bool:
        """Begin with a model that is loaded."""
        del model_config
        if not isinstance(model, DeepseekV41ForCausalLM):
            return False
        self._model = model
        if model.load is not None:
            self._recorder = LoadRecorder(model.load, model.parallel)
        if model.parallel.balancing is not None:
            self._mover = ExpertMover(model, model.parallel.balancing)
        if model.parallel.experts.rank == 0 and model.parallel.tensor.rank == 0:
            metrics.PUBLISHER.register(metrics.BALANCE_METRICS, self._figures)
        return False

    def prepare_forward(
        self, model_config: ModelConfig, num_unpadded_tokens: int, ubatch_slices: list[Any] | None = None
    ) -> None:
        """Before a forward pass, warm-up included."""
        del model_config, ubatch_slices
        self._num_tokens = num_unpadded_tokens
        if self._model is not None and self._model.load is not None:
            self._model.load.begin(num_unpadded_tokens)

    def step(self, is_dummy: bool = False, is_profile: bool = False) -> None:
        """After a step of the engine, or one that a replica without requests runs along with the others.

        Args:
            is_dummy: its rows belong to no request.
            is_profile: it measures memory.
        """
        if self.suppressed or is_profile or self._model is None:
            return
        load = self._model.load
        if load is None or self._recorder is None:
            if not is_dummy:
                self._alone.add_step([[self._num_tokens]])
            return
        if is_dummy:
            load.counts.zero_()
        self._recorder.record()
        if self._mover is not None:
            self._mover.record(is_dummy=is_dummy)

    def _figures(self) -> dict[str, float]:
        balance = self._alone if self._recorder is None else self._recorder.balance
        found = {metrics.MOVES.name: 0.0 if self._mover is None else float(self._mover.num_moves)}
        if balance.ratio is not None:
            found[metrics.MOE_LB.name] = balance.ratio
        return found
