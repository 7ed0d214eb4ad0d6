"""Compiles, before the first request, the kernels that serving can take: forward passes at the sizes that choose them.

A launcher chooses a kernel and a tile by the number of rows and by the width of the index scores, and Triton compiles
one variant for 1, one for multiples of 16 and one for other integers. So a pass runs on both sides of every limit in
the tables of ``tiling``, and one for every power of two of the context. That is some hundred kernels of a second each
on a first start, so it is done where ``DEEPINFER_JIT_CACHE_DIR`` names a folder that keeps them; a later start only
loads them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from deepinfer_kernels import tiling
from deepinfer_kernels.log_softmax import token_log_softmax
from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.sample_tokens import sample_tokens, top_tokens
from deepinfer_kernels.sum_smaller_probs import sum_smaller_probs
from deepinfer_plugin.cache.layers import CacheLayer
from deepinfer_plugin.cache.metadata import CacheMetadata
from deepinfer_plugin.worker.startup_proof import hidden_states_of

if TYPE_CHECKING:
    from deepinfer_plugin.draft.drafter import DSparkV41DraftModel
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM

logger = init_logger(f"vllm.{__name__}")

_FEW_ROWS = 5
_SHORTEST_CONTEXT = 64
_PROGRESS_S = 5.0  # between two progress lines

Pass = tuple[int, int]
"""Rows of one request, and the longest context of the step."""


def row_limits(num_experts: int, top_k: int) -> list[int]:
    """Every number of rows up to which a launcher of the forward pass takes one kernel or tile, ascending."""
    by_rows = (
        tiling.MXFP8_TILES,
        tiling.MXFP8_SPLIT_TILES,
        tiling.PLAIN_TILES,
        tiling.WIDE_TILES,
        tiling.WIDE_SPLIT_TILES,
        tiling.HC_MIX_TILES,
        tiling.INDEX_ROWS,
        tiling.ATTENTION_HEADS,
    )
    limits = {int(entry[0]) for table in by_rows for entry in table}
    limits |= {int(rows) for _, rows in tiling.NARROW_ROWS_BY_OUTPUTS}
    # The experts' tables count the average rows of an expert, their routing (token, slot) pairs.
    limits |= {int(average) * num_experts // top_k for average, _ in tiling.EXPERT_TILES}
    limits.add(tiling.ROUTE_ONE_PROGRAM // top_k)
    return sorted(limits)


def warm_passes(max_rows: int, max_model_len: int, num_experts: int, top_k: int) -> list[Pass]:
    """Passes that together take every kernel variant; the longest first, so that memory is claimed once.

    Args:
        max_rows: most rows of a step, ``max_num_batched_tokens``.
        max_model_len: longest context.
        num_experts: routed experts of a layer.
        top_k: experts of a token.
    """
    rows = {1, max_rows, max_rows - 1}
    for limit in row_limits(num_experts, top_k):
        rows |= {limit, limit + 1}
    passes = {(count, min(count, max_model_len)) for count in rows if 0 < count <= max_rows}
    length = _SHORTEST_CONTEXT
    while length < 2 * max_model_len:
        passes.add((min(_FEW_ROWS, max_rows), min(length, max_model_len)))
        length *= 2
    return sorted(passes, reverse=True)


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles meanwhile, those not found in its cache folder."""
    from triton import knobs

    compiled: list[str] = []
    before = knobs.compilation.listener

    def listen(**facts: Any) -> None:
        if before is not None:
            before(**facts)
        if not facts["cache_hit"]:
            compiled.append(str(getattr(facts["src"], "name", "kernel")))

    knobs.compilation.listener = listen
    try:
        yield compiled
    finally:
        knobs.compilation.listener = before


def run_passes(passes: list[Pass], run: Callable[[Pass], None], compiled: list[str]) -> None:
    """Run every pass, with a log line at the start, while kernels compile, and at the end.

    Args:
        passes: what to run, in order.
        run: runs one.
        compiled: grows as kernels are compiled.
    """
    begin_s = last_s = time.monotonic()
    logger.info("Kernels: 0 of %d passes", len(passes))
    for index, each in enumerate(passes, start=1):
        run(each)
        now_s = time.monotonic()
        if now_s - last_s >= _PROGRESS_S or index == len(passes):
            elapsed_s = now_s - begin_s
            logger.info("Kernels: %d of %d passes, %d compiled, %.0f s", index, len(passes), len(compiled), elapsed_s)
            last_s = now_s


