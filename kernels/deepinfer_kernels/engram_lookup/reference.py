"""The Engram lookup in plain PyTorch."""

import torch

from deepinfer_kernels.mxfp8_quant import mxfp8_dequant


def engram_lookup_reference(
    table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Read arguments ``engram_lookup`` has already checked; see there.

    The codes travel as bytes: indexing float8 tensors is not available on every device.
    """
    num_tokens, num_columns = rows.shape
    flat = rows.reshape(-1)
    codes = table.view(torch.uint8).index_select(0, flat).view(torch.float8_e4m3fn)  # [T * C, w]
    values = mxfp8_dequant(codes, scale.index_select(0, flat), dtype)
    return values.view(num_tokens, num_columns * table.shape[1])


def make_inputs(
    num_tokens: int, num_columns: int, num_rows: int, width: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random table [num_rows, width], its scales and random rows [num_tokens, num_columns]."""
    table = torch.randn(num_rows, width, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (num_rows, width // 32), generator=generator, dtype=torch.uint8)
    rows = torch.randint(0, num_rows, (num_tokens, num_columns), generator=generator, dtype=torch.int32)
    return table.to(device), scale.to(device), rows.to(device)
