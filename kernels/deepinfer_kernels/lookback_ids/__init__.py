"""Ids of the tokens before each row of a step, for n-grams."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.lookback_ids.reference import lookback_ids_reference
from deepinfer_kernels.lookback_ids.triton_kernel import lookback_ids_triton

__all__ = ["lookback_ids"]

_INTEGERS = (torch.int32, torch.int64)


def lookback_ids(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the predecessors of each row, from the step's own rows where they are in it, else from the history.

    A draft token stands in the step's rows before it stands in the history, so the rows come first.
    A padded batch has rows behind its last request. They read in range, as rows of that request, and nobody uses them.

    Args:
        input_ids: [num_tokens] int32 or int64.
        positions: [num_tokens] int64.
        query_start_loc: [num_reqs + 1] int32, ascending from 0; more entries, of a padded batch, are not looked at.
        idx_mapping: [num_reqs] int32 or int64, batch row to row of ``all_token_ids``; at least one.
        all_token_ids: [max_num_reqs, max_model_len] int32. On a GPU it may be a view of pinned host memory: only
            predecessors that are not in the step are read.
        out: [num_tokens, depth] int64.

    Returns:
        ``out``, nearest first, -1 before position 0. A position beyond the history reads its last id.

    Raises:
        ShapeError: arguments that do not fit each other.
        UnsupportedError: a wrong dtype.

    Invariance: exact per row; integers only. A row depends on its request alone.
    Source: REF, class Engram; spec 2.9.
    """
    op = "lookback_ids"
    checks.require_dtype(op, "input_ids", input_ids, _INTEGERS)
    checks.require_dtype(op, "positions", positions, (torch.int64,))
    checks.require_dtype(op, "query_start_loc", query_start_loc, (torch.int32,))
    checks.require_dtype(op, "idx_mapping", idx_mapping, _INTEGERS)
    checks.require_dtype(op, "all_token_ids", all_token_ids, (torch.int32,))
    checks.require_dtype(op, "out", out, (torch.int64,))
    checks.require_rank(op, "out", out, 2, "[num_tokens, depth]")
    checks.require_shape(op, "input_ids", input_ids, out.shape[:1], "one id per row of out")
    checks.require_shape(op, "positions", positions, out.shape[:1], "one position per row of out")
    num_reqs = idx_mapping.numel()
    if idx_mapping.dim() != 1 or query_start_loc.dim() != 1 or not 0 < num_reqs < query_start_loc.shape[0]:
        raise ShapeError(
            f"{op}: query_start_loc is {list(query_start_loc.shape)} and idx_mapping {list(idx_mapping.shape)}, "
            "expected [num_reqs + 1] or more and [num_reqs] of at least 1; pass the layout of one step"
        )
    if all_token_ids.dim() != 2 or all_token_ids.numel() == 0:
        raise ShapeError(
            f"{op}: all_token_ids is {list(all_token_ids.shape)}, expected [max_num_reqs, max_model_len], not empty; "
            "pass the histories of all requests"
        )
    arguments = (input_ids, positions, query_start_loc, idx_mapping, all_token_ids, out)
    return lookback_ids_triton(*arguments) if use_triton(out) else lookback_ids_reference(*arguments)
