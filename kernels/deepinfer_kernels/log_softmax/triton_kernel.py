"""Log-softmax as two Triton kernels: largest value and sum of every chunk of a row, and the rows.

A chunk is read for its largest value and, from the cache, for its sum, so that the logits come from memory once. Chunks
and the order of their sums are those of the reference; every program that needs a row's sum adds them again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer_kernels.tiling import LOGSUM_BLOCK, LOGSUM_CHUNK
from deepinfer_kernels.triton_sums import halving_sum

_LEVELS = LOGSUM_BLOCK.bit_length() - 1
_COLUMNS = 4096  # of one program that writes


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _zero_for_none(largest):
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit(do_not_specialize=["vocab_size"])
def _chunks_kernel(
    logits_ptr,
    largest_ptr,
    sums_ptr,
    vocab_size,
    stride_t,
    stride_v,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride_t
    first = tl.program_id(1) * CHUNK
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for step in tl.static_range(CHUNK // BLOCK):
        v = first + step * BLOCK + lane
        logit = tl.load(row_ptr + v.to(tl.int64) * stride_v, mask=v < vocab_size, other=-float("inf"))
        largest = _largest(largest, logit)
    of_chunk = tl.reduce(largest, 0, _largest)
    shift = _zero_for_none(of_chunk)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for step in tl.static_range(CHUNK // BLOCK):
        v = first + step * BLOCK + lane
        logit = tl.load(row_ptr + v.to(tl.int64) * stride_v, mask=v < vocab_size, other=0.0)
        total += tl.where(v < vocab_size, tl.exp(logit - shift), 0.0)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest_ptr + place, of_chunk)
    tl.store(sums_ptr + place, halving_sum(total, BLOCK, LEVELS))


@triton.jit
def _largest_and_log_sum(largest_ptr, sums_ptr, row, num_chunks, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """Largest logit of a row, 0 for a row of nothing but -inf, and the logarithm of its sum."""
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    of_chunks = tl.load(largest_ptr + row * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
    sums = tl.load(sums_ptr + row * num_chunks + chunk, mask=is_chunk, other=0.0)
    largest = _zero_for_none(tl.reduce(of_chunks, 0, _largest))
    sums = tl.where(is_chunk, sums * tl.exp(of_chunks - largest), 0.0)
    return largest, tl.log(halving_sum(sums, CHUNKS, LEVELS))


@triton.jit(do_not_specialize=["num_columns", "num_chunks"])
def _rows_kernel(
    logits_ptr,
    ids_ptr,
    largest_ptr,
    sums_ptr,
    out_ptr,
    num_columns,
    num_chunks,
    stride_t,
    stride_v,
    HAS_IDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest, log_sum = _largest_and_log_sum(largest_ptr, sums_ptr, row, num_chunks, CHUNKS, LEVELS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    v = column.to(tl.int64)
    if HAS_IDS:
        v = tl.load(ids_ptr + row * num_columns + column, mask=is_column, other=0)
    logit = tl.load(logits_ptr + row * stride_t + v * stride_v, mask=is_column, other=0.0)
    out = tl.where(logit == -float("inf"), -float("inf"), logit - largest - log_sum)
    tl.store(out_ptr + row * num_columns + column, out, mask=is_column)


@triton.jit(do_not_specialize=["num_chunks"])
def _log_sum_exp_kernel(largest_ptr, sums_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, log_sum = _largest_and_log_sum(largest_ptr, sums_ptr, row, num_chunks, CHUNKS, LEVELS)
    tl.store(out_ptr + row, largest + log_sum)


def _measure_chunks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Largest logits and sums of the chunks [rows, chunks], and what the kernels that add them are launched with."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, LOGSUM_CHUNK)
    largest = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    _chunks_kernel[(num_rows, num_chunks)](
        logits,
        largest,
        sums,
        vocab_size,
        logits.stride(0),
        logits.stride(1),
        CHUNK=LOGSUM_CHUNK,
        BLOCK=LOGSUM_BLOCK,
        LEVELS=_LEVELS,
        num_warps=8,
        enable_fp_fusion=False,
    )
    chunks = triton.next_power_of_2(num_chunks)
    return largest, sums, {"num_chunks": num_chunks, "CHUNKS": chunks, "LEVELS": chunks.bit_length() - 1}


def _write(logits: torch.Tensor, token_ids: torch.Tensor | None, num_columns: int) -> torch.Tensor:
    out = torch.empty((logits.shape[0], num_columns), dtype=torch.float32, device=logits.device)
    if out.numel() > 0:
        largest, sums, constants = _measure_chunks(logits)
        columns = min(_COLUMNS, triton.next_power_of_2(num_columns))
        _rows_kernel[(logits.shape[0], triton.cdiv(num_columns, columns))](
            logits,
            token_ids,
            largest,
            sums,
            out,
            num_columns,
            stride_t=logits.stride(0),
            stride_v=logits.stride(1),
            HAS_IDS=token_ids is not None,
            COLUMNS=columns,
            **constants,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def log_softmax_triton(logits: torch.Tensor) -> torch.Tensor:
    """Launch the kernels on arguments ``log_softmax`` has checked."""
    return _write(logits, None, logits.shape[1])


def token_log_softmax_triton(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Launch the kernels on arguments ``token_log_softmax`` has checked."""
    return _write(logits, token_ids.contiguous(), token_ids.shape[1])


def log_sum_exp_triton(logits: torch.Tensor) -> torch.Tensor:
    """Launch the kernels on arguments ``log_sum_exp`` has checked."""
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        return logits.new_full((num_rows,), -torch.inf)
    out = torch.empty((num_rows,), dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        largest, sums, constants = _measure_chunks(logits)
        _log_sum_exp_kernel[(num_rows,)](largest, sums, out, **constants, num_warps=1, enable_fp_fusion=False)
    return out
