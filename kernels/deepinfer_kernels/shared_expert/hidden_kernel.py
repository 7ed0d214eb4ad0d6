"""SwiGLU between the products of the shared expert: adds their parts, quantises for the next product."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.linear.parts_kernel import load_product
from deepinfer_kernels.linear.prepare_kernel import mxfp8_values, turned
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.swiglu.triton_kernel import clamped_swiglu

_BLOCK = 512


@triton.jit(do_not_specialize=["part_stride"])
def _swiglu_rows_kernel(
    parts_ptr,
    rows_ptr,
    limit,
    part_stride,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    IS_TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    ptrs = parts_ptr + token * (2 * WIDTH) + column
    gate = load_product(ptrs, part_stride, is_column, NUM_PARTS, DTYPE)
    up = load_product(ptrs + WIDTH, part_stride, is_column, NUM_PARTS, DTYPE)
    hidden = clamped_swiglu(gate, up, limit).to(DTYPE).to(tl.float32)
    if QUANTIZE:
        hidden = mxfp8_values(hidden, BLOCK)
    if IS_TURNED:
        hidden = turned(hidden, BLOCK, 2)
    tl.store(rows_ptr + token * PADDED_WIDTH + column, hidden, mask=column < PADDED_WIDTH)


def swiglu_rows(parts: torch.Tensor, limit: float, *, dtype: torch.dtype, quantize: bool) -> torch.Tensor:
    """From the product [parts, M, gate then up]: hidden values prepared for e4m3 words, [M, padded width] bf16."""
    num_parts, num_tokens, width = parts.shape[0], parts.shape[1], parts.shape[2] // 2
    is_turned = quantize or dtype == torch.bfloat16
    padded = padded_depth(width) if is_turned else width
    rows = torch.empty((num_tokens, padded), dtype=torch.bfloat16 if is_turned else dtype, device=parts.device)
    early = starts_early(parts.device)
    if num_tokens > 0:
        _swiglu_rows_kernel[(num_tokens, triton.cdiv(padded, _BLOCK))](
            parts,
            rows,
            float(limit),
            parts.stride(0),
            WIDTH=width,
            PADDED_WIDTH=padded,
            NUM_PARTS=num_parts,
            DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
            QUANTIZE=quantize,
            IS_TURNED=is_turned,
            BLOCK=_BLOCK,
            IS_EARLY=early,
            launch_pdl=early,
        )
    return rows
