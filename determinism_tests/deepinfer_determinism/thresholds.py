"""Every place in our code where a tile, a path or a chunk is chosen from a quantity of the batch.

Each has its function, its value, and a reading of the function's arguments that says which side a call, or a row of
it, lies on. ``test_thresholds.py`` finds the branches on batch quantities in the sources and fails on one that is not
listed here, and the quick set must reach both sides of every threshold. Those of the launchers of Triton kernels are in
``thresholds_device.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_kernels import tiling

Arguments = Mapping[str, Any]
Sides = Iterable[bool]

ROW_TILE, KEY_TILE = tiling.REFERENCE_ROW_TILE, tiling.REFERENCE_KEY_TILE
KERNELS = "deepinfer_kernels"
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One choice that follows a quantity of the batch.

    Attributes:
        name: in the coverage report.
        function: import path ``module:function`` or ``module:Class.method`` whose calls are watched.
        value: the quantity and what it is compared with, in words.
        sides: from the arguments of a call, True for every time the quantity reached the value.
        device: ``cpu`` for what only the references do, ``cuda`` for the launchers of kernels, else ``any``.
        unreachable: why the engines of the harness reach one side only; empty where they must reach both.
    """

    name: str
    function: str
    value: str
    sides: Callable[[Arguments], Sides]
    device: str = "any"
    unreachable: str = ""

    def is_on(self, device: str) -> bool:
        """Whether a run on a device of this type comes to the choice."""
        return self.device in ("any", device)

    @property
    def where(self) -> str:
        """File and function."""
        module, _, function = self.function.partition(":")
        return f"{module.replace('.', '/')}.py: {function}"


def _rows(arguments: Arguments, name: str) -> int:
    return int(arguments[name].shape[0])


