"""End of the mixture of experts: the sum of all experts, and the streams behind it."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.experts_output.reference import experts_output_reference
from deepinfer_kernels.streams_checks import check_mix


def experts_output(
    routed: torch.Tensor, shared: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """``hc_post(moe_combine(routed, shared), streams, post, comb)``.

    Args:
        routed: [T, top_k, d] bf16 or fp32, result of ``moe_experts``; top_k >= 1.
        shared: [T, d], dtype of ``routed``, result of ``shared_expert``.
        streams: [T, S, d], dtype of ``routed``, the streams in front of the sublayer.
        post: [T, S] fp32.
        comb: [T, S, S] fp32.

    Returns:
        [T, S, d], dtype of ``routed``, a new tensor; the sum of the experts is rounded, then the streams are.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row.
    Source: REF, classes MoE and Block.hc_post.
    """
    op = "experts_output"
    check_mix(op, "routed", routed, streams, post, comb)
    checks.require_dtype(op, "shared", shared, (routed.dtype,))
    checks.require_rank(op, "routed", routed, 3, "[T, top_k, d]")
    if routed.shape[1] == 0:
        raise ShapeError(f"{op}: routed is {list(routed.shape)}, expected at least one slot; pass moe_experts' result")
    num_tokens, _, width = streams.shape
    checks.require_shape(op, "routed", routed, (num_tokens, routed.shape[1], width), "one row per token of streams")
    checks.require_shape(op, "shared", shared, (num_tokens, width), "one row per token of streams")
    if use_triton(routed):
        from deepinfer_kernels.experts_output.triton_kernel import experts_output_triton

        return experts_output_triton(routed, shared, streams, post, comb)
    return experts_output_reference(routed, shared, streams, post, comb)
