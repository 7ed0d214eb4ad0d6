"""Which layers of the backbone a pipeline stage holds.

A cut lies in front of a layer that writes its own entries: layers that read another layer's entries, and the selection
made among them, are on that layer's stage. So stages hand on the streams and the pre-mix of every row and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_plugin.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from deepinfer_plugin.model.config import ModelConfig

PARTITION = "VLLM_PP_LAYER_PARTITION"
_LAYER = re.compile(r"layers\.(\d+)\.")
_OF_THE_LAST = re.compile(r"(norm|head)\.|mtp\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``first`` to ``end`` - 1 of ``num_layers``; without numbers the whole model."""

    first: int = 0
    end: int = 0
    num_layers: int = 0

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig, config: ModelConfig) -> Stage:
        """The stage of this worker."""
        if vllm_config.parallel_config.pipeline_parallel_size == 1:
            return cls()
        from vllm.distributed.parallel_state import get_pp_group

        group = get_pp_group()
        return stages_of(config, int(group.world_size))[int(group.rank_in_group)]

    @property
    def is_first(self) -> bool:
        """Whether rows enter the model here, as embeddings."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether rows leave the model here, as logits."""
        return self.end == self.num_layers

    def has_layer(self, layer: int) -> bool:
        """Whether a layer of the backbone is here."""
        return self.num_layers == 0 or self.first <= layer < self.end

    def has_tensor(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is used here: its layer's, else what stands in front of all or behind."""
        if (match := _LAYER.match(name)) is not None:
            return self.has_layer(int(match[1]))
        return self.is_last if _OF_THE_LAST.match(name) is not None else self.is_first


def stages_of(config: ModelConfig, num_stages: int) -> list[Stage]:
    """The layers of ``num_stages`` stages as vLLM deals them out: evenly, or as PARTITION says.

    Raises:
        ConfigError: a stage would be empty, or begins with a layer that reads entries of one before it.
    """
    if num_stages == 1:
        return [Stage()]
    from vllm.distributed.utils import get_pp_indices

    num_layers = config.num_hidden_layers
    sources = config.kv_source_layer_ids[1:]  # in front of the first one no layer has entries, and vLLM asks for some
    try:
        ends = [get_pp_indices(num_layers, rank, num_stages)[1] for rank in range(num_stages)]
    except ValueError as error:
        raise ConfigError(f"DeepseekV41ForCausalLM: {PARTITION}: {error}") from None
    if not set(ends[:-1]) <= set(sources) or len(set(ends)) < num_stages:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: pipeline_parallel_size is {num_stages}, whose stages end in front of the layers "
            f"{ends[:-1]}, expected each in front of another one of {list(sources)}, which write the entries that "
            f"layers behind them read; choose the numbers of layers with {PARTITION}, as "
            f"{config.kv_source_layer_ids[-1]},{num_layers - config.kv_source_layer_ids[-1]} for two stages"
        )
    return [Stage(first=first, end=end, num_layers=num_layers) for first, end in zip([0, *ends], ends, strict=False)]
