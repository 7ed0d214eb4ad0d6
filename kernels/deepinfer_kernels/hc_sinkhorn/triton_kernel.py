"""Mix coefficients as one Triton kernel: some tokens per program, everything in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling


@triton.jit
def _normalise(comb, S: tl.constexpr, LINE: tl.constexpr, STEP: tl.constexpr, eps):
    """Divide the S * S tensors of tokens by serial sums + eps; line l holds the tensors l * LINE + place * STEP.

    The division is the branch-free path of the hardware's IEEE division, written out so that the 16 divisions of a step
    run side by side: a reciprocal with one correction, a quotient with two. It rounds correctly where nothing
    underflows, that is for quotients above 2^-100.
    """
    divisors = ()
    reciprocals = ()
    for line in tl.static_range(S):
        total = comb[line * LINE]
        for place in tl.static_range(1, S):
            total += comb[line * LINE + place * STEP]
        total += eps
        guess = 1.0 / total
        divisors = divisors + (total,)  # noqa: RUF005
        reciprocals = reciprocals + (tl.fma(guess, tl.fma(-total, guess, 1.0), guess),)  # noqa: RUF005
    out = ()
    for pair in tl.static_range(S * S):
        divisor = divisors[pair // LINE % S]
        reciprocal = reciprocals[pair // LINE % S]
        quotient = comb[pair] * reciprocal
        quotient = tl.fma(tl.fma(-divisor, quotient, comb[pair]), reciprocal, quotient)
        quotient = tl.fma(tl.fma(-divisor, quotient, comb[pair]), reciprocal, quotient)
        out = out + (quotient,)  # noqa: RUF005
    return out


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, tl.exp(-x) + 1.0)


@triton.jit(do_not_specialize=["num_tokens"])
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
    BLOCK_T: tl.constexpr,
):
    S: tl.constexpr = NUM_STREAMS
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    logits_ptr += token * ((2 + S) * S)
    for s in tl.static_range(S):
        pre = tl.load(logits_ptr + s, mask=is_token, other=0.0) * tl.load(scale_ptr) + tl.load(base_ptr + s)
        tl.store(pre_ptr + token * S + s, _sigmoid(pre) + eps, mask=is_token)
        post = tl.load(logits_ptr + S + s, mask=is_token, other=0.0) * tl.load(scale_ptr + 1)
        post += tl.load(base_ptr + S + s)
        tl.store(post_ptr + token * S + s, _sigmoid(post) * 2.0, mask=is_token)

    # One tensor of tokens for each of the S * S values: a thread owns whole tokens, and every sum is a written chain.
    comb = ()
    for i in tl.static_range(S):
        row = ()
        for j in tl.static_range(S):
            logit = tl.load(logits_ptr + 2 * S + i * S + j, mask=is_token, other=0.0) * tl.load(scale_ptr + 2)
            row = row + (logit + tl.load(base_ptr + 2 * S + i * S + j),)  # noqa: RUF005
        largest = row[0]
        for j in tl.static_range(1, S):
            largest = tl.maximum(largest, row[j])
        for j in tl.static_range(S):
            comb = comb + (tl.exp(row[j] - largest),)  # noqa: RUF005
    softmax = _normalise(comb, S, S, 1, 0.0)
    comb = ()
    for pair in tl.static_range(S * S):
        comb = comb + (softmax[pair] + eps,)  # noqa: RUF005
    comb = _normalise(comb, S, 1, S, eps)
    for _ in range(iters - 1):
        comb = _normalise(_normalise(comb, S, S, 1, eps), S, 1, S, eps)
    for pair in tl.static_range(S * S):
        tl.store(comb_ptr + token * (S * S) + pair, comb[pair], mask=is_token)


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
            BLOCK_T=tiling.SINKHORN_BLOCK_T,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return pre, post, comb
