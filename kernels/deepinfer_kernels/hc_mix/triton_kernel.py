"""Mix logits as two Triton kernels: products over parts of K on tensor cores, then the parts in ascending order.

fp32 weights are split exactly into three bf16 values, so that every product with a bf16 stream is exact and the tensor
cores' fp32 sum is the only rounding. fp32 streams take fp32 products instead.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import as_rows, from_table
from deepinfer_kernels.triton_sums import halving_row_sums


@triton.jit
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
    SPLIT_K: tl.constexpr,
):
    split = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    is_token = token < num_tokens
    is_logit = n < NUM_LOGITS
    logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    stop = tl.minimum((split + 1) * SPLIT_K, DEPTH)
    for start in tl.range(split * SPLIT_K, stop, BLOCK_K, num_stages=3):
        k = start + tl.arange(0, BLOCK_K)
        is_k = k < DEPTH
        x_mask = is_token[:, None] & is_k[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride_t + k[None, :], mask=x_mask, other=0.0)
        fn_mask = is_logit[:, None] & is_k[None, :]
        fn = tl.load(fn_ptr + n[:, None] * DEPTH + k[None, :], mask=fn_mask, other=0.0)
        if x.dtype == tl.bfloat16:
            high = fn.to(tl.bfloat16)
            rest = fn - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            logits = tl.dot(x, tl.trans(low), logits)
            logits = tl.dot(x, tl.trans(middle), logits)
            logits = tl.dot(x, tl.trans(high), logits)
        else:
            logits = tl.dot(x, tl.trans(fn), logits, input_precision="ieee")
        wide = x.to(tl.float32)
        squares += wide * wide
    part = split.to(tl.int64) * num_tokens + token
    tl.store(logits_ptr + part[:, None] * BLOCK_N + n[None, :], logits, mask=is_token[:, None])
    tl.store(squares_ptr + part, halving_row_sums(squares, BLOCK_M, BLOCK_K, LEVELS), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def _hc_mix_sum_kernel(
    logits_ptr,
    squares_ptr,
    out_ptr,
    num_tokens,
    eps,
    DEPTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = token < num_tokens
    n = tl.arange(0, BLOCK_N)
    logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    square_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        part = token + split * num_tokens.to(tl.int64)
        logits += tl.load(logits_ptr + part[:, None] * BLOCK_N + n[None, :], mask=is_token[:, None], other=0.0)
        square_sum += tl.load(squares_ptr + part, mask=is_token, other=0.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, DEPTH * 1.0) + eps))
    out_mask = is_token[:, None] & (n < NUM_LOGITS)[None, :]
    tl.store(out_ptr + token[:, None] * NUM_LOGITS + n[None, :], logits * rstd[:, None], mask=out_mask)


def hc_mix_triton(streams: torch.Tensor, fn: torch.Tensor, eps: float, block_m: int | None = None) -> torch.Tensor:
    """Launch both kernels on arguments ``hc_mix`` has checked; ``block_m`` overrides the table of tiles."""
    rows = as_rows(streams.flatten(1))
    num_tokens, depth = rows.shape
    num_logits = fn.shape[0]
    out = torch.empty((num_tokens, num_logits), dtype=torch.float32, device=streams.device)
    if num_tokens == 0:
        return out
    num_splits = triton.cdiv(depth, tiling.HC_MIX_SPLIT_K)
    block_n = max(16, triton.next_power_of_2(num_logits))
    logits = torch.empty((num_splits, num_tokens, block_n), dtype=torch.float32, device=streams.device)
    squares = torch.empty((num_splits, num_tokens), dtype=torch.float32, device=streams.device)
    block_m = block_m or from_table(tiling.HC_MIX_TILES, num_tokens)
    _hc_mix_parts_kernel[(triton.cdiv(num_tokens, block_m), num_splits)](
        rows,
        fn.detach().contiguous(),
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
        SPLIT_K=tiling.HC_MIX_SPLIT_K,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _hc_mix_sum_kernel[(triton.cdiv(num_tokens, 16),)](
        logits,
        squares,
        out,
        num_tokens,
        eps,
        DEPTH=depth,
        NUM_SPLITS=num_splits,
        NUM_LOGITS=num_logits,
        BLOCK_N=block_n,
        BLOCK_M=16,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