def _sampled_at_once(a: Arguments) -> Sides:
    num_rows, vocab_size = a["logits"].shape
    return (num_rows > -(-tiling.SAMPLING_ELEMENTS // vocab_size),) if vocab_size > 0 else ()


def _attention_chunk(a: Arguments) -> Sides:
    from deepinfer_kernels.sparse_attention import reference

    head_dim = a["q"].shape[2]
    return (_rows(a, "q") > max(1, reference._KEY_ELEMENTS // (KEY_TILE * head_dim)),)


def _attention_unique(a: Arguments) -> Sides:
    from deepinfer_kernels.sparse_attention import reference

    return (a["slots"].numel() >= reference._UNIQUE_FROM,)


def _index_chunks(a: Arguments) -> tuple[int, int, int, int]:
    """Rows, rows of a chunk, key tiles, key tiles of a chunk, as the function computes them."""
    from deepinfer_kernels.indexer_logits import reference

    num_tokens, _, head_dim = a["q"].shape
    rows = max(1, min(num_tokens, reference._KEY_ELEMENTS // (KEY_TILE * head_dim)))
    tiles = max(1, reference._KEY_ELEMENTS // (rows * KEY_TILE * head_dim))
    return num_tokens, rows, -(-a["max_entries"] // KEY_TILE), tiles


def _index_row_chunk(a: Arguments) -> Sides:
    num_tokens, rows, _, _ = _index_chunks(a)
    return (num_tokens > rows,)


def _index_tile_chunk(a: Arguments) -> Sides:
    _, _, num_tiles, tiles = _index_chunks(a)
    return (num_tiles > tiles,)


def _pair_follows(a: Arguments) -> Sides:
    """For every odd position: its even token is the row before (True) or in the ring (False)."""
    positions, req_idx = a["positions"].tolist(), a["req_idx"].tolist()
    return [
        row > 0 and req_idx[row - 1] == req_idx[row] and positions[row - 1] == position - 1
        for row, position in enumerate(positions)
        if position % 2 == 1
    ]


def _ring_overflows(a: Arguments) -> Sides:
    """For every request of the call: it has more rows than the ring."""
    ring = a["state_cache"].shape[1]
    req_idx = a["req_idx"].tolist()
    return [req_idx.count(request) > ring for request in sorted(set(req_idx))]


def _expert_counts(a: Arguments) -> Sides:
    return [count > 0 for count in a["counts"]]


def _expert_tiles(a: Arguments) -> Sides:
    return [count >= ROW_TILE for count in a["counts"] if count > 0]


def _needs_processing(a: Arguments) -> Sides:
    return (bool(a["self"].needs_logits_processing[a["idx_mapping_np"]].any()),)


def _restricts(a: Arguments) -> Sides:
    states, chosen = a["self"].sampling_states, a["idx_mapping_np"]
    is_ranked = (states.top_k.np[chosen] < states.vocab_size) | (states.top_p.np[chosen] < 1.0)
    return (bool(((states.min_p.np[chosen] > 0.0) | (is_ranked & (not a["skip_top_k_top_p"]))).any()),)


def _prompt_chunk(a: Arguments) -> Sides:
    """For every request that scores its prompt: rows of this step against the rows scored at once."""
    from deepinfer_plugin.sampling.prompt_logprobs import ROWS_AT_ONCE

    batch, scored = a["input_batch"], a["self"].token_id_scores
    return [
        int(batch.num_scheduled_tokens[number]) > ROWS_AT_ONCE
        for number, request in enumerate(batch.req_ids)
        if request in scored
    ]


def _best_prompt_chunk(a: Arguments) -> Sides:
    """The same for requests that ask for the best tokens of every prompt row."""
    from deepinfer_plugin.sampling.prompt_logprobs import ROWS_AT_ONCE

    batch, asks = a["input_batch"], a["self"].uses_prompt_logprobs
    return [
        int(batch.num_scheduled_tokens[number]) > ROWS_AT_ONCE
        for number, slot in enumerate(batch.idx_mapping_np)
        if asks[slot]
    ]


def _in_step(a: Arguments) -> Sides:
    """For every row that has a predecessor: the nearest one is a row of the step (True) or in the history."""
    positions, starts = a["positions"].tolist(), set(a["query_start_loc"].tolist())
    return [row not in starts for row, position in enumerate(positions) if position > 0]


def _window_full(a: Arguments) -> Sides:
    return (a["positions"] >= a["window"] - 1).tolist()  # type: ignore[no-any-return]


def _second_page(a: Arguments) -> Sides:
    return (a["positions"] >= a["block_size"]).tolist()  # type: ignore[no-any-return]


_INDEX = f"{KERNELS}.indexer_logits.reference:indexer_logits_reference"
_ATTENTION = f"{KERNELS}.sparse_attention.reference"
_TOPK = f"{KERNELS}.indexer_topk.reference"
_TILES = f"{KERNELS}.row_tiles"
_COMPRESS = f"{KERNELS}.kv_compress.reference:compress_pairs_reference"
_EXPERTS = f"{KERNELS}.moe_experts.reference:_grouped_matmul"

THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        name="rows of a product",
        function=f"{_TILES}:tiled_matmul",
        value=f"rows >= REFERENCE_ROW_TILE ({ROW_TILE})",
        sides=lambda a: (_rows(a, "x") >= ROW_TILE,),
        device=CPU,
    ),
    Threshold(
        name="rest of a product",
        function=f"{_TILES}:tiled_matmul",
        value=f"rows % REFERENCE_ROW_TILE ({ROW_TILE}) == 0",
        sides=lambda a: (_rows(a, "x") % ROW_TILE == 0,),
        device=CPU,
    ),
    Threshold(
        name="start of the operands",
        function=f"{_TILES}:_aligned",
        value="contiguous rows start on a multiple of 64 bytes",
        sides=lambda a: (a["x"].is_contiguous() and a["x"].data_ptr() % 64 == 0,),
        device=CPU,
    ),
    Threshold(
        name="rows of an attention chunk",
        function=f"{_ATTENTION}:sparse_attention_reference",
        value="rows > 2^19 / (64 head_dim)",
        sides=_attention_chunk,
        device=CPU,
    ),
    Threshold(
        name="records unpacked once",
        function=f"{_ATTENTION}:_gather",
        value="slots >= _UNIQUE_FROM (1024)",
        sides=_attention_unique,
        device=CPU,
    ),
    Threshold(
        name="rows of an index chunk",
        function=_INDEX,
        value="rows > 2^18 / (64 index_head_dim)",
        sides=_index_row_chunk,
        device=CPU,
    ),
    Threshold(
        name="key tiles of an index chunk",
        function=_INDEX,
        value="key tiles > 2^18 / (rows 64 index_head_dim)",
        sides=_index_tile_chunk,
        device=CPU,
    ),
    Threshold(
        name="key tiles of the longest context",
        function=_INDEX,
        value=f"entries of the longest context > REFERENCE_KEY_TILE ({KEY_TILE})",
        sides=lambda a: (a["max_entries"] > KEY_TILE,),
        device=CPU,
    ),
    Threshold(
        name="keys shared by a lone request",
        function=_INDEX,
        value="requests of the step > 1",
        sides=lambda a: (len(set(a["req_idx"].tolist())) > 1,),
        device=CPU,
    ),
    Threshold(
        name="top-k against the longest context",
        function=f"{_TOPK}:topk_indices_reference",
        value="entries of the longest context >= k",
        sides=lambda a: (a["scores"].shape[1] >= a["k"],),
        device=CPU,
    ),
    Threshold(
        name="candidate blocks against the longest context",
        function=f"{_TOPK}:candidate_blocks_reference",
        value="blocks of the longest context > candidate_topk_blocks",
        sides=lambda a: (-(-a["scores"].shape[1] // a["block_size"]) > a["num_blocks"],),
        device=CPU,
    ),
    Threshold(
        name="last candidate block of the longest context",
        function=f"{_TOPK}:candidate_blocks_reference",
        value="entries of the longest context % candidate_block_size == 0",
        sides=lambda a: (a["scores"].shape[1] % a["block_size"] == 0,),
        device=CPU,
    ),
    Threshold(
        name="even token of a pair",
        function=_COMPRESS,
        value="it is the row before, else in the ring of the request",
        sides=_pair_follows,
        device=CPU,
    ),
    Threshold(
        name="rows kept in the ring",
        function=_COMPRESS,
        value="rows of the request in this step > rows of the ring",
        sides=_ring_overflows,
        device=CPU,
    ),
    Threshold(
        name="experts without rows",
        function=_EXPERTS,
        value="rows of an expert > 0",
        sides=_expert_counts,
        device=CPU,
    ),
    Threshold(
        name="rows of an expert",
        function=_EXPERTS,
        value=f"rows of an expert >= REFERENCE_ROW_TILE ({ROW_TILE})",
        sides=_expert_tiles,
        device=CPU,
    ),
    Threshold(
        name="rows restricted at once",
        function=f"{KERNELS}.restrict_logits.reference:restrict_logits_reference",
        value=f"rows > SAMPLING_ELEMENTS ({tiling.SAMPLING_ELEMENTS}) / vocab_size, rounded up",
        sides=_sampled_at_once,
        device=CPU,
    ),
    Threshold(
        name="rows sampled at once",
        function=f"{KERNELS}.sample_tokens.reference:sample_tokens_reference",
        value=f"rows > SAMPLING_ELEMENTS ({tiling.SAMPLING_ELEMENTS}) / vocab_size, rounded up",
        sides=_sampled_at_once,
        device=CPU,
    ),
    Threshold(
        name="rows summed at once",
        function=f"{KERNELS}.sum_smaller_probs.reference:sum_smaller_probs_reference",
        value=f"rows > SAMPLING_ELEMENTS ({tiling.SAMPLING_ELEMENTS}) / vocab_size, rounded up",
        sides=_sampled_at_once,
        device=CPU,
    ),
    Threshold(
        name="logits processed",
        function="deepinfer_plugin.sampling.sampler:DeepInferSampler.apply_sampling_params",
        value="a request of the step asks for processing",
        sides=_needs_processing,
    ),
    Threshold(
        name="logits restricted",
        function="deepinfer_plugin.sampling.sampler:DeepInferSampler._restricts",
        value="a request of the step has min-p, top-k or top-p",
        sides=_restricts,
    ),
    Threshold(
        name="best tokens asked for",
        function="deepinfer_plugin.sampling.logprobs:score_rows",
        value="most log-probabilities asked for in the step reach the vocabulary",
        sides=lambda a: (a["num_top"] >= a["logits"].shape[1],),
    ),
    Threshold(
        name="ids asked for beside best tokens",
        function="deepinfer_plugin.sampling.logprobs:_with_custom_ids",
        value="ids that a request of the step names > best tokens that another asks for",
        sides=lambda a: (a["custom_ids"].shape[1] > a["ids"].shape[1] - 1,),
    ),
    Threshold(
        name="prompt rows scored at once",
        function="deepinfer_plugin.sampling.prompt_logprobs:PromptLogprobs.compute_prompt_token_id_logprobs",
        value="prompt rows of a request in this step > ROWS_AT_ONCE (256)",
        sides=_prompt_chunk,
    ),
    Threshold(
        name="prompt rows with best tokens scored at once",
        function="deepinfer_plugin.sampling.prompt_logprobs:PromptLogprobs.compute_prompt_logprobs",
        value="prompt rows of a request in this step > ROWS_AT_ONCE (256)",
        sides=_best_prompt_chunk,
    ),
    Threshold(
        name="entries of the longest context",
        function="deepinfer_plugin.model.indexer:Indexer._scores",
        value="tokens of the longest context >= compress_ratio",
        sides=lambda a: (a["step"].max_seq_len >= a["self"].ratio,),
    ),
    Threshold(
        name="forced tokens",
        function="deepinfer_plugin.sampling.force:ForcedTokens.apply",
        value="a request of the step is forced",
        sides=lambda a: (bool(a["self"]._is_forced_np[a["ctx"].idx_mapping_np].any()),),
    ),
    Threshold(
        name="predecessor of a row",
        function="deepinfer_plugin.worker.model_state:lookback_ids",
        value="it is a row of the step, else in the history",
        sides=_in_step,
    ),
    Threshold(
        name="full window",
        function=f"{KERNELS}.swa_indices.reference:window_slots_reference",
        value="position >= sliding_window - 1",
        sides=_window_full,
        device=CPU,
    ),
    Threshold(
        name="second page of the window",
        function=f"{KERNELS}.swa_indices.reference:window_slots_reference",
        value="position >= block_size",
        sides=_second_page,
        device=CPU,
    ),
)

_STREAM = "on which stream of a GPU the same launches run"
_WHERE_LOGITS = "whether the graph or what follows it computes the same logits; the relation with graphs compares"
_UNUSED = "a shortcut where no row of the step asks for it; a row that does not ask keeps its logits on either side"
_WARM_UP = "sizes compiled at start, on rows of nobody"
_IS_COUNTED = "whether the layer counts the rows of its experts, fixed at start-up"
_NO_ROWS = "an empty call does nothing; no step of an engine is empty"

# Places where what looks like a choice by a batch quantity is none: file and function to the reason.
REVIEWED: Mapping[str, str] = {
    "deepinfer_plugin/sampling/room.py: require_room": "lists of one request, which it refuses",
    "deepinfer_kernels/expert_places/__init__.py: _check_counts": _IS_COUNTED,
    "deepinfer_kernels/expert_places/reference.py: expert_places_reference": _IS_COUNTED,
    "deepinfer_kernels/moe_experts/reference.py: moe_experts_reference": _NO_ROWS,
    "deepinfer_kernels/peer_exchange/__init__.py: _exchange": _NO_ROWS,
    "deepinfer_kernels/sampling_noise/reference.py: random_words_reference": _NO_ROWS,
    "deepinfer_kernels/moe_experts/reference.py: _dense_weights": "the size of the weights, fixed by the checkpoint",
    "deepinfer_kernels/log_softmax/reference.py: _sum_of_chunk": "the vocabulary, fixed by the checkpoint",
    "deepinfer_kernels/sparse_attention/arguments.py: two_lists": "the kind of layer, fixed by the checkpoint",
    "deepinfer_kernels/sparse_attention/reference.py: _attend": "window and index_topk, fixed by the checkpoint",
    "deepinfer_kernels/dense_attention/reference.py: dense_attention_reference": "the keys of one image, on both sides "
    "of a tile in the variants of its operation",
    "deepinfer_plugin/model/weights.py: load_into": "the rows of a tensor of the checkpoint that this rank keeps",
    "deepinfer_kernels/engram_hash/layout.py: _draw_primes": "the configuration, at start-up",
    "deepinfer_plugin/model/flash.py: DeepseekV41ForCausalLM._decode": "the step keeps no row",
    "deepinfer_plugin/replay/hits.py: _limited": "the request's own length",
    "deepinfer_plugin/replay/settings.py: EncoderPolicy.parse": "the text of a variable",
    "deepinfer_plugin/worker/model_state.py: DeepInferModelState.custom_sampler": "drafts a step, fixed at start-up",
    "deepinfer_plugin/sampling/extra_states.py: Blacklist.apply": _UNUSED,
    "deepinfer_plugin/sampling/extra_states.py: ForcedTopK.apply": _UNUSED,
    "deepinfer_plugin/sampling/sampler.py: DeepInferSampler._unread": "zeros that no row of the step looks at",
    "deepinfer_plugin/sampling/extras.py: _range": "the text of a parameter",
    "deepinfer_plugin/sampling/extras.py: _short": "the text of an error",
    "deepinfer_plugin/sampling/sums.py: take_column": "whether the request asked for the sums",
    "deepinfer_plugin/worker/scheduled_verification.py: _verification_only": "whether a step teaches its time",
    "deepinfer_plugin/worker/warm_up.py: warm_passes": _WARM_UP,
    "deepinfer_plugin/worker/warm_up.py: run_passes": _WARM_UP,
    "deepinfer_plugin/worker/warm_up.py: _forward": _WARM_UP,
    "deepinfer_plugin/model/side_stream.py: SideStream.fork": _STREAM,
    "deepinfer_plugin/model/side_stream.py: SideStream.join": _STREAM,
    "deepinfer_plugin/cache/quiet_steps.py: _allocate": "the request's own length, against borders of blocks",
    "deepinfer_plugin/model/graph_logits.py: GraphLogits.capture": _WHERE_LOGITS,
    "deepinfer_plugin/model/graph_logits.py: GraphLogits.expect": _WHERE_LOGITS,
    "deepinfer_plugin/model/graph_logits.py: GraphLogits.take": _WHERE_LOGITS,
    "deepinfer_plugin/model/weights.py: parameter_specs": "the checkpoint, at start-up",
    "deepinfer_plugin/model/weights.py: _others": "the text of an error",
}
