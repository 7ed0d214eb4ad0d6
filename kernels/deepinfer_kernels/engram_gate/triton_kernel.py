"""The Engram gate as one Triton kernel: a program owns one stream of one token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.engram_gate.reference import SCORE_FLOOR
from deepinfer_kernels.launching import last_axis_contiguous, norm_warps


@triton.jit
def _engram_gate_kernel(
    streams_ptr,
    key_ptr,
    value_ptr,
    q_weight_ptr,
    k_weight_ptr,
    is_image_ptr,
    out_ptr,
    streams_stride_t,
    streams_stride_s,
    key_stride_t,
    key_stride_s,
    value_stride_t,
    eps,
    width_factor,
    score_floor,
    NUM_STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_IMAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    h = tl.arange(0, BLOCK)
    is_column = h < WIDTH
    stored = tl.load(streams_ptr + token * streams_stride_t + s * streams_stride_s + h, mask=is_column, other=0.0)
    x = stored.to(tl.float32)
    k = tl.load(key_ptr + token * key_stride_t + s * key_stride_s + h, mask=is_column, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + token * value_stride_t + h, mask=is_column, other=0.0).to(tl.float32)
    weight = tl.load(q_weight_ptr + s * WIDTH + h, mask=is_column, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight_ptr + s * WIDTH + h, mask=is_column, other=0.0).to(tl.float32)
    dot = tl.sum(x * k * weight, axis=0)
    x_rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=0), WIDTH * 1.0) + eps))
    k_rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(k * k, axis=0), WIDTH * 1.0) + eps))
    u = dot * (x_rstd * k_rstd) * width_factor
    size = tl.abs(u)
    size = tl.sqrt_rn(tl.where(size < score_floor, score_floor, size))  # a NaN stays one
    # The sign of u, also of a zero.
    signed = tl.where(u.to(tl.int32, bitcast=True) < 0, -size, size)
    gate = tl.div_rn(1.0, tl.exp(-signed) + 1.0)
    out = (x + gate * value).to(out_ptr.dtype.element_ty)
    if HAS_IMAGES:
        is_image = tl.load(is_image_ptr + token) != 0
        out = tl.where(is_image, stored.to(out_ptr.dtype.element_ty), out)
    tl.store(out_ptr + (token * NUM_STREAMS + s) * WIDTH + h, out, mask=is_column)


def engram_gate_triton(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    is_image: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments ``engram_gate`` has checked."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=out_dtype or streams.dtype, device=streams.device)
    if out.numel() > 0:
        streams, key, value = (last_axis_contiguous(tensor) for tensor in (streams, key, value))
        _engram_gate_kernel[(num_tokens, num_streams)](
            streams,
            key,
            value,
            q_weight.contiguous(),
            k_weight.contiguous(),
            is_image.contiguous().view(torch.uint8) if is_image is not None else None,
            out,
            streams.stride(0),
            streams.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            eps,
            width**-0.5,
            SCORE_FLOOR,
            NUM_STREAMS=num_streams,
            WIDTH=width,
            HAS_IMAGES=is_image is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=norm_warps(width),
            enable_fp_fusion=False,
        )
    return out
