"""Which rows of every checkpoint tensor a rank holds. A share is always one run of rows, so one read from the file."""

from __future__ import annotations

import re
from math import prod

from deepinfer_kernels.engram_hash import EngramLayerHash, engram_layout
from deepinfer_plugin.errors import CheckpointError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.tensors import TensorSpec

# Weights whose outputs (vocabulary rows, heads, groups, columns) are dealt out evenly.
_BY_OUTPUTS = re.compile(
    r"(embed|head)\.weight"
    r"|.+\.attn\.(attn_sink|(wq_b|wo_a|wo_b)\.(weight|scale))"
    r"|.+\.ffn\.shared_experts\.w2\.(weight|scale)"
    r"|.+\.engram\.wkv\.(weight|scale)"
)
_EXPERT = re.compile(r".+\.ffn\.experts\.(\d+)\..+")
_ENGRAM_TABLE = re.compile(r"layers\.(\d+)\.engram\.embed\.(weight|scale)")


class Shares:
    """Rows of the tensors of one model for one rank."""

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        self._config, self._parallel = config, parallel
        self._tables = engram_table_rows(config, parallel)

    def rows(self, name: str, spec: TensorSpec) -> range | None:
        """The rows of a tensor that this rank holds; None: it holds none.

        Args:
            name: of the tensor, without ``model.``.
            spec: of the whole tensor.
        """
        if not self._parallel.stage.has_tensor(name):
            return None
        whole, ranks = spec.shape[0], self._parallel.tensor
        if (match := _ENGRAM_TABLE.fullmatch(name)) is not None:
            return self._tables[int(match[1])]
        if (match := _EXPERT.fullmatch(name)) is not None:
            if int(match[1]) not in self.experts(name):
                return None
            ranks = self._parallel.expert_outputs
        elif _BY_OUTPUTS.fullmatch(name) is None:
            return range(whole)
        if whole % ranks.size != 0:
            raise CheckpointError(
                f"load_into: tensor {name} has {whole} rows, expected a multiple of {ranks.size}, the number of ranks; "
                "choose another --tensor-parallel-size"
            )
        count = whole // ranks.size
        return range(ranks.rank * count, (ranks.rank + 1) * count)

    def experts(self, name: str) -> tuple[int, ...]:
        """Experts of the layer of tensor ``name`` whose weights are here, by slot."""
        config, parallel = self._config, self._parallel
        if name.startswith("mtp."):
            return own_experts(config.dspark_n_routed_experts, parallel)
        return own_experts(config.n_routed_experts, parallel, parallel.num_extra_experts)

    def num_bytes(self, specs: dict[str, TensorSpec]) -> int:
        """Bytes of this rank's rows of all ``specs``."""
        total = 0
        for name, spec in specs.items():
            rows = self.rows(name, spec)
            if rows is not None:
                total += len(rows) * prod(spec.shape[1:]) * spec.dtype.itemsize
        return total


def own_slots(num_experts: int, parallel: Parallel, num_extra: int = 0) -> range:
    """Places for experts on this rank: an equal run for every rank, ``num_extra`` of them for replicas."""
    count = (num_experts + num_extra) // parallel.experts.size
    return range(parallel.experts.rank * count, (parallel.experts.rank + 1) * count)


def own_experts(num_experts: int, parallel: Parallel, num_extra: int = 0) -> tuple[int, ...]:
    """Experts in these places as long as none has moved: ids ascend, and behind the last one they begin anew."""
    return tuple(slot % num_experts for slot in own_slots(num_experts, parallel, num_extra))


def own_engram_columns(config: ModelConfig, parallel: Parallel) -> range:
    """Hash columns, each with a table of its own, that this rank looks up."""
    count = config.num_engram_columns // parallel.tensor.size
    return range(parallel.tensor.rank * count, (parallel.tensor.rank + 1) * count)


def engram_table_rows(config: ModelConfig, parallel: Parallel) -> dict[int, range]:
    """By Engram layer: the rows of its table that this rank's columns address."""
    columns = own_engram_columns(config, parallel)
    return {
        layer: range(hashes.offsets[columns[0]], hashes.offsets[columns[-1]] + hashes.primes[columns[-1]])
        for layer, hashes in hash_layout(config).items()
    }


def hash_layout(config: ModelConfig) -> dict[int, EngramLayerHash]:
    """Multipliers, primes and offsets of every Engram layer."""
    if not config.engram_layer_ids:
        return {}
    return engram_layout(
        config.engram_layer_ids,
        config.engram_n_heads,
        config.engram_max_ngram_size,
        config.engram_vocab_size,
        config.engram_compressed_vocab_size,
    )
