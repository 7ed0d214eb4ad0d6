"""Clamped SwiGLU on an NVIDIA GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous


@triton.jit
def clamped_swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in fp32, NaN kept; limit 0 clamps nothing."""
    bound = tl.where(limit > 0, limit, float("inf"))
    gate = tl.minimum(gate, bound, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, bound, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(gate, libdevice.exp(-gate) + 1.0) * up


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    row_weight_ptr,
    out_ptr,
    gate_stride_m,
    up_stride_m,
    limit,
    WIDTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride_m + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride_m + column, mask=is_column, other=0.0).to(tl.float32)
    hidden = clamped_swiglu(gate, up, limit)
    if HAS_WEIGHT:
        hidden = hidden * tl.load(row_weight_ptr + row)
    tl.store(out_ptr + row * WIDTH + column, hidden.to(out_ptr.dtype.element_ty), mask=is_column)


def swiglu_triton(gate: torch.Tensor, up: torch.Tensor, limit: float, row_weight: torch.Tensor | None) -> torch.Tensor:
    """Launch the kernel on arguments ``swiglu`` has already checked."""
    num_rows, width = gate.shape
    out = torch.empty((num_rows, width), dtype=gate.dtype, device=gate.device)
    if num_rows > 0 and width > 0:
        gate, up = last_axis_contiguous(gate), last_axis_contiguous(up)
        _swiglu_kernel[(num_rows, triton.cdiv(width, tiling.ELEMENTWISE_BLOCK))](
            gate,
            up,
            row_weight.contiguous() if row_weight is not None else gate,
            out,
            gate.stride(0),
            up.stride(0),
            float(limit),
            WIDTH=width,
            HAS_WEIGHT=row_weight is not None,
            BLOCK=tiling.ELEMENTWISE_BLOCK,
        )
    return out
