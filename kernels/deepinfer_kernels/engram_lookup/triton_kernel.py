"""The Engram lookup as one Triton kernel: a program reads and dequantises some table rows of one token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.kv_store.triton_codec import e8m0_to_float
from deepinfer_kernels.tiling import MX_BLOCK

_COLUMNS = 8  # table rows of one program: enough independent reads in flight, also from pinned host memory


@triton.jit(do_not_specialize=["num_columns"])
def _engram_lookup_kernel(
    table_ptr,
    scale_ptr,
    rows_ptr,
    out_ptr,
    num_columns,
    table_stride,
    scale_stride,
    WIDTH: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = c < num_columns
    row = tl.load(rows_ptr + token * num_columns + c, mask=is_column, other=0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    w = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, 32]
    is_scale = is_column[:, None] & (group < WIDTH // GROUP)[None, :]
    is_value = is_column[:, None, None] & (w < WIDTH)[None, :, :]
    code = tl.load(table_ptr + row[:, None, None] * table_stride + w[None, :, :], mask=is_value, other=0)
    scale = tl.load(scale_ptr + row[:, None] * scale_stride + group[None, :], mask=is_scale, other=0)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * e8m0_to_float(scale)[:, :, None]
    out = out_ptr + (token * num_columns + c[:, None, None]) * WIDTH + w[None, :, :]
    tl.store(out, value, mask=is_value)


def engram_lookup_triton(
    table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Launch the kernel on arguments ``engram_lookup`` has checked; a table is never copied."""
    num_tokens, num_columns = rows.shape
    width = table.shape[1]
    out = torch.empty((num_tokens, num_columns * width), dtype=dtype, device=rows.device)
    if out.numel() > 0:
        _engram_lookup_kernel[(num_tokens, triton.cdiv(num_columns, _COLUMNS))](
            table.view(torch.uint8),
            scale,
            rows.contiguous(),
            out,
            num_columns,
            table.stride(0),
            scale.stride(0),
            WIDTH=width,
            BLOCK_GROUPS=triton.next_power_of_2(width // MX_BLOCK),
            GROUP=MX_BLOCK,
            BLOCK_C=_COLUMNS,
            enable_fp_fusion=False,
        )
    return out
