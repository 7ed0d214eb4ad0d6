"""MXFP8 weights and the rows prepared for them: checks, and two weights that read the same rows as one."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.tiling import MX_BLOCK, WORD_BLOCK_K

Weight = tuple[torch.Tensor, torch.Tensor]
"""[N, K] float8_e4m3fn and its scales [ceil(N/32), K/32] uint8, exponent + 127."""


def check_blocks(op: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise unless ``weight`` and ``scale`` are an MXFP8 weight."""
    checks.require_dtype(op, "weight", weight, (torch.float8_e4m3fn,))
    checks.require_dtype(op, "scale", scale, (torch.uint8,))
    checks.require_rank(op, "weight", weight, 2, "[N, K]")
    checks.require_multiple(op, "weight", weight, MX_BLOCK)
    grid = (-(-weight.shape[0] // MX_BLOCK), weight.shape[1] // MX_BLOCK)
    checks.require_shape(op, "scale", scale, grid, "the weight has one scale per block of 32 x 32")


def padded_depth(depth: int) -> int:
    """K filled up to whole blocks of words."""
    return -(-depth // WORD_BLOCK_K) * WORD_BLOCK_K


def check_prepared(op: str, rows: torch.Tensor, weight: Weight) -> None:
    """Raise unless ``weight`` is an MXFP8 weight and ``rows`` were prepared from rows of its width."""
    check_blocks(op, *weight)
    checks.require_activation(op, "rows", rows)
    checks.require_rank(op, "rows", rows, 2, "[M, ...]")
    depth = weight[0].shape[1]
    if rows.shape[1] not in (depth, padded_depth(depth)):
        raise ShapeError(
            f"{op}: rows is {list(rows.shape)}, expected rows prepared from {depth} columns, as the weight "
            f"{list(weight[0].shape)} has; pass what hc_norm or the operation before gave"
        )


def check_stackable(op: str, name: str, first: Weight, second: Weight) -> None:
    """Raise unless two checked weights can be read as one: same depth, and whole blocks of scales in the first."""
    if first[0].shape[0] % MX_BLOCK != 0 or first[0].shape[1] != second[0].shape[1]:
        raise ShapeError(
            f"{op}: {name} is {list(first[0].shape)} before {list(second[0].shape)}, expected a multiple of {MX_BLOCK} "
            "rows and the same columns; the two are multiplied as one weight"
        )


def stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[N1 + N2, K] of two matrices of one dtype: a view where they follow each other in memory, else a copy."""
    first, second = first.detach(), second.detach()
    if _follows(first, second):
        return first.as_strided((first.shape[0] + second.shape[0], first.shape[1]), first.stride())
    raw = [matrix.contiguous().view(torch.uint8) for matrix in (first, second)]
    return torch.cat(raw).view(first.dtype)


def _follows(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.data_ptr() == first.data_ptr() + first.nbytes
    )
