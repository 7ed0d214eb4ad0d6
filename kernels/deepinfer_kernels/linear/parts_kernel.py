"""Sum of the parts of a product whose K is cut in parts of fixed width."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling


@triton.jit
def _add_parts_kernel(parts_ptr, out_ptr, size, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts_ptr + part * size + place, mask=is_place, other=0.0)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit
def load_product(ptrs, part_stride, mask, NUM_PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """fp32 values of a product left in parts: added in ascending order from zero, then rounded to DTYPE."""
    if NUM_PARTS == 1:
        total = tl.load(ptrs, mask=mask, other=0.0)
    else:
        total = tl.load(ptrs, mask=mask, other=0.0) + 0.0
        for part in tl.static_range(1, NUM_PARTS):
            total += tl.load(ptrs + part * part_stride, mask=mask, other=0.0)
    return total.to(DTYPE).to(tl.float32)


def parts_for(
    num_parts: int, num_rows: int, num_out: int, out_dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for the parts: [num_parts, num_rows, num_out] fp32, or the result itself where there is one part."""
    dtype = out_dtype if num_parts == 1 else torch.float32
    return torch.empty((num_parts, num_rows, num_out), dtype=dtype, device=device)


def add_parts(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, num_out] of ``out_dtype``: the parts added in ascending order in fp32, from zero, rounded once."""
    num_parts, num_rows, num_out = parts.shape
    if num_parts == 1:
        return parts[0]
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=parts.device)
    _add_parts_kernel[(triton.cdiv(out.numel(), tiling.ADD_PARTS_BLOCK),)](
        parts, out, out.numel(), NUM_PARTS=num_parts, BLOCK=tiling.ADD_PARTS_BLOCK
    )
    return out
