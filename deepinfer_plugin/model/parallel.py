"""Which part of the model this process holds, and the ranks it shares layers with.

Layers are cut by outputs only: heads, groups of heads, columns, whole experts or outputs of each, rows of a table.
Every sum runs on one rank, in the order it has there without any cut, and what ranks own is put side by side
(``collectives``). So the answer of 1, 2, 4 and 8 ranks is the same to the bit.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_plugin.eplb.options import EplbOptions
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.groups import ranks_of
from deepinfer_plugin.model.stage import Stage
from deepinfer_plugin.model.tensors import SCALE_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TENSOR_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The groups of this process.

    Attributes:
        tensor: ranks that share every layer and see the same rows.
        experts: with expert parallelism the ranks that whole routed experts are dealt out to: those of all
            data-parallel replicas, replica by replica. Alone: every rank has outputs of every expert.
        replicas: one rank of each replica whose rows meet at the experts: those with this rank's place in ``tensor``.
        balancing: how experts move between ranks; None: they stay.
        num_extra_experts: replicas of experts in every layer of the backbone.
        stage: layers that are here.
    """

    tensor: Ranks = field(default_factory=Ranks)
    experts: Ranks = field(default_factory=Ranks)
    replicas: Ranks = field(default_factory=Ranks)
    balancing: EplbOptions | None = None
    num_extra_experts: int = 0
    stage: Stage = field(default_factory=Stage)

    @classmethod
    def from_vllm(cls, vllm_config: "VllmConfig", config: ModelConfig) -> "Parallel":
        """The groups that vLLM has made for this worker."""
        options, stage = vllm_config.parallel_config, Stage.from_vllm(vllm_config, config)
        if options.tensor_parallel_size * options.data_parallel_size == 1:
            return cls(stage=stage)
        from vllm.distributed.parallel_state import get_dp_group, get_ep_group, get_tp_group

        tensor = ranks_of(get_tp_group(), share_layers=True)
        if not options.enable_expert_parallel:
            return cls(tensor=tensor, stage=stage)
        experts = ranks_of(get_ep_group())
        balancing = EplbOptions.of_engine(vllm_config)
        num_extra = 0 if balancing is None else balancing.extra_experts(config.n_routed_experts, experts.size)
        return cls(
            tensor=tensor,
            experts=experts,
            replicas=experts if tensor.is_alone else ranks_of(get_dp_group()),
            balancing=balancing,
            num_extra_experts=num_extra,
            stage=stage,
        )

    @property
    def expert_outputs(self) -> Ranks:
        """Ranks that each have an equal share of the outputs of the experts that are here."""
        return self.tensor if self.experts.is_alone else Ranks()

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas whose rows meet at the experts."""
        return self.replicas.size


def dealt_ranks(vllm_config: "VllmConfig") -> int:
    """Ranks that whole routed experts are dealt out to: all of them with expert parallelism, else 1."""
    options = vllm_config.parallel_config
    return options.tensor_parallel_size * options.data_parallel_size if options.enable_expert_parallel else 1


def equal_replicas(vllm_config: "VllmConfig", num_tokens: int) -> torch.Tensor:
    """What vLLM's forward context is told where every replica runs as many rows: it then asks no other replica."""
    return torch.full((vllm_config.parallel_config.data_parallel_size,), num_tokens, dtype=torch.int32)


def check_sizes(
    config: ModelConfig, tensor_size: int, expert_size: int, *, has_drafts: bool = False, are_replicated: bool = False
) -> None:
    """Refuse numbers of ranks that do not divide the model.

    Args:
        config: of the model.
        tensor_size: ranks that share every layer.
        expert_size: ranks that whole routed experts are dealt out to; 1: those of ``tensor_size`` cut every expert, as
            the hidden width must let them; the width inside an expert is a multiple of 32 and always does.
        has_drafts: whether the draft blocks are served too.
        are_replicated: whether replicas fill up the experts of the backbone to a number that the ranks divide.

    Raises:
        ConfigError: names the size and what it does not divide.
    """
    if tensor_size not in TENSOR_SIZES:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: tensor_parallel_size is {tensor_size}, expected one of {list(TENSOR_SIZES)}; "
            "choose another --tensor-parallel-size"
        )
    blocks = {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "vocab_size": config.vocab_size,
        "engram columns": config.num_engram_columns if config.engram_layer_ids else tensor_size,
        f"hidden_size / {SCALE_BLOCK}": config.hidden_size // SCALE_BLOCK,
        f"num_attention_heads * head_dim / {SCALE_BLOCK}": config.num_attention_heads * config.head_dim // SCALE_BLOCK,
        f"o_groups * o_lora_rank / {SCALE_BLOCK}": config.o_groups * config.o_lora_rank // SCALE_BLOCK,
    }
    for name, count in blocks.items():
        _require_division("tensor_parallel_size", tensor_size, name, count)
    experts = {} if are_replicated else {"n_routed_experts": config.n_routed_experts}
    if has_drafts:
        experts["dspark_n_routed_experts"] = config.dspark_n_routed_experts
    for name, count in experts.items():
        _require_division("the number of ranks that share the experts", expert_size, name, count)


def _require_division(size_name: str, size: int, name: str, count: int) -> None:
    if count % size != 0:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: {size_name} is {size}, expected a divisor of {name}, {count}; choose another size"
        )
