"""Where the experts of a row are among the ranks that share them, and how many rows each place gets."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.expert_places.reference import expert_places_reference
from deepinfer_kernels.expert_places.triton_kernel import expert_places_triton

__all__ = ["expert_places"]

_OP = "expert_places"


def expert_places(
    topk_idx: torch.Tensor,
    *,
    slots_per_rank: int,
    rank: int,
    table: torch.Tensor | None = None,
    num_replicas: torch.Tensor | None = None,
    is_real: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slot of every expert of every row, its number on this rank, and the rank that it is on.

    Args:
        topk_idx: [num_rows, top_k] int32 expert ids; negative: no expert.
        slots_per_rank: places for experts on a rank. Rank r has slots r * slots_per_rank and following.
        rank: this one.
        table: [num_experts, max_replicas] int32, the slot of every replica of an expert. Rows take the replicas in
            turn: row r takes replica r % num_replicas. None: expert i is in slot i.
        num_replicas: [num_experts] int32, how many entries of ``table`` are used, 1 at least; None with ``table``.
        is_real: [max_num_rows, top_k] int32, 1 where a pair of row and slot counts and 0 where it does not. Rows beyond
            do not count. May have more rows than ``topk_idx``.
        counts: [num_slots] int32, to which the number of pairs of each slot is added in place; None with ``is_real``.

    Returns:
        slots: [num_rows, top_k] int32; -1: no expert.
        here: the same shape and dtype, the slot less those of the ranks before; -1 where it is on another rank.
        owner: the same shape and dtype, the rank of the slot; -1: no expert.

    Raises:
        ShapeError: arguments that do not fit each other, or a size below 1.
        UnsupportedError: an argument is not int32, or only one of a pair that belongs together is given.

    Invariance: integers only, so exact. Without ``table`` a row depends on itself; with it the replica follows the
        number of the row in the call. The counts have one sum in any order.
    Source: none; bookkeeping of expert parallelism.
    """
    checks.require_rank(_OP, "topk_idx", topk_idx, 2, "[num_rows, top_k]")
    checks.require_dtype(_OP, "topk_idx", topk_idx, (torch.int32,))
    if slots_per_rank < 1 or rank < 0:
        raise ShapeError(
            f"{_OP}: slots_per_rank is {slots_per_rank} and rank is {rank}, expected at least 1 and 0; "
            "pass the places of this rank"
        )
    _check_table(table, num_replicas)
    _check_counts(topk_idx, is_real, counts)
    run = expert_places_triton if use_triton(topk_idx) else expert_places_reference
    return run(topk_idx, slots_per_rank, rank, table, num_replicas, is_real, counts)


def _require_both(**pair: torch.Tensor | None) -> None:
    missing = [name for name, tensor in pair.items() if tensor is None]
    if len(missing) == 1:
        raise UnsupportedError(f"{_OP}: {missing[0]} is None, expected {' and '.join(pair)}; pass both or none")


def _check_table(table: torch.Tensor | None, num_replicas: torch.Tensor | None) -> None:
    _require_both(table=table, num_replicas=num_replicas)
    if table is None or num_replicas is None:
        return
    checks.require_rank(_OP, "table", table, 2, "[num_experts, max_replicas]")
    checks.require_shape(_OP, "num_replicas", num_replicas, table.shape[:1], "an expert has one row in table")
    checks.require_dtype(_OP, "table", table, (torch.int32,))
    checks.require_dtype(_OP, "num_replicas", num_replicas, (torch.int32,))


def _check_counts(topk_idx: torch.Tensor, is_real: torch.Tensor | None, counts: torch.Tensor | None) -> None:
    _require_both(is_real=is_real, counts=counts)
    if is_real is None or counts is None:
        return
    checks.require_rank(_OP, "is_real", is_real, 2, "[max_num_rows, top_k]")
    checks.require_shape(
        _OP, "is_real", is_real, (is_real.shape[0], topk_idx.shape[1]), "its columns are those of topk_idx"
    )
    checks.require_rank(_OP, "counts", counts, 1, "[num_slots]")
    checks.require_dtype(_OP, "is_real", is_real, (torch.int32,))
    checks.require_dtype(_OP, "counts", counts, (torch.int32,))
