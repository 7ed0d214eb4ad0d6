"""Turn positions and selected entries into cache slots."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.swa_indices.reference import entry_slots_reference, window_slots_reference
from deepinfer_kernels.swa_indices.triton_kernel import entry_slots_triton, window_slots_triton

__all__ = ["entry_slots", "window_slots"]


def window_slots(
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window: int,
    floor: torch.Tensor,
) -> torch.Tensor:
    """Slots of the positions each row sees through its sliding window.

    Args:
        positions: [num_tokens] int64.
        req_idx: [num_tokens] int32, row of ``block_table``; a negative value marks a padded row, which sees nothing.
        block_table: [num_reqs, max_num_blocks] int32. Only entries of visible positions are used.
        block_size: tokens per page.
        window: positions a row sees at most, itself included.
        floor: [num_tokens] int64, first position that exists for the row (bounded replay); 0 for none.

    Returns:
        [num_tokens, window] int64: slots of max(0, p - window + 1, floor) ... p ascending, then -1.

    Raises:
        ShapeError: arguments that do not fit each other, or a size below 1.
        UnsupportedError: ``positions`` or ``floor`` is not int64.

    Invariance: exact per row; integers only.
    Source: spec section 2.5.
    """
    _check_sizes("window_slots", block_size=block_size, window=window)
    for name, tensor in (("positions", positions), ("floor", floor)):
        checks.require_dtype("window_slots", name, tensor, (torch.int64,))
        if tensor.shape != positions.shape or tensor.dim() != 1:
            raise ShapeError(
                f"window_slots: {name} has shape {list(tensor.shape)}, expected [num_tokens] like positions "
                f"{list(positions.shape)}; pass one value per row"
            )
    _check_table("window_slots", req_idx, block_table, positions.shape[0])
    if use_triton(positions):
        return window_slots_triton(positions, req_idx, block_table, block_size, window, floor)
    return window_slots_reference(positions, req_idx, block_table, block_size, window, floor)


def entry_slots(
    indices: torch.Tensor, req_idx: torch.Tensor, block_table: torch.Tensor, entries_per_block: int
) -> torch.Tensor:
    """Slots of the compressed entries each row selected.

    Args:
        indices: [num_tokens, K] int32, entry numbers within the request; negative for none.
        req_idx: [num_tokens] int32, as in ``window_slots``.
        block_table: [num_reqs, max_num_blocks] int32.
        entries_per_block: entries per page, block_size / compression ratio.

    Returns:
        [num_tokens, K] int64, in the order of ``indices``; -1 for none.

    Raises:
        ShapeError: arguments that do not fit each other, or ``entries_per_block`` below 1.

    Invariance: exact per row; integers only.
    Source: spec section 6.3.
    """
    _check_sizes("entry_slots", entries_per_block=entries_per_block)
    if indices.dim() != 2:
        raise ShapeError(
            f"entry_slots: indices has shape {list(indices.shape)}, expected [num_tokens, K]; pass one list per row"
        )
    _check_table("entry_slots", req_idx, block_table, indices.shape[0])
    if use_triton(indices):
        return entry_slots_triton(indices, req_idx, block_table, entries_per_block)
    return entry_slots_reference(indices, req_idx, block_table, entries_per_block)


def _check_sizes(operation: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ShapeError(f"{operation}: {name} is {size}, expected at least 1; pass the page or window size")


def _check_table(operation: str, req_idx: torch.Tensor, block_table: torch.Tensor, num_tokens: int) -> None:
    if req_idx.shape != (num_tokens,):
        raise ShapeError(
            f"{operation}: req_idx has shape {list(req_idx.shape)}, expected [{num_tokens}]; pass one request per row"
        )
    if block_table.dim() != 2 or (num_tokens > 0 and block_table.numel() == 0):
        raise ShapeError(
            f"{operation}: block_table has shape {list(block_table.shape)}, expected [num_reqs, max_num_blocks], not "
            "empty; pass the table of the step"
        )
