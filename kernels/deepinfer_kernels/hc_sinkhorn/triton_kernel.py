"""Mix coefficients as one Triton kernel: some tokens per program, everything in registers."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling


@triton.jit
def _serial_sum(values, AXIS: tl.constexpr, NUM_STREAMS: tl.constexpr, PADDED: tl.constexpr):
    """Sums over one stream axis of [T, PADDED, PADDED] in ascending index; each term is picked out exactly."""
    index = tl.arange(0, PADDED)
    index = index[None, :, None] if AXIS == 1 else index[None, None, :]
    total = tl.sum(tl.where(index == 0, values, 0.0), axis=AXIS)
    for s in tl.static_range(1, NUM_STREAMS):
        total += tl.sum(tl.where(index == s, values, 0.0), axis=AXIS)
    return tl.expand_dims(total, AXIS)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, tl.exp(-x) + 1.0)


@triton.jit
def _hc_sinkhorn_kernel(
    logits_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    num_tokens,
    iters,
    eps,
    NUM_STREAMS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    S: tl.constexpr = NUM_STREAMS
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    s = tl.arange(0, PADDED)
    is_gate = is_token[:, None] & (s < S)[None, :]
    row = token[:, None] * ((2 + S) * S)
    pre = tl.load(logits_ptr + row + s[None, :], mask=is_gate, other=0.0) * tl.load(scale_ptr)
    pre += tl.load(base_ptr + s, mask=s < S, other=0.0)[None, :]
    tl.store(pre_ptr + token[:, None] * S + s[None, :], _sigmoid(pre) + eps, mask=is_gate)
    post = tl.load(logits_ptr + row + S + s[None, :], mask=is_gate, other=0.0) * tl.load(scale_ptr + 1)
    post += tl.load(base_ptr + S + s, mask=s < S, other=0.0)[None, :]
    tl.store(post_ptr + token[:, None] * S + s[None, :], _sigmoid(post) * 2.0, mask=is_gate)

    pair = s[:, None] * S + s[None, :]
    is_pair = (s < S)[:, None] & (s < S)[None, :]
    is_comb = is_token[:, None, None] & is_pair[None, :, :]
    comb = tl.load(logits_ptr + row[:, :, None] + 2 * S + pair[None, :, :], mask=is_comb, other=0.0)
    comb = comb * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * S + pair, mask=is_pair, other=0.0)[None, :, :]
    comb = tl.where(is_pair[None, :, :], comb, -float("inf"))
    comb = tl.exp(comb - tl.max(tl.where(is_pair[None, :, :], comb, -3.4e38), axis=2)[:, :, None])
    comb = tl.where(is_pair[None, :, :], comb, 0.0)
    comb = tl.div_rn(comb, tl.broadcast_to(_serial_sum(comb, 2, S, PADDED), comb.shape)) + eps
    comb = tl.div_rn(comb, tl.broadcast_to(_serial_sum(comb, 1, S, PADDED) + eps, comb.shape))
    for _ in range(iters - 1):
        comb = tl.div_rn(comb, tl.broadcast_to(_serial_sum(comb, 2, S, PADDED) + eps, comb.shape))
        comb = tl.div_rn(comb, tl.broadcast_to(_serial_sum(comb, 1, S, PADDED) + eps, comb.shape))
    tl.store(comb_ptr + token[:, None, None] * (S * S) + pair[None, :, :], comb, mask=is_comb)


def hc_sinkhorn_triton(
    mix_logits: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, num_streams: int, iters: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel on arguments ``hc_sinkhorn`` has checked."""
    num_tokens = mix_logits.shape[0]
    pre = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=mix_logits.device)
    post = torch.empty_like(pre)
    comb = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=mix_logits.device)
    if num_tokens > 0:
        _hc_sinkhorn_kernel[(triton.cdiv(num_tokens, tiling.SINKHORN_BLOCK_T),)](
            mix_logits.contiguous(),
            scale.contiguous(),
            base.contiguous(),
            pre,
            post,
            comb,
            num_tokens,
            iters,
            eps,
            NUM_STREAMS=num_streams,
            PADDED=triton.next_power_of_2(num_streams),
            BLOCK_T=tiling.SINKHORN_BLOCK_T,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return pre, post, comb
