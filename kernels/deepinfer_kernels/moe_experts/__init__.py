"""Routed experts: the SwiGLU network of every chosen expert, on MXFP4 weights."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_tilelang, use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.moe_experts.reference import moe_experts_reference
from deepinfer_kernels.moe_experts.shares import Gather
from deepinfer_kernels.tiling import MX_BLOCK


def _check_weights(
    hidden_size: int,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    is_cut: bool,
) -> None:
    checks.require_rank("moe_experts", "w13", w13, 3, "[num_experts, 2 * intermediate_size, hidden_size / 2]")
    num_experts, own = w13.shape[0], w13.shape[1] // 2
    intermediate_size, num_outputs = own, hidden_size
    if is_cut:
        checks.require_rank("moe_experts", "w2", w2, 3, "[num_experts, outputs, intermediate_size / 2]")
        intermediate_size, num_outputs = 2 * w2.shape[2], w2.shape[1]
    if hidden_size % MX_BLOCK != 0 or intermediate_size % MX_BLOCK != 0 or w13.shape[1] % 2 != 0:
        raise ShapeError(
            f"moe_experts: w13 is {list(w13.shape)} for rows of {hidden_size}, expected hidden_size and "
            f"intermediate_size to be multiples of {MX_BLOCK}; every {MX_BLOCK} values share one scale"
        )
    if own == 0 or intermediate_size % own != 0 or num_outputs * (intermediate_size // own) != hidden_size:
        raise ShapeError(
            f"moe_experts: w13 is {list(w13.shape)} and w2 is {list(w2.shape)} for rows of {hidden_size}, expected "
            "equal shares of the outputs of both; give every rank the same share of the two"
        )
    for name, tensor, num_rows, num_columns in (
        ("w13", w13, 2 * own, hidden_size // 2),
        ("w13_scale", w13_scale, 2 * own, hidden_size // MX_BLOCK),
        ("w2", w2, num_outputs, intermediate_size // 2),
        ("w2_scale", w2_scale, num_outputs, intermediate_size // MX_BLOCK),
    ):
        checks.require_dtype("moe_experts", name, tensor, (torch.uint8,))
        checks.require_shape("moe_experts", name, tensor, (num_experts, num_rows, num_columns), "x and w13 set it")


def _check_routing(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor | None
) -> None:
    checks.require_dtype("moe_experts", "topk_idx", topk_idx, (torch.int32,))
    checks.require_dtype("moe_experts", "topk_weights", topk_weights, (torch.float32,))
    checks.require_rank("moe_experts", "x", x, 2, "[num_tokens, hidden_size]")
    checks.require_rank("moe_experts", "topk_idx", topk_idx, 2, "[num_tokens, top_k]")
    num_tokens, top_k = x.shape[0], topk_idx.shape[1]
    if top_k == 0:
        raise ShapeError(f"moe_experts: topk_idx is {list(topk_idx.shape)}, expected top_k >= 1; route the rows first")
    if rows is not None:
        checks.require_shape("moe_experts", "rows", rows, (num_tokens, rows.shape[-1]), "one row per row of x")
    checks.require_shape("moe_experts", "topk_idx", topk_idx, (num_tokens, top_k), "one row per row of x")
    checks.require_shape("moe_experts", "topk_weights", topk_weights, (num_tokens, top_k), "one per chosen expert")


def moe_experts(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    quantize_input: bool,
    rows: torch.Tensor | None = None,
    num_shares: int = 1,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Compute ``w2 @ (topk_weight * swiglu(w1 @ x, w3 @ x))`` for every chosen expert of every token.

    Args:
        x: [num_tokens, hidden_size], bf16 or fp32.
        topk_idx: [num_tokens, top_k] int32, top_k >= 1, ids 0 ... num_experts - 1 (not checked: they stay on the
            device); -1: the expert is elsewhere, and its slot of the result has no meaning.
        topk_weights: [num_tokens, top_k] fp32, multiplied before ``w2``.
        w13: [num_experts, 2 * intermediate_size, hidden_size / 2] uint8, packed MXFP4, low nibble = even column; the
            rows of w1 (gate), then those of w3 (up).
        w13_scale: [num_experts, 2 * intermediate_size, hidden_size / 32] uint8, raw E8M0 bytes.
        w2: [num_experts, hidden_size, intermediate_size / 2] uint8, packed MXFP4.
        w2_scale: [num_experts, hidden_size, intermediate_size / 32] uint8, raw E8M0 bytes.
        limit: swiglu_limit; 0 turns the clamp off.
        quantize_input: round ``x`` and the input of w2 to MXFP8 first (modes ref and q32).
        rows: ``x`` as ``hc_norm`` prepares it for the experts, with the same ``quantize_input``; saves the GPU that.
        num_shares: the weights are about one of this many shares of the experts that rows were sent to; chooses tiles.
        gather: puts the columns of every rank side by side, [pairs, own columns] to [pairs, intermediate_size]. The
            weights are then an equal share of the outputs of both products: rows of w1, the same of w3, rows of w2.

    Returns:
        [num_tokens, top_k, rows of w2], dtype of ``x``, a new tensor; slot k holds expert ``topk_idx[:, k]``. Products
        accumulate in fp32; each product and the SwiGLU round once to the dtype of ``x``.

    Raises:
        ShapeError: the shapes do not fit together.
        UnsupportedError: a dtype is not the one above.

    Invariance: bitwise per row; a row depends on that row of ``x``, ``topk_idx`` and ``topk_weights`` and on the
    weights of its experts only.
    Source: REF, classes Expert and MoE; spec 2.10 and 5.2.
    """
    checks.require_activation("moe_experts", "x", x)
    _check_routing(x, topk_idx, topk_weights, rows)
    _check_weights(x.shape[1], w13, w13_scale, w2, w2_scale, is_cut=gather is not None)
    given = (x, topk_idx, topk_weights, w13, w13_scale, w2, w2_scale)
    # fp32 activations that are not quantised (mode s32, a test mode) are not exact in bf16: the reference runs them.
    if use_triton(x) and (quantize_input or x.dtype == torch.bfloat16):
        from deepinfer_kernels.moe_experts.triton_kernel import moe_experts_triton as run

        if use_tilelang(x):
            from deepinfer_kernels.moe_experts import tilelang_kernel

            run = tilelang_kernel.moe_experts_tilelang
        return run(*given, rows, limit=limit, quantize_input=quantize_input, num_shares=num_shares, gather=gather)
    return moe_experts_reference(*given, limit=limit, quantize_input=quantize_input, gather=gather)
