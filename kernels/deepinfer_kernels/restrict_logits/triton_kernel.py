"""The restriction of few rows as four Triton kernels: many programs of a row narrow its cut down, one of them finds it.

1. Every chunk of a row: largest and least key, and the number of entries above -inf.
2. Every chunk: how many entries, of which weight, lie above each of 32 keys. The program of a row that ends last adds
   the chunks and chooses the bounds of the cut: for top-k, and for top-p, whose goal is then known within bounds too.
3. Every chunk: copy the entries between the bounds to a list. The program that ends last searches the list.
4. Every chunk: write what stays.

All sums are of integers, and a list is searched, never read in order: which program ends last changes no answer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import sampler_rows
from deepinfer_kernels.restrict_logits.rows_kernel import restrict_rows_triton
from deepinfer_kernels.restrict_logits.triton_search import limit_of, measure, ratio_to_largest, search, weight_of
from deepinfer_kernels.triton_elementary import ordered_key, value_of_key

# Numbers of a row in the workspace, int64: length of the list, programs that have ended, the cut, whether the row is
# restricted, the plan; behind them the results of the chunks.
_LENGTH, _ENDED, _CUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)
_RESTRICTED, _PLAN = tl.constexpr(7), tl.constexpr(8)
_HEADER = 20
_CHUNK_ROWS = tl.constexpr(_HEADER)
# Keys that the second kernel measures at, between the least logit, or the largest less a span in which weights become
# 0, and the largest.
_NUM_KEYS = 32
_KEYS = tl.constexpr(_NUM_KEYS)
_SPAN = tl.constexpr(32.0)
_MOST = tl.constexpr((1 << 63) - 1)


@triton.jit
def _load_limits(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size):
    """top_k, top_p, min_p of a row, and whether any restricts it."""
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    return top_k, top_p, min_p, ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _load_chunk(row_ptr, vocab_size, CHUNK: tl.constexpr):
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    return tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))


@triton.jit
def _row_extent(work_ptr, CHUNKS: tl.constexpr):
    """Largest key (0 where there is none), least key, and number of entries above -inf: int64."""
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < tl.num_programs(1)
    part_ptr = work_ptr + _CHUNK_ROWS + chunk
    high = tl.max(tl.load(part_ptr, mask=is_chunk, other=0), axis=0)
    low = tl.min(tl.load(part_ptr + CHUNKS, mask=is_chunk, other=_MOST), axis=0)
    num = tl.sum(tl.load(part_ptr + 2 * CHUNKS, mask=is_chunk, other=0), axis=0)
    return high, low, num


@triton.jit
def _keys_of_row(high, low):
    """int64 [32], ascending from ``low``: keys of logits in equal steps."""
    j = tl.arange(0, _KEYS)
    largest = value_of_key(high.to(tl.uint32))
    first = tl.maximum(value_of_key(low.to(tl.uint32)), largest - _SPAN)
    value = first + (largest - first) * (j.to(tl.float32) * (1.0 / _KEYS))
    return tl.where(j == 0, low, tl.maximum(ordered_key(value).to(tl.int64), low))


@triton.jit
def _ended_last(work_ptr, COUNTER: tl.constexpr):
    """Whether this program of the row is the last to come here: then it sees what the others wrote before."""
    tl.debug_barrier()
    num_ended = tl.atomic_add(work_ptr + COUNTER, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return num_ended == tl.num_programs(1) - 1


@triton.jit(do_not_specialize=["vocab_size"])
def _extent_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    work_ptr,
    vocab_size,
    stride_t,
    stride_work,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    work_ptr += row * stride_work
    _top_k, _top_p, _min_p, is_restricted = _load_limits(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size)
    if is_restricted:
        logit = _load_chunk(logits_ptr + row * stride_t, vocab_size, CHUNK)
        key = ordered_key(logit).to(tl.int64)
        part_ptr = work_ptr + _CHUNK_ROWS + tl.program_id(1)
        tl.store(part_ptr, tl.max(key, axis=0))
        tl.store(part_ptr + CHUNKS, tl.min(tl.where(key > 0, key, _MOST), axis=0))
        tl.store(part_ptr + 2 * CHUNKS, tl.sum((key > 0).to(tl.int32), axis=0).to(tl.int64))
        if tl.program_id(1) == 0:
            for counter in tl.static_range(_CUT):
                tl.store(work_ptr + counter, tl.zeros([], dtype=tl.int64))
    if tl.program_id(1) == 0:
        tl.store(work_ptr + _RESTRICTED, is_restricted.to(tl.int64))


@triton.jit
def _plan_of_row(work_ptr, high, low, num, top_k, top_p, min_p, vocab_size, CHUNKS: tl.constexpr):
    """Write the plan of a row: count, bounds of the cut by count, bounds of the cut by weight, with what is above."""
    key = _keys_of_row(high, low)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < tl.num_programs(1)
    part_ptr = work_ptr + _CHUNK_ROWS + 3 * CHUNKS
    count = num
    if min_p > 0.0:
        count = tl.minimum(count, tl.sum(tl.load(part_ptr + chunk, mask=is_chunk, other=0), axis=0))
    if (top_k > 0) & (top_k < vocab_size):
        count = tl.minimum(count, top_k)
    count = tl.maximum(count, 1)
    part_ptr += CHUNKS + tl.arange(0, _KEYS)[:, None] * CHUNKS + chunk[None, :]
    nums = tl.sum(tl.load(part_ptr, mask=is_chunk[None, :], other=0), axis=1)
    weights = tl.sum(tl.load(part_ptr + _KEYS * CHUNKS, mask=is_chunk[None, :], other=0), axis=1)
    whole = tl.max(weights, axis=0)  # from the least key on

    reaches = nums >= count
    plan_ptr = work_ptr + _PLAN
    tl.store(plan_ptr, count)
    is_cut = count < num
    tl.store(plan_ptr + 1, tl.where(is_cut, tl.max(tl.where(reaches, key, low), axis=0), low))
    tl.store(
        plan_ptr + 2, tl.where(is_cut, tl.min(tl.where(reaches, high + 1, tl.minimum(key, high + 1)), axis=0), low)
    )
    tl.store(plan_ptr + 3, tl.min(tl.where(reaches, nums, num), axis=0))
    tl.store(plan_ptr + 4, tl.max(tl.where(reaches, 0, nums), axis=0))
    weight_high = tl.max(tl.where(reaches, 0, weights), axis=0)
    tl.store(plan_ptr + 5, weight_high)
    tl.store(plan_ptr + 6, whole)

    least_limit = limit_of(tl.where(is_cut, weight_high, whole), top_p)
    most_limit = limit_of(tl.where(is_cut, tl.min(tl.where(reaches, weights, whole), axis=0), whole), top_p)
    is_cut = top_p < 1.0
    tl.store(plan_ptr + 7, tl.where(is_cut, tl.max(tl.where(weights >= most_limit, key, low), axis=0), low))
    reaches = weights >= least_limit
    tl.store(
        plan_ptr + 8, tl.where(is_cut, tl.min(tl.where(reaches, high + 1, tl.minimum(key, high + 1)), axis=0), low)
    )
    tl.store(plan_ptr + 9, tl.max(tl.where(reaches, 0, nums), axis=0))
    tl.store(plan_ptr + 10, tl.max(tl.where(reaches, 0, weights), axis=0))


@triton.jit(do_not_specialize=["vocab_size"])
def _measure_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    work_ptr,
    vocab_size,
    stride_t,
    stride_work,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    work_ptr += row * stride_work
    top_k, top_p, min_p, is_restricted = _load_limits(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size)
    if is_restricted:
        high, low, num = _row_extent(work_ptr, CHUNKS)
        if num > 0:
            largest = value_of_key(high.to(tl.uint32))
            key_of_row = _keys_of_row(high, low).to(tl.uint32)
            reaching = tl.zeros([COLUMNS], dtype=tl.int32)
            nums = tl.zeros([_KEYS, COLUMNS], dtype=tl.int32)
            weights = tl.zeros([_KEYS, COLUMNS], dtype=tl.int64)
            for start in range(0, CHUNK, COLUMNS):
                v = tl.program_id(1) * CHUNK + start + tl.arange(0, COLUMNS)
                logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
                key = ordered_key(logit)
                reaching += ((key > 0) & (ratio_to_largest(logit, largest) >= min_p)).to(tl.int32)
                is_above = key[None, :] >= key_of_row[:, None]
                nums += is_above.to(tl.int32)
                weights += tl.where(is_above, weight_of(logit, largest)[None, :], 0)
            part_ptr = work_ptr + _CHUNK_ROWS + 3 * CHUNKS + tl.program_id(1)
            tl.store(part_ptr, tl.sum(reaching, axis=0).to(tl.int64))
            part_ptr += CHUNKS + tl.arange(0, _KEYS) * CHUNKS
            tl.store(part_ptr, tl.sum(nums, axis=1).to(tl.int64))
            tl.store(part_ptr + _KEYS * CHUNKS, tl.sum(weights, axis=1))
            if _ended_last(work_ptr, _ENDED):
                _plan_of_row(work_ptr, high, low, num, top_k, top_p, min_p, vocab_size, CHUNKS)


@triton.jit
def _cut_of_row(list_ptr, held_ptr, work_ptr, largest, num, top_p, BLOCK: tl.constexpr):
    """Write the cut of a row: low, high, entries between them, and how many of these stay, lowest ids first."""
    length = tl.atomic_add(work_ptr + _LENGTH, 0).to(tl.int32)
    plan_ptr = work_ptr + _PLAN
    count, low, high = tl.load(plan_ptr), tl.load(plan_ptr + 1), tl.load(plan_ptr + 2)
    total = tl.load(plan_ptr + 6)
    low_p, high_p = tl.load(plan_ptr + 7), tl.load(plan_ptr + 8)
    num_high_p, weight_high_p = tl.load(plan_ptr + 9), tl.load(plan_ptr + 10)
    num_between = tl.zeros([], dtype=tl.int64)
    num_kept = tl.zeros([], dtype=tl.int64)
    none = tl.zeros([], dtype=tl.int64)
    above, above_p, _, weight_above, weight_above_p, _ = measure(
        list_ptr, length, largest, high, high_p, high_p, BY_WEIGHT=True, BLOCK=BLOCK
    )
    if count < num:
        num_high, weight_high = tl.load(plan_ptr + 4), tl.load(plan_ptr + 5)
        low, high, num_low, num_high, _, _ = search(
            list_ptr,
            held_ptr,
            length,
            largest,
            low,
            high,
            tl.load(plan_ptr + 3),
            num_high,
            none,
            none,
            num_high - above,
            none,
            count,
            BY_WEIGHT=False,
            BLOCK=BLOCK,
        )
        num_between = num_low - num_high
        num_kept = count - num_high
        if top_p < 1.0:
            _, _, _, w_low, w_high, _ = measure(list_ptr, length, largest, low, high, high, BY_WEIGHT=True, BLOCK=BLOCK)
            # Between the bounds all weights are equal, or all entries stay.
            equal = weight_of(value_of_key(low.to(tl.uint32)), largest)
            total = weight_high - weight_above + tl.where(num_kept == num_between, w_low, w_high + num_kept * equal)
    if top_p < 1.0:
        limit = limit_of(total, top_p)
        low = tl.maximum(low, low_p)
        n_low, _, _, w_low, _, _ = measure(list_ptr, length, largest, low, low, low, BY_WEIGHT=True, BLOCK=BLOCK)
        num_beside, weight_beside = num_high_p - above_p, weight_high_p - weight_above_p
        low, high, num_low, num_high, _, weight_high = search(
            list_ptr,
            held_ptr,
            length,
            largest,
            low,
            high_p,
            n_low + num_beside,
            num_high_p,
            w_low + weight_beside,
            weight_high_p,
            num_beside,
            weight_beside,
            limit,
            BY_WEIGHT=True,
            BLOCK=BLOCK,
        )
        num_between = num_low - num_high
        equal = tl.maximum(weight_of(value_of_key(low.to(tl.uint32)), largest), 1)
        missing = limit - weight_high
        num_kept = tl.where(num_between == 1, 1, (missing + equal - 1) // equal)
    cut_ptr = work_ptr + _CUT
    tl.store(cut_ptr, low)
    tl.store(cut_ptr + 1, high)
    tl.store(cut_ptr + 2, num_between)
    tl.store(cut_ptr + 3, num_kept)


@triton.jit(do_not_specialize=["vocab_size"])
def _cut_kernel(
    logits_ptr,
    top_p_ptr,
    work_ptr,
    list_ptr,
    held_ptr,
    vocab_size,
    stride_t,
    stride_work,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    work_ptr += row * stride_work
    list_ptr += row * vocab_size
    top_p = tl.load(top_p_ptr + row)
    if tl.load(work_ptr + _RESTRICTED) != 0:
        high, _low, num = _row_extent(work_ptr, CHUNKS)
        if num > 0:
            plan_ptr = work_ptr + _PLAN
            logit = _load_chunk(logits_ptr + row * stride_t, vocab_size, CHUNK)
            key = ordered_key(logit).to(tl.int64)
            is_listed = (key >= tl.load(plan_ptr + 1)) & (key < tl.load(plan_ptr + 2))
            is_listed = is_listed | ((key >= tl.load(plan_ptr + 7)) & (key < tl.load(plan_ptr + 8)))
            num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
            if num_listed > 0:
                first = tl.atomic_add(work_ptr + _LENGTH, num_listed.to(tl.int64))
                place = first + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
                tl.store(list_ptr + place, logit, mask=is_listed)
            if _ended_last(work_ptr, _ENDED + 1):
                largest = value_of_key(high.to(tl.uint32))
                _cut_of_row(list_ptr, held_ptr + row * BLOCK, work_ptr, largest, num, top_p, BLOCK)


@triton.jit(do_not_specialize=["vocab_size"])
def _write_kernel(
    logits_ptr,
    work_ptr,
    out_ptr,
    vocab_size,
    stride_t,
    stride_work,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    work_ptr += row * stride_work
    logit = _load_chunk(row_ptr, vocab_size, CHUNK)
    if tl.load(work_ptr + _RESTRICTED) != 0:
        key = ordered_key(logit)
        is_kept = key > 0
        _largest, _least, num = _row_extent(work_ptr, CHUNKS)
        if num > 0:
            cut_ptr = work_ptr + _CUT
            low, high = tl.load(cut_ptr).to(tl.uint32), tl.load(cut_ptr + 1).to(tl.uint32)
            num_between, num_kept = tl.load(cut_ptr + 2), tl.load(cut_ptr + 3)
            is_kept = is_kept & (key >= tl.where(num_kept == num_between, low, high))
            if (num_kept < num_between) & (num_kept > 0):
                counts = tl.zeros([CHUNK], dtype=tl.int32)
                for start in range(0, tl.program_id(1) * CHUNK, CHUNK):
                    before = ordered_key(tl.load(row_ptr + start + tl.arange(0, CHUNK)))
                    counts += ((before >= low) & (before < high)).to(tl.int32)
                is_between = ((key >= low) & (key < high)).to(tl.int32)
                num_before = tl.sum(counts, axis=0) + tl.cumsum(is_between, axis=0)
                is_kept = is_kept | ((is_between > 0) & (num_before <= num_kept))
        logit = tl.where(is_kept, logit, -float("inf"))
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tl.store(out_ptr + row * vocab_size + v, logit, mask=v < vocab_size)


def restrict_few_rows_triton(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Launch the kernels on arguments ``restrict_logits`` has checked."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    rows = sampler_rows(logits, tiling.RESTRICT_BLOCK)
    chunk = min(tiling.RESTRICT_CHUNK, rows.block)
    grid = (num_rows, triton.cdiv(vocab_size, chunk))
    chunks = triton.next_power_of_2(grid[1])
    work_size = _HEADER + (4 + 2 * _NUM_KEYS) * chunks
    work = torch.empty((num_rows, work_size), dtype=torch.int64, device=logits.device)
    held = torch.empty((num_rows, rows.block), dtype=torch.float32, device=logits.device)
    top_p = top_p.contiguous()
    limits = (top_k.contiguous(), top_p, min_p.contiguous())
    sizes = (vocab_size, rows.logits.stride(0), work_size)
    constants = {"CHUNK": chunk, "CHUNKS": chunks, "enable_fp_fusion": False}
    warps, columns = max(1, chunk // 256), min(tiling.RESTRICT_COLUMNS, chunk)
    _extent_kernel[grid](rows.logits, *limits, work, *sizes, **constants, num_warps=warps)
    _measure_kernel[grid](rows.logits, *limits, work, *sizes, **constants, COLUMNS=columns, num_warps=4)
    # What is written last serves as room for the list.
    _cut_kernel[grid](
        rows.logits, top_p, work, out, held, *sizes, **constants, BLOCK=rows.block, num_warps=rows.num_warps
    )
    _write_kernel[grid](rows.logits, work, out, *sizes, **constants, num_warps=warps)
    return out


def restrict_logits_triton(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Launch the kernels for the number of rows, on arguments ``restrict_logits`` has checked."""
    restrict = restrict_few_rows_triton if logits.shape[0] <= tiling.RESTRICT_FEW_ROWS else restrict_rows_triton
    return restrict(logits, top_k, top_p, min_p)
