"""Pooling of token pairs as two Triton kernels: all reads of the state, then all writes to it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.launching import last_axis_contiguous


@triton.jit
def _pool_kernel(
    latent_ptr,
    score_ptr,
    positions_ptr,
    req_idx_ptr,
    state_ptr,
    state_block_ptr,
    out_ptr,
    latent_stride,
    score_stride,
    state_stride_b,
    state_stride_r,
    ring,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    is_channel = c < WIDTH
    position = tl.load(positions_ptr + token)
    request = tl.load(req_idx_ptr + token)
    if (request >= 0) & (position % 2 == 1):
        # The even token of the pair: the row before, or the row the request kept from an earlier call.
        before = tl.maximum(token - 1, 0)
        follows = (token > 0) & (tl.load(req_idx_ptr + before) == request)
        follows = follows & (tl.load(positions_ptr + before) == position - 1)
        block = tl.load(state_block_ptr + request).to(tl.int64)
        kept_ptr = state_ptr + block * state_stride_b + (position - 1) % ring * state_stride_r
        even_latent_ptr = tl.where(follows, latent_ptr + before * latent_stride, kept_ptr)
        even_score_ptr = tl.where(follows, score_ptr + before * score_stride, kept_ptr + WIDTH)
        even_latent = tl.load(even_latent_ptr + c, mask=is_channel, other=0.0)
        even_score = tl.load(even_score_ptr + c, mask=is_channel, other=0.0)
        odd_latent = tl.load(latent_ptr + token * latent_stride + c, mask=is_channel, other=0.0)
        odd_score = tl.load(score_ptr + token * score_stride + c, mask=is_channel, other=0.0)
        largest = tl.maximum(even_score, odd_score, propagate_nan=tl.PropagateNan.ALL)
        even_weight = tl.exp(even_score - largest)
        odd_weight = tl.exp(odd_score - largest)
        total = even_weight + odd_weight
        pooled = tl.div_rn(even_weight, total) * even_latent + tl.div_rn(odd_weight, total) * odd_latent
        tl.store(out_ptr + token * WIDTH + c, pooled, mask=is_channel)
    else:
        tl.store(out_ptr + token * WIDTH + c, tl.zeros([BLOCK], dtype=tl.float32), mask=is_channel)


@triton.jit(do_not_specialize=["num_tokens"])
def _keep_kernel(
    latent_ptr,
    score_ptr,
    positions_ptr,
    req_idx_ptr,
    state_ptr,
    state_block_ptr,
    num_tokens,
    latent_stride,
    score_stride,
    state_stride_b,
    state_stride_r,
    ring,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(req_idx_ptr + token)
    # A row that the same request overwrites later in this call keeps out, so that no ring row is written twice.
    is_last = token + ring >= num_tokens
    later = tl.load(req_idx_ptr + tl.where(is_last, token, token + ring))
    if (request >= 0) & (is_last | (later != request)):
        c = tl.arange(0, BLOCK)
        is_channel = c < WIDTH
        block = tl.load(state_block_ptr + request).to(tl.int64)
        kept_ptr = state_ptr + block * state_stride_b + tl.load(positions_ptr + token) % ring * state_stride_r
        latent = tl.load(latent_ptr + token * latent_stride + c, mask=is_channel, other=0.0)
        score = tl.load(score_ptr + token * score_stride + c, mask=is_channel, other=0.0)
        tl.store(kept_ptr + c, latent, mask=is_channel)
        tl.store(kept_ptr + WIDTH + c, score, mask=is_channel)


def compress_pairs_triton(
    latent: torch.Tensor,
    score: torch.Tensor,
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    state_cache: torch.Tensor,
    state_block: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch both kernels on arguments ``compress_pairs`` has checked."""
    num_tokens, width = latent.shape
    out = torch.empty((num_tokens, width), dtype=out_dtype, device=latent.device)
    if out.numel() == 0:
        return out
    latent, score = last_axis_contiguous(latent), last_axis_contiguous(score)
    assert state_cache.stride(2) == 1
    positions, req_idx, state_block = positions.contiguous(), req_idx.contiguous(), state_block.contiguous()
    strides = (latent.stride(0), score.stride(0), state_cache.stride(0), state_cache.stride(1), state_cache.shape[1])
    block = triton.next_power_of_2(width)
    inputs = (latent, score, positions, req_idx, state_cache, state_block)
    _pool_kernel[(num_tokens,)](*inputs, out, *strides, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    _keep_kernel[(num_tokens,)](*inputs, num_tokens, *strides, WIDTH=width, BLOCK=block, num_warps=4)
    return out
