"""The router on an NVIDIA GPU: scores, choice and weights of one token per program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer_kernels.linear.triton_kernel import linear_triton
from deepinfer_kernels.moe_gate.reference import SUM_EPS


@triton.jit
def _moe_gate_kernel(
    logits_ptr,
    bias_ptr,
    bias_image_ptr,
    is_image_ptr,
    topk_idx_ptr,
    topk_weights_ptr,
    scaling,
    SUM_EPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    logit = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=is_expert, other=0.0)
    score = tl.sqrt_rn(tl.where(logit > 20.0, logit, libdevice.log1p(libdevice.exp(logit))))
    bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    if HAS_IMAGE:
        bias_image = tl.load(bias_image_ptr + expert, mask=is_expert, other=0.0)
        bias = tl.where(tl.load(is_image_ptr + token) != 0, bias_image, bias)
    # Integers in the order of the floats, NaN on top: the choice is total whatever the scores are.
    bits = (score + bias).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = tl.where(is_expert, key, -0x80000000)
    is_chosen = expert < 0
    for _ in range(TOP_K):
        best = tl.max(key, axis=0)
        chosen = tl.min(tl.where((key == best) & is_expert & (is_chosen == 0), expert, BLOCK), axis=0)
        is_chosen = is_chosen | (expert == chosen)
        key = tl.where(expert == chosen, -0x80000000, key)
    slot = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    weight = score
    if TOP_K > 1:
        total = tl.sum(tl.where(is_chosen & (slot == 0), score, 0.0), axis=0)
        for index in tl.static_range(1, TOP_K):
            total += tl.sum(tl.where(is_chosen & (slot == index), score, 0.0), axis=0)
        weight = tl.div_rn(score, tl.zeros_like(score) + (total + SUM_EPS))
    tl.store(topk_idx_ptr + token * TOP_K + slot, expert, mask=is_chosen)
    tl.store(topk_weights_ptr + token * TOP_K + slot, weight * scaling, mask=is_chosen)


def moe_gate_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scaling: float,
    bias_image: torch.Tensor | None,
    is_image: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route arguments ``moe_gate`` has already checked."""
    num_tokens, num_experts = x.shape[0], weight.shape[0]
    topk_idx = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x.device)
    topk_weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        logits = linear_triton(x, weight, torch.float32)
        has_image = bias_image is not None and is_image is not None
        _moe_gate_kernel[(num_tokens,)](
            logits,
            bias.contiguous(),
            bias_image.contiguous() if bias_image is not None else bias,
            is_image.contiguous().view(torch.uint8) if is_image is not None else bias,
            topk_idx,
            topk_weights,
            float(scaling),
            SUM_EPS=SUM_EPS,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            HAS_IMAGE=has_image,
            BLOCK=max(32, triton.next_power_of_2(num_experts)),
            num_warps=1,
        )
    return topk_idx, topk_weights
