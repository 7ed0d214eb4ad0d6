"""Norms of the two latents that one product gives: queries, quantised for the next product, and keys."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.linear.parts_kernel import load_product
from deepinfer_kernels.linear.prepare_kernel import mxfp8_values, turned
from deepinfer_kernels.linear.triton_kernel import prepared_parts
from deepinfer_kernels.linear.weights import Weight, padded_depth, stacked
from deepinfer_kernels.rms_norm.row_kernel import normed


@triton.jit
def _latent(
    parts_ptr,
    weight_ptr,
    part_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    h = tl.arange(0, BLOCK)
    is_column = h < WIDTH
    weight = tl.load(weight_ptr + h, mask=is_column, other=0.0).to(tl.float32)
    wait_for_inputs(IS_EARLY)
    x = load_product(parts_ptr + h, part_stride, is_column, NUM_PARTS, DTYPE)
    return normed(x, weight, eps, WIDTH, BLOCK).to(DTYPE)


@triton.jit(do_not_specialize=["part_stride"])
def _norm_latents_kernel(
    parts_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    q_rows_ptr,
    kv_ptr,
    part_stride,
    eps,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    PADDED_Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    parts_ptr += token * (Q_WIDTH + KV_WIDTH)
    if tl.program_id(1) == 0:
        q = _latent(parts_ptr, q_weight_ptr, part_stride, eps, Q_WIDTH, Q_BLOCK, NUM_PARTS, DTYPE, IS_EARLY)
        q_column = tl.arange(0, Q_BLOCK)
        q_rows_ptrs = q_rows_ptr + token * PADDED_Q + q_column
        values = q.to(tl.float32)
        if QUANTIZE:
            values = mxfp8_values(values, Q_BLOCK)
        if IS_TURNED:
            tl.store(q_rows_ptrs, turned(values, Q_BLOCK, 2), mask=q_column < PADDED_Q)
        else:
            tl.store(q_rows_ptrs, values, mask=q_column < PADDED_Q)
    else:
        parts_ptr += Q_WIDTH
        kv = _latent(parts_ptr, kv_weight_ptr, part_stride, eps, KV_WIDTH, KV_BLOCK, NUM_PARTS, DTYPE, IS_EARLY)
        kv_column = tl.arange(0, KV_BLOCK)
        tl.store(kv_ptr + token * KV_WIDTH + kv_column, kv, mask=kv_column < KV_WIDTH)


def latent_projections_triton(
    rows: torch.Tensor,
    q_weight: Weight,
    kv_weight: Weight,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply and norm arguments ``latent_projections`` has already checked."""
    weight, scale = stacked(q_weight[0], kv_weight[0]), stacked(q_weight[1], kv_weight[1])
    return norm_latents(
        prepared_parts(rows, weight, scale, out_dtype), q_norm, kv_norm, eps, dtype=out_dtype, quantize=quantize
    )


def norm_latents(
    parts: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the product [parts, M, Nq + Nkv]: prepared queries, and keys [M, Nkv] of ``dtype``."""
    num_parts, num_tokens, _ = parts.shape
    q_width, kv_width = q_norm.shape[0], kv_norm.shape[0]
    is_turned = quantize or dtype == torch.bfloat16
    padded = padded_depth(q_width) if is_turned else q_width
    q_dtype = torch.bfloat16 if is_turned else dtype
    q_rows = torch.empty((num_tokens, padded), dtype=q_dtype, device=parts.device)
    kv = torch.empty((num_tokens, kv_width), dtype=dtype, device=parts.device)
    early = starts_early(parts.device)
    if num_tokens > 0:
        _norm_latents_kernel[(num_tokens, 2)](
            parts,
            q_norm.detach().contiguous(),
            kv_norm.detach().contiguous(),
            q_rows,
            kv,
            parts.stride(0),
            eps,
            Q_WIDTH=q_width,
            KV_WIDTH=kv_width,
            PADDED_Q=padded,
            Q_BLOCK=max(tiling.WORD_BLOCK_K, triton.next_power_of_2(q_width)),
            KV_BLOCK=triton.next_power_of_2(kv_width),
            NUM_PARTS=num_parts,
            DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
            QUANTIZE=quantize,
            IS_TURNED=is_turned,
            IS_EARLY=early,
            num_warps=tiling.LATENT_WARPS,
            enable_fp_fusion=False,
            launch_pdl=early,
        )
    return q_rows, kv
