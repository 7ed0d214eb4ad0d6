"""What the launchers of the Triton kernels share: views of rows, and look-ups in the tables of ``tiling``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from deepinfer_kernels import tiling


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as [rows, last axis] with the last axis contiguous; copies only where no such view exists."""
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] > 0 else x.new_empty(x.shape[:-1].numel(), 0)
    return last_axis_contiguous(rows)


def last_axis_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where neighbours of its last axis are neighbours in memory, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def from_table[Entry](table: Sequence[tuple[int, Entry]], size: int) -> Entry:
    """Entry of the first pair whose number is not below ``size``."""
    for limit, value in table:
        if size <= limit:
            return value
    raise AssertionError(f"{size} is beyond the table {table}")


def norm_warps(width: int) -> int:
    """Warps that sum one row of ``width`` values."""
    return from_table(tiling.NORM_WARPS_BY_WIDTH, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRows:
    """Rows of logits for kernels that walk a row in blocks: the rows, the block and its warps, 8 values a thread."""

    logits: torch.Tensor
    block: int
    num_warps: int


def sampler_rows(logits: torch.Tensor, largest_block: int) -> SamplerRows:
    """Rows with neighbours in memory; the block is at most ``largest_block`` and no wider than the vocabulary."""
    block = min(largest_block, max(32, triton.next_power_of_2(logits.shape[1])))
    return SamplerRows(logits=last_axis_contiguous(logits), block=block, num_warps=max(1, block // 256))


def launch_quantiser(
    kernel: Any, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, group: int, **constants: object
) -> None:
    """Launch a quantiser of blocks of ``group`` values over ``x``, any number of axes; nothing where there is none."""
    rows = as_rows(x)
    num_blocks = rows.numel() // group
    if num_blocks > 0:
        kernel[(triton.cdiv(num_blocks, tiling.QUANT_BLOCKS),)](
            rows,
            out,
            scale,
            num_blocks,
            rows.stride(0),
            ROW_BLOCKS=rows.shape[1] // group,
            BLOCKS=tiling.QUANT_BLOCKS,
            **constants,
        )


def launch_fp4_quantiser(
    kernel: Any, x: torch.Tensor, group: int, **constants: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same to packed e2m1 codes, two in a byte, and a scale byte for each block."""
    packed = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // group), dtype=torch.uint8, device=x.device)
    launch_quantiser(kernel, x, packed, scale, group, IS_FAKE=False, **constants)
    return packed, scale


def launch_fake_quantiser(kernel: Any, x: torch.Tensor, group: int, **constants: object) -> torch.Tensor:
    """The same to codes and back, in the dtype of ``x``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_quantiser(kernel, x, out, out, group, IS_FAKE=True, **constants)
    return out