def warm_up(
    vllm_config: VllmConfig,
    model: "DeepseekV41ForCausalLM",
    device: torch.device,
    drafter: "DSparkV41DraftModel | None" = None,
) -> int:
    """Compile what serving takes; slots are -1 and blocks the null block, so no cache entry changes.

    Of a drafter that is the context of verified tokens; vLLM runs the pass over the blocks itself where it captures
    graphs.

    Returns:
        Number of kernels compiled; 0 where the cache folder had them all.
    """
    config = model.config
    passes = warm_passes(
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.model_config.max_model_len,
        config.n_routed_experts,
        config.num_experts_per_tok,
    )

    def run(each: Pass) -> None:
        _forward(vllm_config, model, device, *each)
        if drafter is not None:
            _draft_context(drafter, each[0], device)

    with counting_compilations() as compiled:
        run_passes(passes, run, compiled)
        draw_once(config.vocab_size, device)
    torch.cuda.empty_cache()
    return len(compiled)


def _forward(
    vllm_config: VllmConfig, model: "DeepseekV41ForCausalLM", device: torch.device, num_rows: int, max_seq_len: int
) -> None:
    """One pass on the last rows of a request of ``max_seq_len`` tokens."""
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    metadata = {
        name: _metadata(layer, num_rows, max_seq_len, device)
        for name, layer in layers.items()
        if isinstance(layer, CacheLayer)
    }
    positions = torch.arange(num_rows, dtype=torch.int64, device=device) + (max_seq_len - num_rows)
    positions.clamp_(min=0)
    token_ids = torch.full((num_rows,), 3, dtype=torch.int64, device=device)
    lookback = torch.full((num_rows, model.config.engram_max_ngram_size - 1), 3, device=device)
    with set_forward_context(metadata, vllm_config, num_tokens=num_rows), torch.inference_mode():
        images: dict[str, torch.Tensor] = {}
        if "vision" in model.checkpoint_groups:
            is_image = torch.zeros(num_rows, dtype=torch.bool, device=device)
            images = {"inputs_embeds": model.embed_input_ids(token_ids), "is_image": is_image}
        hidden_states = hidden_states_of(model(token_ids, positions, lookback_ids=lookback, **images))
        model.compute_logits(hidden_states[: min(num_rows, vllm_config.scheduler_config.max_num_seqs)])


def draw_once(vocab_size: int, device: torch.device) -> None:
    """Draw, restrict and score two rows of equal logits; no kernel of the sampler follows the number of rows."""
    logits = torch.zeros(2, vocab_size, device=device)
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    half = torch.full((2,), 0.5, device=device)
    for top_k in (numbers + 1, numbers.int() + 1):  # that of a request's extras, and vLLM's
        restrict_logits(logits, top_k, half, half)
    token_ids = sample_tokens(logits, half, numbers, numbers, numbers)
    sum_smaller_probs(logits, token_ids)
    token_log_softmax(logits, token_ids[:, None])
    top_tokens(logits, 1)


def _draft_context(drafter: "DSparkV41DraftModel", num_rows: int, device: torch.device) -> None:
    """The context that drafts read of so many verified tokens."""
    config = drafter.config
    width = len(config.dspark_target_layer_ids) * config.hidden_size
    taps = torch.ones(num_rows, width, dtype=drafter.arithmetic.activation_dtype, device=device)
    slots = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        states = drafter.combine_hidden_states(taps)
        drafter.precompute_and_store_context_kv(
            states, torch.zeros_like(slots), [slots] * config.num_nextn_predict_layers
        )


def _metadata(layer: CacheLayer, num_rows: int, max_seq_len: int, device: torch.device) -> CacheMetadata:
    num_blocks = max_seq_len // layer.spec.block_size + 1
    return CacheMetadata(
        query_start_loc=torch.tensor([0, num_rows], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([max_seq_len], dtype=torch.int32, device=device),
        block_table=torch.zeros(1, num_blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
        block_size=layer.spec.block_size,
        max_seq_len=max_seq_len,
    )
