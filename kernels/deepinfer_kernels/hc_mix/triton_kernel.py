"""Mix logits as two Triton kernels: products over parts of K on tensor cores, then the parts in ascending order.

fp32 weights are split exactly into three bf16 values, so that every product with a bf16 stream is exact. Tensor cores
cut off what lies below the last bit of the sum so far, so a sum starts anew every BLOCK_K columns and an fp32 addition,
which rounds to nearest, takes it in: the mix weighs whole streams, whose bf16 ties fall otherwise with a longer sum.
fp32 streams take fp32 products instead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import as_rows, from_table
from deepinfer_kernels.triton_sums import halving_row_sums

_SPLIT_COLUMNS = 128  # columns of one program that splits weights
_SUM_ROWS = 8  # rows of one program of the second kernel


@triton.jit
def _split_exactly(fn):
    """Three bf16 values that add up to each fp32 value."""
    high = fn.to(tl.bfloat16)
    rest = fn - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _hc_mix_split_kernel(
    fn_ptr, out_ptr, DEPTH: tl.constexpr, NUM_LOGITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    n = tl.arange(0, BLOCK_N)[:, None]
    is_k = k < DEPTH
    fn = tl.load(fn_ptr + n * DEPTH + k, mask=is_k & (n < NUM_LOGITS), other=0.0)
    high, middle, low = _split_exactly(fn)
    place_ptr = out_ptr + n * DEPTH + k
    tl.store(place_ptr, high, mask=is_k)
    tl.store(place_ptr + BLOCK_N * DEPTH, middle, mask=is_k)
    tl.store(place_ptr + 2 * BLOCK_N * DEPTH, low, mask=is_k)


@triton.jit(do_not_specialize=["num_tokens"])
def _hc_mix_parts_kernel(
    x_ptr,
    fn_ptr,
    logits_ptr,
    squares_ptr,
    num_tokens,
    x_stride_t,
    DEPTH: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    PART_K: tl.constexpr,
    PARTS: tl.constexpr,
    IS_BF16: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    is_token = token < num_tokens
    is_logit = n < NUM_LOGITS
    logits_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    squares_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for part in range(PARTS):
        first = (program * PARTS + part) * PART_K
        logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
        for start in tl.range(first, tl.minimum(first + PART_K, DEPTH), BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < DEPTH
            x_mask = is_token[:, None] & is_k[None, :]
            x = tl.load(x_ptr + token[:, None] * x_stride_t + k[None, :], mask=x_mask, other=0.0)
            fn_ptrs = fn_ptr + n[:, None] * DEPTH + k[None, :]
            if IS_SPLIT:
                high = tl.load(fn_ptrs, mask=is_k[None, :], other=0.0)
                middle = tl.load(fn_ptrs + BLOCK_N * DEPTH, mask=is_k[None, :], other=0.0)
                low = tl.load(fn_ptrs + 2 * BLOCK_N * DEPTH, mask=is_k[None, :], other=0.0)
            else:
                fn = tl.load(fn_ptrs, mask=is_logit[:, None] & is_k[None, :], other=0.0)
                if IS_BF16:
                    high, middle, low = _split_exactly(fn)
            if IS_BF16:
                block = tl.dot(x, tl.trans(low))
                block = tl.dot(x, tl.trans(middle), block)
                logits += tl.dot(x, tl.trans(high), block)
            else:
                logits = tl.dot(x, tl.trans(fn), logits, input_precision="ieee")
            wide = x.to(tl.float32)
            squares += wide * wide
        logits_sum += logits
        squares_sum += halving_row_sums(squares, BLOCK_M, BLOCK_K, LEVELS)
    place = program.to(tl.int64) * num_tokens + token
    tl.store(logits_ptr + place[:, None] * BLOCK_N + n[None, :], logits_sum, mask=is_token[:, None])
    tl.store(squares_ptr + place, squares_sum, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def _hc_mix_sum_kernel(
    logits_ptr,
    squares_ptr,
    out_ptr,
    num_tokens,
    eps,
    DEPTH: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    PARTIALS_OF_GROUP: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = token < num_tokens
    n = tl.arange(0, BLOCK_N)
    logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    square_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for group in tl.static_range(0, NUM_PARTIALS, PARTIALS_OF_GROUP):
        group_logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        group_squares = tl.zeros([BLOCK_M], dtype=tl.float32)
        for partial in tl.static_range(PARTIALS_OF_GROUP):
            place = token + (group + partial) * num_tokens.to(tl.int64)
            mask = is_token & (group + partial < NUM_PARTIALS)
            group_logits += tl.load(logits_ptr + place[:, None] * BLOCK_N + n[None, :], mask=mask[:, None], other=0.0)
            group_squares += tl.load(squares_ptr + place, mask=mask, other=0.0)
        logits += group_logits
        square_sum += group_squares
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, DEPTH * 1.0) + eps))
    out_mask = is_token[:, None] & (n < NUM_LOGITS)[None, :]
    tl.store(out_ptr + token[:, None] * NUM_LOGITS + n[None, :], logits * rstd[:, None], mask=out_mask)


def hc_mix_triton(
    streams: torch.Tensor,
    fn: torch.Tensor,
    eps: float,
    tile: tuple[int, int] | None = None,
    stages: int = 3,
    split: bool = False,
    warps: int = 4,
) -> torch.Tensor:
    """Launch the kernels on arguments ``hc_mix`` has checked; ``tile`` overrides the table of tiles."""
    rows = as_rows(streams.flatten(1))
    num_tokens, depth = rows.shape
    num_logits = fn.shape[0]
    out = torch.empty((num_tokens, num_logits), dtype=torch.float32, device=streams.device)
    if num_tokens == 0:
        return out
    block_m, parts = tile or from_table(tiling.HC_MIX_TILES, num_tokens)
    num_partials = triton.cdiv(depth, tiling.HC_MIX_PART_K * parts)
    block_n = max(16, triton.next_power_of_2(num_logits))
    logits = torch.empty((num_partials, num_tokens, block_n), dtype=torch.float32, device=streams.device)
    squares = torch.empty((num_partials, num_tokens), dtype=torch.float32, device=streams.device)
    fn = fn.detach().contiguous()
    is_split = split and rows.dtype == torch.bfloat16
    if is_split:
        parts_of_fn = torch.empty((3, block_n, depth), dtype=torch.bfloat16, device=fn.device)
        _hc_mix_split_kernel[(triton.cdiv(depth, _SPLIT_COLUMNS),)](
            fn, parts_of_fn, DEPTH=depth, NUM_LOGITS=num_logits, BLOCK_N=block_n, BLOCK_K=_SPLIT_COLUMNS
        )
        fn = parts_of_fn
    _hc_mix_parts_kernel[(triton.cdiv(num_tokens, block_m), num_partials)](
        rows,
        fn,
        logits,
        squares,
        num_tokens,
        rows.stride(0),
        DEPTH=depth,
        NUM_LOGITS=num_logits,
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        BLOCK_K=tiling.HC_MIX_BLOCK_K,
        LEVELS=tiling.HC_MIX_BLOCK_K.bit_length() - 1,
        PART_K=tiling.HC_MIX_PART_K,
        PARTS=parts,
        IS_BF16=rows.dtype == torch.bfloat16,
        IS_SPLIT=is_split,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    _hc_mix_sum_kernel[(triton.cdiv(num_tokens, _SUM_ROWS),)](
        logits,
        squares,
        out,
        num_tokens,
        eps,
        DEPTH=depth,
        NUM_PARTIALS=num_partials,
        PARTIALS_OF_GROUP=tiling.HC_MIX_PARTS_OF_GROUP // parts,
        NUM_LOGITS=num_logits,
        BLOCK_N=block_n,
        BLOCK_M=_SUM_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
