"""Collapse of the streams, the norm behind it and the quantisation behind that, a row per program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.launching import last_axis_contiguous, norm_warps
from deepinfer_kernels.linear.prepare_kernel import mxfp8_values, turned
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.rms_norm.row_kernel import normed


@triton.jit
def _hc_norm_kernel(
    streams_ptr,
    pre_ptr,
    weight_ptr,
    out_ptr,
    rows_ptr,
    expert_rows_ptr,
    stride_t,
    stride_s,
    eps,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
    DTYPE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    IS_TURNED: tl.constexpr,
    FOR_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    is_column = h < WIDTH
    weight = tl.load(weight_ptr + h, mask=is_column, other=0.0).to(tl.float32)
    wait_for_inputs(IS_EARLY)
    row_ptr = streams_ptr + token * stride_t + h
    total = tl.load(row_ptr, mask=is_column, other=0.0).to(tl.float32) * tl.load(pre_ptr + token * NUM_STREAMS)
    for s in tl.static_range(1, NUM_STREAMS):
        part = tl.load(row_ptr + s * stride_s, mask=is_column, other=0.0).to(tl.float32)
        total += part * tl.load(pre_ptr + token * NUM_STREAMS + s)
    out = normed(total.to(DTYPE).to(tl.float32), weight, eps, WIDTH, BLOCK).to(DTYPE)
    tl.store(out_ptr + token * WIDTH + h, out, mask=is_column)
    if IS_TURNED:
        values = out.to(tl.float32)
        if QUANTIZE:
            values = mxfp8_values(values, BLOCK)
        tl.store(rows_ptr + token * PADDED_WIDTH + h, turned(values, BLOCK, 2), mask=h < PADDED_WIDTH)
        if FOR_EXPERTS:
            tl.store(expert_rows_ptr + token * PADDED_WIDTH + h, turned(values, BLOCK, 4), mask=h < PADDED_WIDTH)


def hc_norm_triton(
    streams: torch.Tensor,
    pre: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    quantize: bool,
    for_experts: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel on arguments ``hc_norm`` has checked: normed rows, rows for e4m3 and for e2m1 words.

    fp32 rows that are not quantised are not exact in bf16: products and experts read the normed rows themselves.
    """
    num_tokens, num_streams, width = streams.shape
    streams = last_axis_contiguous(streams)
    is_turned = quantize or streams.dtype == torch.bfloat16
    padded = padded_depth(width)
    out = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    rows = torch.empty((num_tokens, padded), dtype=torch.bfloat16, device=streams.device) if is_turned else out
    expert_rows = torch.empty_like(rows) if for_experts and is_turned else rows
    early = starts_early(streams.device)
    if num_tokens > 0:
        _hc_norm_kernel[(num_tokens,)](
            streams,
            pre.contiguous(),
            weight.detach().contiguous(),
            out,
            rows,
            expert_rows,
            streams.stride(0),
            streams.stride(1),
            eps,
            WIDTH=width,
            PADDED_WIDTH=padded,
            NUM_STREAMS=num_streams,
            DTYPE=tl.bfloat16 if streams.dtype == torch.bfloat16 else tl.float32,
            QUANTIZE=quantize,
            IS_TURNED=is_turned,
            FOR_EXPERTS=for_experts,
            BLOCK=max(tiling.WORD_BLOCK_K, triton.next_power_of_2(width)),
            IS_EARLY=early,
            num_warps=norm_warps(width),
            enable_fp_fusion=False,
            launch_pdl=early,
        )
    return out, rows, expert_rows
