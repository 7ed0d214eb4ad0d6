"""Log-softmax as three Triton kernels: largest values of column chunks, lanes of the sum, and the rows.

The lanes are those of the reference: lane j adds columns j, j + LOGSUM_BLOCK, ... in ascending order. Programs share a
row by lanes, so that one row alone also fills the device, and no sum is cut.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.tiling import LOGSUM_BLOCK
from deepinfer_kernels.triton_sums import halving_sum

_NUM_CHUNKS = 8  # parts of a row in the search for its largest value, and parts of the lanes
_LEVELS = LOGSUM_BLOCK.bit_length() - 1
_LANES = LOGSUM_BLOCK // _NUM_CHUNKS
_BLOCKS_AT_ONCE = 8  # loads in flight


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["vocab_size", "chunk_size"])
def _largest_kernel(
    logits_ptr, largest_ptr, vocab_size, chunk_size, stride_t, stride_v, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    stop = tl.minimum((chunk + 1) * chunk_size, vocab_size)
    lanes = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for start in range(chunk * chunk_size, stop, BLOCK):
        v = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * stride_t + v.to(tl.int64) * stride_v, mask=v < stop, other=-float("inf"))
        lanes = _largest(lanes, logit)
    tl.store(largest_ptr + row * NUM_CHUNKS + chunk, tl.reduce(lanes, 0, _largest))


@triton.jit
def _row_largest(largest_ptr, row, NUM_CHUNKS: tl.constexpr):
    """Largest logit of a row; 0 for a row of nothing but -inf."""
    largest = tl.reduce(tl.load(largest_ptr + row * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)), 0, _largest)
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit(do_not_specialize=["vocab_size"])
def _lanes_kernel(
    logits_ptr,
    largest_ptr,
    lanes_ptr,
    vocab_size,
    stride_t,
    stride_v,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    largest = _row_largest(largest_ptr, row, NUM_CHUNKS)
    total = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            v = start + step * BLOCK + lane
            is_column = v < vocab_size
            logit = tl.load(logits_ptr + row * stride_t + v.to(tl.int64) * stride_v, mask=is_column, other=0.0)
            total += tl.where(is_column, tl.exp(logit - largest), 0.0)
    tl.store(lanes_ptr + row * BLOCK + lane, total)


@triton.jit
def _log_of_lanes(lanes_ptr, row, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Logarithm of the sum of the lanes, the upper half added to the lower until one is left."""
    return tl.log(halving_sum(tl.load(lanes_ptr + row * BLOCK + tl.arange(0, BLOCK)), BLOCK, LEVELS))


@triton.jit(do_not_specialize=["num_columns"])
def _rows_kernel(
    logits_ptr,
    ids_ptr,
    largest_ptr,
    lanes_ptr,
    out_ptr,
    num_columns,
    stride_t,
    stride_v,
    HAS_IDS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = _row_largest(largest_ptr, row, NUM_CHUNKS)
    log_sum = _log_of_lanes(lanes_ptr, row, BLOCK, LEVELS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    v = column.to(tl.int64)
    if HAS_IDS:
        v = tl.load(ids_ptr + row * num_columns + column, mask=is_column, other=0)
    logit = tl.load(logits_ptr + row * stride_t + v * stride_v, mask=is_column, other=0.0)
    out = tl.where(logit == -float("inf"), -float("inf"), logit - largest - log_sum)
    tl.store(out_ptr + row * num_columns + column, out, mask=is_column)


@triton.jit
def _log_sum_exp_kernel(
    largest_ptr, lanes_ptr, out_ptr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    out = _row_largest(largest_ptr, row, NUM_CHUNKS) + _log_of_lanes(lanes_ptr, row, BLOCK, LEVELS)
    tl.store(out_ptr + row, out)


def _largest_and_lanes(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logits of the chunks [rows, 8], and the lanes of the sum [rows, LOGSUM_BLOCK]."""
    num_rows, vocab_size = logits.shape
    largest = torch.empty((num_rows, _NUM_CHUNKS), dtype=torch.float32, device=logits.device)
    lanes = torch.empty((num_rows, LOGSUM_BLOCK), dtype=torch.float32, device=logits.device)
    strides = (logits.stride(0), logits.stride(1))
    chunk_size = triton.cdiv(triton.cdiv(vocab_size, _NUM_CHUNKS), 1024) * 1024
    _largest_kernel[(num_rows, _NUM_CHUNKS)](
        logits, largest, vocab_size, chunk_size, *strides, NUM_CHUNKS=_NUM_CHUNKS, BLOCK=4096, num_warps=8
    )
    _lanes_kernel[(num_rows, _NUM_CHUNKS)](
        logits,
        largest,
        lanes,
        vocab_size,
        *strides,
        NUM_CHUNKS=_NUM_CHUNKS,
        BLOCK=LOGSUM_BLOCK,
        LANES=_LANES,
        AT_ONCE=_BLOCKS_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return largest, lanes


def _write(logits: torch.Tensor, token_ids: torch.Tensor | None, num_columns: int) -> torch.Tensor:
    out = torch.empty((logits.shape[0], num_columns), dtype=torch.float32, device=logits.device)
    if out.numel() > 0:
        largest, lanes = _largest_and_lanes(logits)
        columns = min(4096, triton.next_power_of_2(num_columns))
        _rows_kernel[(logits.shape[0], triton.cdiv(num_columns, columns))](
            logits,
            token_ids,
            largest,
            lanes,
            out,
            num_columns,
            logits.stride(0),
            logits.stride(1),
            HAS_IDS=token_ids is not None,
            NUM_CHUNKS=_NUM_CHUNKS,
            BLOCK=LOGSUM_BLOCK,
            LEVELS=_LEVELS,
            COLUMNS=columns,
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
        largest, lanes = _largest_and_lanes(logits)
        _log_sum_exp_kernel[(num_rows,)](
            largest,
            lanes,
            out,
            NUM_CHUNKS=_NUM_CHUNKS,
            BLOCK=LOGSUM_BLOCK,
            LEVELS=_LEVELS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
