"""The restriction as one Triton kernel, a program a row, for batches that fill the device with rows.

The search of ``triton_search`` over the whole row, which gives the cut that the kernels of few rows find.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import sampler_rows
from deepinfer_kernels.restrict_logits.triton_search import limit_of, measure, ratio_to_largest, search, weight_of
from deepinfer_kernels.triton_elementary import ordered_key, value_of_key


@triton.jit
def _extent_of_row(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """Largest and least logit above -inf (both -inf where there is none), and how many there are."""
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        v = start + lane
        logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
        is_number = logit > -float("inf")  # not NaN either
        highest = tl.where(logit > highest, logit, highest)
        lowest = tl.where(is_number & (logit < lowest), logit, lowest)
        counts += is_number.to(tl.int32)
    num = tl.sum(counts, axis=0).to(tl.int64)
    return tl.max(highest, axis=0), tl.where(num > 0, tl.min(lowest, axis=0), -float("inf")), num


@triton.jit
def _num_reaching(row_ptr, vocab_size, largest, min_p, BLOCK: tl.constexpr):
    """How many entries have at least ``min_p`` times the largest probability."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        v = start + lane
        logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
        reaches = (logit > -float("inf")) & (ratio_to_largest(logit, largest) >= min_p)
        counts += reaches.to(tl.int32)
    return tl.sum(counts, axis=0).to(tl.int64)


@triton.jit
def _cut_of_row(row_ptr, held_ptr, vocab_size, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The cut of a restricted row: low, high, entries between them, and how many of these stay, lowest ids first."""
    largest, least, num = _extent_of_row(row_ptr, vocab_size, BLOCK)
    low = ordered_key(least).to(tl.int64)
    high = low
    num_between = tl.zeros([], dtype=tl.int64)
    num_kept = tl.zeros([], dtype=tl.int64)
    if num > 0:
        count = num
        if min_p > 0.0:
            count = tl.minimum(count, _num_reaching(row_ptr, vocab_size, largest, min_p, BLOCK))
        if (top_k > 0) & (top_k < vocab_size):
            count = tl.minimum(count, top_k)
        count = tl.maximum(count, 1)
        none = tl.zeros([], dtype=tl.int64)
        if count < num:
            low, high, num_low, num_high, _, _ = search(
                row_ptr,
                held_ptr,
                vocab_size,
                largest,
                low,
                ordered_key(largest).to(tl.int64) + 1,
                num,
                none,
                none,
                none,
                none,
                none,
                count,
                BY_WEIGHT=False,
                BLOCK=BLOCK,
            )
            num_between = num_low - num_high
            num_kept = count - num_high
        if top_p < 1.0:
            n_low, _, _, w_low, w_high, _ = measure(
                row_ptr, vocab_size, largest, low, high, high, BY_WEIGHT=True, BLOCK=BLOCK
            )
            # Between the bounds all weights are equal, or all entries stay.
            equal = weight_of(value_of_key(low.to(tl.uint32)), largest)
            total = tl.where(num_kept == num_between, w_low, w_high + num_kept * equal)
            limit = limit_of(total, top_p)
            low, high, num_low, num_high, _, weight_high = search(
                row_ptr,
                held_ptr,
                vocab_size,
                largest,
                low,
                ordered_key(largest).to(tl.int64) + 1,
                n_low,
                none,
                w_low,
                none,
                none,
                none,
                limit,
                BY_WEIGHT=True,
                BLOCK=BLOCK,
            )
            num_between = num_low - num_high
            equal = tl.maximum(weight_of(value_of_key(low.to(tl.uint32)), largest), 1)
            missing = limit - weight_high
            num_kept = tl.where(num_between == 1, 1, (missing + equal - 1) // equal)
    return low, high, num_between, num_kept


@triton.jit(do_not_specialize=["vocab_size"])
def _restrict_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    held_ptr,
    out_ptr,
    vocab_size,
    stride_t,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    out_row_ptr = out_ptr + row * vocab_size
    lane = tl.arange(0, BLOCK)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0):
        low, high, num_between, num_kept = _cut_of_row(
            row_ptr, held_ptr + row * BLOCK, vocab_size, top_k, top_p, min_p, BLOCK
        )
        low_key, high_key = low.to(tl.uint32), high.to(tl.uint32)
        keeps_first = (num_kept < num_between) & (num_kept > 0)
        if num_kept == num_between:
            high_key = low_key
        num_before = tl.zeros([], dtype=tl.int64)
        for start in range(0, vocab_size, BLOCK):
            v = start + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            key = ordered_key(logit)
            is_kept = (key >= high_key) & (key > 0)
            if keeps_first:
                is_between = ((key >= low_key) & (key < high_key)).to(tl.int32)
                is_kept = is_kept | ((is_between > 0) & (num_before + tl.cumsum(is_between, axis=0) <= num_kept))
                num_before += tl.sum(is_between, axis=0)
            tl.store(out_row_ptr + v, tl.where(is_kept, logit, -float("inf")), mask=v < vocab_size)
    else:
        for start in range(0, vocab_size, BLOCK):
            v = start + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=0.0)
            tl.store(out_row_ptr + v, logit, mask=v < vocab_size)


def restrict_rows_triton(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel on arguments ``restrict_logits`` has checked."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if out.numel() > 0:
        rows = sampler_rows(logits, tiling.RESTRICT_BLOCK)
        held = torch.empty((num_rows, rows.block), dtype=torch.float32, device=logits.device)
        _restrict_kernel[(num_rows,)](
            rows.logits,
            top_k.contiguous(),
            top_p.contiguous(),
            min_p.contiguous(),
            held,
            out,
            vocab_size,
            rows.logits.stride(0),
            BLOCK=rows.block,
            num_warps=rows.num_warps,
            enable_fp_fusion=False,
        )
    return out
