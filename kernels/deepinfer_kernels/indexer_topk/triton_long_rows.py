"""Selection of long rows: three radix passes over the keys find the k-th largest, then the chosen are written in order.

Programs share a row by chunks of entries. Counts are integers, so atomic additions give one result in any order.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_topk.triton_order import ordered_key

_BINS = 2048  # keys of 32 bits in digits of 11, 11 and 10
_SHIFTS = (21, 10, 0)


@triton.jit(do_not_specialize=["num_entries"])
def _histogram_kernel(
    scores_ptr,
    prefix_ptr,
    histogram_ptr,
    num_entries,
    stride_t,
    stride_n,
    SHIFT: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += token * stride_t + n.to(tl.int64) * stride_n
    key = ordered_key(tl.load(scores_ptr, mask=n < num_entries, other=-float("inf")))
    is_counted = key > 0
    if not IS_FIRST:
        prefix = tl.load(prefix_ptr + token)  # -1 where every valid entry is chosen
        is_counted = is_counted & ((key >> (SHIFT + DIGIT_BITS)).to(tl.int32) == prefix)
    digit = ((key >> SHIFT) & ((1 << DIGIT_BITS) - 1)).to(tl.int32)
    counts = tl.histogram(digit, BINS, mask=is_counted)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram_ptr + token * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _select_kernel(
    histogram_ptr, prefix_ptr, need_ptr, k, DIGIT_BITS: tl.constexpr, IS_FIRST: tl.constexpr, BINS: tl.constexpr
):
    """Find the digit in which the k-th largest key falls, and how many entries are needed from that digit down."""
    token = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram_ptr + token * BINS + bins)
    tl.store(histogram_ptr + token * BINS + bins, 0)  # for the next pass
    prefix = 0
    need = k
    if not IS_FIRST:
        prefix = tl.load(prefix_ptr + token)
        need = tl.load(need_ptr + token)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.max(tl.where(at_least >= need, bins, -1), axis=0)
    above = tl.sum(tl.where(bins > digit, counts, 0), axis=0)
    is_short = (digit < 0) | (prefix < 0)  # fewer valid entries than k: all are taken
    tl.store(prefix_ptr + token, tl.where(is_short, -1, (prefix << DIGIT_BITS) | digit))
    tl.store(need_ptr + token, tl.where(is_short, 0, need - above))


@triton.jit
def _split_by_threshold(key, prefix, need):
    """Whether keys lie above the threshold or equal it. A full prefix is the threshold; without one all valid count."""
    threshold = prefix.to(tl.uint32, bitcast=True)
    threshold = tl.where(need > 0, threshold, 0)
    return (key > threshold).to(tl.int32), ((key == threshold) & (need > 0)).to(tl.int32)


@triton.jit(do_not_specialize=["num_entries", "num_chunks"])
def _count_kernel(
    scores_ptr, prefix_ptr, need_ptr, counts_ptr, num_entries, num_chunks, stride_t, stride_n, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    n = chunk * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += token * stride_t + n.to(tl.int64) * stride_n
    key = ordered_key(tl.load(scores_ptr, mask=n < num_entries, other=-float("inf")))
    above, equal = _split_by_threshold(key, tl.load(prefix_ptr + token), tl.load(need_ptr + token))
    counts_ptr += (token * num_chunks + chunk) * 2
    tl.store(counts_ptr, tl.sum(above, axis=0))
    tl.store(counts_ptr + 1, tl.sum(equal, axis=0))


@triton.jit(do_not_specialize=["num_entries", "num_chunks"])
def _write_kernel(
    scores_ptr,
    prefix_ptr,
    need_ptr,
    counts_ptr,
    out_ptr,
    num_entries,
    num_chunks,
    width,
    stride_t,
    stride_n,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    n = chunk * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += token * stride_t + n.to(tl.int64) * stride_n
    key = ordered_key(tl.load(scores_ptr, mask=n < num_entries, other=-float("inf")))
    need = tl.load(need_ptr + token)
    above, equal = _split_by_threshold(key, tl.load(prefix_ptr + token), need)
    c = tl.arange(0, BLOCK_C)
    counts_ptr += (token * num_chunks + c) * 2
    above_counts = tl.load(counts_ptr, mask=c < num_chunks, other=0)
    equal_counts = tl.load(counts_ptr + 1, mask=c < num_chunks, other=0)
    above_before = tl.sum(tl.where(c < chunk, above_counts, 0), axis=0)
    equal_before = tl.sum(tl.where(c < chunk, equal_counts, 0), axis=0)
    chosen = above | (equal & (equal_before + tl.cumsum(equal, axis=0) <= need).to(tl.int32))
    place = above_before + tl.minimum(equal_before, need) + tl.cumsum(chosen, axis=0) - 1
    tl.store(out_ptr + token * width + place, n, mask=chosen > 0)
    if chunk == 0:
        num_chosen = tl.sum(above_counts, axis=0) + tl.minimum(tl.sum(equal_counts, axis=0), need)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + token * width + column, -1, mask=(column >= num_chosen) & (column < width))


def select_long_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [num_tokens, k] of rows longer than one program holds."""
    out = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    for start in range(0, scores.shape[0], tiling.TOPK_ROWS_AT_ONCE):
        rows = slice(start, start + tiling.TOPK_ROWS_AT_ONCE)
        _select(scores[rows], out[rows])
    return out


def _select(scores: torch.Tensor, out: torch.Tensor) -> None:
    num_tokens, num_entries = scores.shape
    width = out.shape[1]
    num_chunks = triton.cdiv(num_entries, tiling.TOPK_CHUNK)
    strides = (scores.stride(0), scores.stride(1))
    histogram = torch.zeros((num_tokens, _BINS), dtype=torch.int32, device=scores.device)
    prefix = torch.empty((num_tokens,), dtype=torch.int32, device=scores.device)
    need = torch.empty_like(prefix)
    counts = torch.empty((num_tokens, num_chunks, 2), dtype=torch.int32, device=scores.device)
    grid = (num_tokens, num_chunks)
    digit_top = 32
    for shift in _SHIFTS:
        options = {"DIGIT_BITS": digit_top - shift, "IS_FIRST": digit_top == 32, "BINS": _BINS, "num_warps": 8}
        _histogram_kernel[grid](
            scores, prefix, histogram, num_entries, *strides, SHIFT=shift, BLOCK=tiling.TOPK_CHUNK, **options
        )
        _select_kernel[(num_tokens,)](histogram, prefix, need, min(width, num_entries), **options)
        digit_top = shift
    _count_kernel[grid](
        scores, prefix, need, counts, num_entries, num_chunks, *strides, BLOCK=tiling.TOPK_CHUNK, num_warps=8
    )
    _write_kernel[grid](
        scores,
        prefix,
        need,
        counts,
        out,
        num_entries,
        num_chunks,
        width,
        *strides,
        BLOCK=tiling.TOPK_CHUNK,
        BLOCK_C=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )
