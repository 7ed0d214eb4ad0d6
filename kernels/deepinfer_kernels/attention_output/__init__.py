"""End of attention: both output projections, and the streams behind them."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.attention_output.reference import attention_output_reference
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.linear.weights import Weight, check_blocks
from deepinfer_kernels.streams_checks import check_mix


def attention_output(
    out: torch.Tensor,
    wo_a: Weight,
    wo_b: Weight,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    quantize: bool,
) -> torch.Tensor:
    """``hc_post(mxfp8_linear(grouped_linear(out, wo_a), wo_b), streams, post, comb)``.

    Args:
        out: [T, G, K] bf16 or fp32, result of attention by group; K a multiple of 32.
        wo_a: MXFP8 weights of the groups, [G * N, K] float8_e4m3fn and scale [G * N / 32, K/32] uint8.
        wo_b: MXFP8 weight [d, G * N] and its scale.
        streams: [T, S, d], dtype of ``out``, the streams in front of the sublayer.
        post: [T, S] fp32.
        comb: [T, S, S] fp32.
        quantize: round the input of wo_b to MXFP8 first; that of wo_a never is.

    Returns:
        [T, S, d], dtype of ``out``, a new tensor; every step rounds as the operations named above do.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row.
    Source: REF, wo_a in bf16, wo_b, Block.hc_post; specification, section 2.8.
    """
    op = "attention_output"
    check_mix(op, "out", out, streams, post, comb)
    checks.require_rank(op, "out", out, 3, "[T, G, K]")
    check_blocks(op, *wo_a)
    check_blocks(op, *wo_b)
    num_tokens, _, width = streams.shape
    num_groups, depth = out.shape[1:]
    if num_groups == 0 or wo_a[0].shape[0] % num_groups != 0 or wo_a[0].shape[1] != depth:
        raise ShapeError(
            f"{op}: wo_a is {list(wo_a[0].shape)}, expected [a multiple of {num_groups}, {depth}]; out "
            f"{list(out.shape)} has {num_groups} groups of {depth} columns"
        )
    checks.require_shape(op, "out", out, (num_tokens, num_groups, depth), "one row per token of streams")
    checks.require_shape(op, "wo_b", wo_b[0], (width, wo_a[0].shape[0]), "it leads from wo_a to the streams")
    if use_triton(out):
        from deepinfer_kernels.attention_output.triton_kernel import attention_output_triton

        return attention_output_triton(out, wo_a, wo_b, streams, post, comb, quantize)
    return attention_output_reference(out, wo_a, wo_b, streams, post, comb, quantize)
