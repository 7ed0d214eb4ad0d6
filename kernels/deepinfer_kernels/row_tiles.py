"""Matrix products cut into row tiles of one fixed height, so that a row keeps its bits in any batch."""

import torch
from torch.nn.functional import pad

from deepinfer_kernels.tiling import REFERENCE_DEPTH_MULTIPLE, REFERENCE_ROW_TILE

_ALIGNMENT_BYTES = 64  # BLAS may take another path on operands that start elsewhere


def tiled_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply every row of ``x`` with the transpose of ``w``.

    Args:
        x: [M, K] fp32, any strides; M may be 0.
        w: [N, K] fp32.

    Returns:
        [M, N] fp32, a new tensor. Each product runs on exactly REFERENCE_ROW_TILE rows; missing rows are zero, and
        so are the columns that fill K up to a multiple of 16.

    Invariance: bitwise per row; a row depends on that row and ``w`` only.
    """
    num_rows, depth = x.shape
    if depth % REFERENCE_DEPTH_MULTIPLE != 0:
        missing = -depth % REFERENCE_DEPTH_MULTIPLE
        x, w = pad(x, (0, missing)), pad(w, (0, missing))
        depth += missing
    wt = w.t()
    if num_rows == REFERENCE_ROW_TILE:
        return torch.mm(_aligned(x), wt)
    if num_rows < REFERENCE_ROW_TILE:
        tile = x.new_zeros(REFERENCE_ROW_TILE, depth)
        tile[:num_rows] = x
        return torch.mm(tile, wt)[:num_rows]
    num_full = num_rows // REFERENCE_ROW_TILE * REFERENCE_ROW_TILE
    out = x.new_empty(num_rows, w.shape[0])
    rows = _aligned(x)
    for start in range(0, num_full, REFERENCE_ROW_TILE):
        out[start : start + REFERENCE_ROW_TILE] = torch.mm(rows[start : start + REFERENCE_ROW_TILE], wt)
    if num_full < num_rows:
        tile = x.new_zeros(REFERENCE_ROW_TILE, depth)
        tile[: num_rows - num_full] = rows[num_full:]
        out[num_full:] = torch.mm(tile, wt)[: num_rows - num_full]
    return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    rows = x.contiguous()
    if rows.data_ptr() % _ALIGNMENT_BYTES != 0:
        rows = rows.clone()
    return rows
