"""Choose entries and candidate blocks by index score."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.indexer_topk.reference import (
    candidate_blocks_reference,
    mask_to_candidates_reference,
    topk_indices_reference,
)
from deepinfer_kernels.indexer_topk.triton_candidates import candidate_blocks_triton, mask_to_candidates_triton
from deepinfer_kernels.indexer_topk.triton_kernel import topk_indices_triton

__all__ = ["candidate_blocks", "mask_to_candidates", "topk_indices"]


def topk_indices(scores: torch.Tensor, k: int, num_visible: torch.Tensor | None = None) -> torch.Tensor:
    """The ``k`` best entries of each row by (score descending, index ascending).

    Args:
        scores: [num_tokens, num_entries] fp32; -inf (and NaN) is never chosen, -0 equals 0.
        k: entries to choose; may exceed ``num_entries``.
        num_visible: [num_tokens] int64, how many entries the row has, at most ``num_entries``; None: all. Scores from
            there on are not read and may hold anything; on a GPU the time follows it, not the width.

    Returns:
        [num_tokens, k] int32: ascending indices, then -1.

    Raises:
        ShapeError: ``scores`` is not a matrix, or ``k`` is negative.
        UnsupportedError: ``scores`` is not fp32.

    Invariance: exact per row; the order is total, so the set does not depend on the algorithm or on columns of -inf.
    Source: spec sections 2.7 and 10.2 row 20.
    """
    _check("topk_indices", scores, "k", k, 0)
    if num_visible is not None:
        _check_visible("topk_indices", scores, num_visible)
    if use_triton(scores):
        return topk_indices_triton(scores, k, num_visible)
    return topk_indices_reference(scores, k, num_visible)


def candidate_blocks(scores: torch.Tensor, num_visible: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """The blocks of entries that later layers may choose from.

    A block scores as its best entry; the block of the newest visible entry is always taken.

    Args:
        scores: [num_tokens, num_entries] fp32; from ``num_visible`` on they are not read and may hold anything.
        num_visible: [num_tokens] int64, at most ``num_entries``.
        num_blocks: blocks to choose.
        block_size: entries per block; the last block may be cut by ``num_entries``.

    Returns:
        [num_tokens, num_blocks] int32: ascending block numbers, then -1. Blocks without a finite score are dropped.

    Raises:
        ShapeError: arguments that do not fit each other.
        UnsupportedError: ``scores`` is not fp32.

    Invariance: exact per row, ties to the lower block.
    Source: REF, class Indexer; spec section 2.7, step 2.
    """
    _check("candidate_blocks", scores, "num_blocks", num_blocks, 0)
    _check("candidate_blocks", scores, "block_size", block_size, 1)
    _check_visible("candidate_blocks", scores, num_visible)
    if use_triton(scores):
        return candidate_blocks_triton(scores, num_visible, num_blocks, block_size)
    return candidate_blocks_reference(scores, num_visible, num_blocks, block_size)


def mask_to_candidates(scores: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Set every score outside the candidate blocks of its row to -inf.

    Args:
        scores: [num_tokens, num_entries] fp32.
        blocks: [num_tokens, B] int32 from ``candidate_blocks``; negative for none.
        block_size: entries per block.

    Returns:
        [num_tokens, num_entries] fp32, a new tensor.

    Raises:
        ShapeError: arguments that do not fit each other.
        UnsupportedError: ``scores`` is not fp32.

    Invariance: exact per row.
    Source: REF, class Indexer; spec section 2.7, step 3.
    """
    _check("mask_to_candidates", scores, "block_size", block_size, 1)
    if blocks.dim() != 2 or blocks.shape[0] != scores.shape[0]:
        raise ShapeError(
            f"mask_to_candidates: blocks has shape {list(blocks.shape)}, expected [{scores.shape[0]}, B], the first "
            f"axis of scores {list(scores.shape)}; pass the lists of the same rows"
        )
    if use_triton(scores):
        return mask_to_candidates_triton(scores, blocks, block_size)
    return mask_to_candidates_reference(scores, blocks, block_size)


def _check_visible(operation: str, scores: torch.Tensor, num_visible: torch.Tensor) -> None:
    if num_visible.shape != scores.shape[:1]:
        raise ShapeError(
            f"{operation}: num_visible has shape {list(num_visible.shape)}, expected [{scores.shape[0]}], the "
            f"first axis of scores {list(scores.shape)}; pass one count per row"
        )


def _check(operation: str, scores: torch.Tensor, name: str, size: int, least: int) -> None:
    checks.require_dtype(operation, "scores", scores, (torch.float32,))
    if scores.dim() != 2:
        raise ShapeError(
            f"{operation}: scores has shape {list(scores.shape)}, expected [num_tokens, num_entries]; reshape it"
        )
    if size < least:
        raise ShapeError(f"{operation}: {name} is {size}, expected at least {least}; pass the configured size")
