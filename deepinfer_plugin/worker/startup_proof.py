"""One forward pass at start-up that looks every operation up in the table of batch-invariant ones."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from deepinfer_batch_invariant.gaps import check_forward
from deepinfer_plugin.cache.layers import CacheLayer
from deepinfer_plugin.cache.metadata import CacheMetadata

if TYPE_CHECKING:
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM

logger = init_logger(f"vllm.{__name__}")

_POSITIONS = (0, 1, 2, 70, 71)
"""Two requests: a prompt's first tokens, and two tokens with a past longer than a key tile."""

_STARTS = (0, 3, 5)


def prove_forward(vllm_config: VllmConfig, model: "DeepseekV41ForCausalLM", device: torch.device) -> int:
    """Run the model on rows that take both parities, a window edge and a selection, and refuse unproven operations.

    Slots are -1 and blocks are the null block, so no cache entry changes.

    Returns:
        Number of operations looked up.

    Raises:
        InvarianceGapError: names every operation without a proof on this device.
    """
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    caches = {name: layer for name, layer in layers.items() if isinstance(layer, CacheLayer)}
    metadata = {name: _metadata(layer, device) for name, layer in caches.items()}
    positions = torch.tensor(_POSITIONS, dtype=torch.int64, device=device)
    token_ids = torch.arange(3, 3 + len(_POSITIONS), dtype=torch.int64, device=device)
    lookback = torch.full((len(_POSITIONS), model.config.engram_max_ngram_size - 1), 3, device=device)

    def run() -> None:
        with set_forward_context(metadata, vllm_config, num_tokens=len(_POSITIONS)), torch.inference_mode():
            hidden_states = model(token_ids, positions, lookback_ids=lookback)
            model.compute_logits(hidden_states)

    num_operations = check_forward(run, label="the forward pass")
    logger.info("Batch-invariant mode: every one of %d operations of a forward pass has a proof", num_operations)
    return num_operations


def _metadata(layer: CacheLayer, device: torch.device) -> CacheMetadata:
    num_reqs = len(_STARTS) - 1
    max_seq_len = _POSITIONS[-1] + 1
    num_blocks = max_seq_len // layer.spec.block_size + 1
    return CacheMetadata(
        query_start_loc=torch.tensor(_STARTS, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([3, max_seq_len], dtype=torch.int32, device=device),
        block_table=torch.zeros(num_reqs, num_blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.full((len(_POSITIONS),), -1, dtype=torch.int64, device=device),
        block_size=layer.spec.block_size,
        max_seq_len=max_seq_len,
    )
