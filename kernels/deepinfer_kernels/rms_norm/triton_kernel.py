"""RMSNorm as one Triton kernel: a program reads its row once, sums it, scales it and writes it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from deepinfer_kernels.launching import as_rows, norm_warps
from deepinfer_kernels.rms_norm.row_kernel import normed


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride_t, eps, HIDDEN_SIZE: tl.constexpr, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)  # one program owns one row
    h = tl.arange(0, BLOCK_H)
    is_column = h < HIDDEN_SIZE
    x = tl.load(x_ptr + token * x_stride_t + h, mask=is_column, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=is_column, other=0.0).to(tl.float32)
    out = normed(x, weight, eps, HIDDEN_SIZE, BLOCK_H)
    tl.store(out_ptr + token * HIDDEN_SIZE + h, out, mask=is_column)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Launch the kernel on arguments ``rms_norm`` has checked; ``out_dtype`` fp32 shows sums before the rounding."""
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    width = x.shape[-1]
    if out.numel() > 0:
        rows = as_rows(x)
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            weight.contiguous(),
            out,
            rows.stride(0),
            eps,
            HIDDEN_SIZE=width,
            BLOCK_H=triton.next_power_of_2(width),
            num_warps=norm_warps(width),
            enable_fp_fusion=False,
        )
    return out
