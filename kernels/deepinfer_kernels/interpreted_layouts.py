"""Layouts at every border through the kernels of caches, index, attention and experts, under ``checked_bounds``.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.interpreted_layouts`` raises on the first access outside the arguments.
Rows that only pad a batch, slots and requests of -1, empty lists, tables whose unused entries name no page. Results are
not looked at.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_logits.triton_kernel import indexer_logits_triton
from deepinfer_kernels.indexer_logits.triton_kernel_fp32 import indexer_logits_fp32_triton
from deepinfer_kernels.indexer_topk.triton_candidates import candidate_blocks_triton, mask_to_candidates_triton
from deepinfer_kernels.indexer_topk.triton_kernel import topk_indices_triton
from deepinfer_kernels.interpreted_bounds import checked_bounds
from deepinfer_kernels.kv_compress.triton_kernel import compress_pairs_triton
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.kv_store.reference import make_inputs as make_cache
from deepinfer_kernels.kv_store.triton_kernel import gather_records_triton, store_records_triton
from deepinfer_kernels.lookback_ids.reference import make_inputs as make_step
from deepinfer_kernels.lookback_ids.triton_kernel import lookback_ids_triton
from deepinfer_kernels.moe_experts.reference import make_inputs as make_experts
from deepinfer_kernels.moe_experts.route_kernel import route_pairs
from deepinfer_kernels.moe_experts.triton_kernel import moe_experts_triton
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.sparse_attention.triton_kernel import sparse_attention_triton
from deepinfer_kernels.sparse_attention.triton_kernel_fp32 import sparse_attention_fp32_triton
from deepinfer_kernels.swa_indices.triton_kernel import entry_slots_triton, window_slots_triton

ROWS = (1, 2, 3, 15, 16, 17, 33)
# In a table behind what a request uses, and in a list of a row that only pads the batch.
NO_PAGE = 0x7B7B7B7B


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(21)


def _padded_requests(num_rows: int, num_reqs: int) -> torch.Tensor:
    """Requests of ``num_rows`` rows in order, the last third of the rows padding."""
    requests = torch.arange(num_rows) * num_reqs // num_rows
    requests[num_rows - num_rows // 3 :] = -1
    return requests.int()


def _table(lengths: list[int], page: int, num_pages: int, unused: int) -> torch.Tensor:
    """A block table whose requests hold ``lengths`` entries, pages handed out from the last one down."""
    table = torch.full((len(lengths), -(-max(lengths) // page)), unused, dtype=torch.int32)
    free = iter(range(num_pages - 1, -1, -1))
    for row, length in zip(table, lengths, strict=True):
        for place in range(-(-length // page)):
            row[place] = next(free)
    return table


def _slots_of_windows() -> None:
    page, last = 8, 63
    borders = torch.tensor([0, page - 1, page, last, 31, 32, 5, -1])
    for num_rows in ROWS:
        positions = borders.repeat(5)[:num_rows]
        request = _padded_requests(num_rows, 2)
        # A request that ends at its last page, and one that has a single page.
        table = _table([last + 1, page], page, 9, NO_PAGE)
        positions = torch.where(request == 1, positions.clamp(max=page - 1), positions)
        positions = positions.masked_fill(request < 0, 1 << 40)  # left over from another batch
        for window in (1, 8, 33):
            for floor in (0, 30, -5):
                window_slots_triton(positions, request, table, page, window, torch.full_like(positions, floor))


def _slots_of_entries() -> None:
    page = 4
    for num_rows in ROWS:
        request = _padded_requests(num_rows, 2)
        for length in (1, 3, 512, 513):
            indices = torch.randint(-1, 2 * page, (num_rows, length), generator=generator(), dtype=torch.int32)
            indices[:, -1] = 2 * page - 1
            indices[request < 0] = NO_PAGE
            entry_slots_triton(indices, request, _table([2 * page, 2 * page], page, 4, NO_PAGE), page)


def _predecessors() -> None:
    """Requests at the start and at the end of the history, and rows left over from another batch."""
    depth, max_model_len = 3, 12
    for num_reqs in (1, 3, 130):
        lengths = [1 + index % 3 for index in range(num_reqs)]
        contexts = [(0, 1, max_model_len - 3)[index % 3] for index in range(num_reqs)]
        for num_padding in (0, 33):
            step = make_step(lengths, contexts, num_padding, max_model_len, generator())
            step["positions"][sum(lengths) :: 2] = 1 << 40
            wide = torch.empty((sum(lengths) + num_padding, depth + 2), dtype=torch.int64)
            lookback_ids_triton(**step, out=wide[:, 1:-1])


def _records() -> None:
    formats = ((RecordFormat.FP32, 24), (RecordFormat.MXFP8, 96), (RecordFormat.NVFP4, 48), (RecordFormat.MXFP4, 96))
    for fmt, width in formats:
        for block_size, padding in ((1, 0), (8, 0), (8, 16)):
            cache, x = make_cache(40 // block_size, block_size, width, fmt, generator(), "cpu", padding)
            for slots in ([39], [-1], [-1, 0, 7, 8, 39, -1]):
                chosen = torch.tensor(slots)
                store_records_triton(cache, chosen, x[: len(slots)], fmt)
                gather_records_triton(cache, chosen, width, fmt, torch.float32)


def _pairs() -> None:
    width, ring = 12, 4
    memory = torch.zeros(3, ring * 2 * width + 5)  # the blocks of other caches lie between
    state = memory[:, : ring * 2 * width].view(3, ring, 2 * width)
    for num_rows in ROWS:
        request = _padded_requests(num_rows, min(num_rows, 3))
        for start in (0, 1, ring - 1, 2 * ring):
            rows = torch.arange(num_rows)
            positions = (start + rows).masked_fill(request < 0, 1 << 40)
            latent = torch.randn(num_rows, width)
            for blocks in ([2, 1, 0], [0, 0, 0]):  # a request without a block writes to the null block
                arguments = (latent, latent, positions, request, state, torch.tensor(blocks, dtype=torch.int32))
                compress_pairs_triton(*arguments, out_dtype=torch.float32)


def _index_scores() -> None:
    page, head_dim, fmt = 64, 32, RecordFormat.MXFP4
    lengths = [200, 1, 128]
    table = _table(lengths, page, 7, NO_PAGE)
    cache, _ = make_cache(7, page, head_dim, fmt, generator(), "cpu", 32)
    counts = torch.tensor([0, 200, 1, 127, 31, 128, 129, 32, 64])
    for num_rows in (1, 3, 17):
        request = _padded_requests(num_rows, 3)
        longest = torch.tensor(lengths)[request.clamp(min=0).long()]
        for first in (0, 1):
            visible = torch.minimum(longest, counts.repeat(3)[first : first + num_rows]).masked_fill(request < 0, 0)
            for max_entries in sorted({max(int(visible.max()), 1), 257}):
                q, weights = torch.zeros(num_rows, 3, head_dim), torch.zeros(num_rows, 3)
                arguments = (cache, table, request, visible, max_entries)
                indexer_logits_fp32_triton(q, weights, *arguments, fmt=fmt, round_bf16=False)
                indexer_logits_triton(q.bfloat16(), weights.bfloat16(), *arguments, round_bf16=True, rows=8)


def _selections() -> None:
    """With small chunks, so that narrow rows take several passes: every kind of scores with every number of entries."""
    with patch.object(tiling, "TOPK_CHUNK", 64), patch.object(tiling, "TOPK_LARGEST", 16):
        for num_entries in (1, 64, 65, 257):
            scores = torch.randn(num_entries, generator=generator())
            kinds = (scores, torch.zeros_like(scores), torch.full_like(scores, torch.nan), -torch.inf * scores.abs())
            rows = torch.stack(kinds).repeat(4, 1)
            visible = torch.tensor([0, 1, num_entries - 1, num_entries]).repeat_interleave(4)
            topk_indices_triton(rows, 16, visible)
            mask_to_candidates_triton(rows, candidate_blocks_triton(rows, visible, 8, 5), 5)


def _lists(num_rows: int, length: int, num_slots: int) -> list[torch.Tensor]:
    """Slot lists: empty, full of the last slot, with holes."""
    last = torch.full((num_rows, length), num_slots - 1)
    holes = last.masked_fill(torch.arange(length) % 3 == 0, -1)
    return [torch.full_like(last, -1), last, holes]


def _attention() -> None:
    head_dim, fmts = 64, (RecordFormat.MXFP8, RecordFormat.NVFP4)
    caches = [make_cache(3, 8, head_dim, fmt, generator(), "cpu", 32)[0] for fmt in fmts]
    sink = torch.zeros(3)
    for num_rows in (1, 2):
        q = torch.zeros(num_rows, 3, head_dim)
        angles = torch.zeros(num_rows, 8)
        for length in (1, 64, 65):
            for window, entries in zip(_lists(num_rows, length, 24), _lists(num_rows, 70, 24)[::-1], strict=True):
                both = [
                    SlotList(kv_cache=cache, slots=slots, fmt=fmt)
                    for cache, slots, fmt in zip(caches, (window, entries), fmts, strict=True)
                ]
                for parts in (both[:1], both):
                    sparse_attention_triton(q.bfloat16(), parts, sink, 1.0, cos=angles, sin=angles)
                    sparse_attention_fp32_triton(q, parts, sink, 1.0, round_p=False, cos=None, sin=None)


def _routes() -> None:
    """Tiles of every size, and with a small limit all three launches."""
    num_experts, top_k = 5, 3
    for num_rows in ROWS:
        random = torch.randint(-1, num_experts, (num_rows, top_k), generator=generator(), dtype=torch.int32)
        for ids in (random, torch.full_like(random, num_experts - 1), torch.full_like(random, -1)):
            for block_m in (16, 64):
                for limit in (4096, 1):
                    with patch.object(tiling, "ROUTE_ONE_PROGRAM", limit):
                        route_pairs(ids, num_experts, block_m)


def _experts() -> None:
    for num_rows in (1, 17, 33):
        # 96 and 160: no whole blocks of words, and outputs behind the end of a tile.
        inputs = make_experts(num_rows, 2, 96, 160, 2, torch.bfloat16, generator(), "cpu")
        for ids in (inputs["topk_idx"], torch.ones_like(inputs["topk_idx"]), torch.full_like(inputs["topk_idx"], -1)):
            x, _, weights, w13, w13_scale, w2, w2_scale = inputs.values()
            arguments = (x, ids, weights, w13, w13_scale, w2, w2_scale, None)
            moe_experts_triton(*arguments, limit=7.0, quantize_input=True)


def _experts_by_outputs() -> None:
    """Shares of 5, 32 and 128 columns: in order, in units that are turned alone, and in whole blocks."""
    for num_rows in (1, 33, 130):
        for num_shares, inner in ((32, 160), (5, 160), (2, 256)):
            inputs = make_experts(num_rows, 2, 96, inner, 2, torch.bfloat16, generator(), "cpu")
            x, ids, weights, *whole = inputs.values()
            w13, w13_scale, w2, w2_scale = (part[:, : part.shape[1] // num_shares].contiguous() for part in whole)
            arguments = (x, ids, weights, w13, w13_scale, w2, w2_scale, None)
            gather = partial(torch.Tensor.repeat, repeats=(1, num_shares))
            moe_experts_triton(*arguments, limit=7.0, quantize_input=True, gather=gather)


LAYOUTS: tuple[Callable[[], None], ...] = (
    _slots_of_windows,
    _slots_of_entries,
    _predecessors,
    _records,
    _pairs,
    _index_scores,
    _selections,
    _attention,
    _routes,
    _experts,
    _experts_by_outputs,
)


def run(layouts: tuple[Callable[[], None], ...]) -> Counter[str]:
    """Launches of every kernel, each access of which was looked at.

    Raises:
        triton.runtime.errors.InterpreterError: with the ``BoundsError`` of the access.
    """
    with checked_bounds() as launches:
        for layout in layouts:
            layout()
    return launches


if __name__ == "__main__":
    print(*sorted(run(LAYOUTS)))  # noqa: T201
