"""Experts cut by outputs: how a rank writes its hidden values, so that those of all ranks can be put side by side.

The second product reads blocks of 128 columns whose order is turned word by word. A rank with whole blocks writes just
that. One with whole units of 32 columns turns each of them alone: such units can be put side by side too, and the
second product finds a column of its block in them. Fewer columns stay in their order, and are rounded to MXFP8 and
turned once all of them are there.
"""

from collections.abc import Callable

import torch

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.tiling import E2M1_CODES, MX_BLOCK, WORD_BLOCK_K

Gather = Callable[[torch.Tensor], torch.Tensor]


def turned_columns(own: int, gather: Gather | None) -> int:
    """Columns that are turned together by a rank with ``own`` of them: a block, a unit, or those of a word, in order.

    Args:
        own: columns of the intermediate on this rank.
        gather: None: the rank has all columns, and fills up the last block itself.
    """
    if gather is None or own % WORD_BLOCK_K == 0:
        return WORD_BLOCK_K
    return MX_BLOCK if own % MX_BLOCK == 0 else E2M1_CODES


def all_columns(h: torch.Tensor, num_columns: int, gather: Gather) -> torch.Tensor:
    """What every rank has of the hidden values, [pairs, num_columns].

    Raises:
        ShapeError: ``gather`` gave another shape.
    """
    found = gather(h)
    if found.shape != (h.shape[0], num_columns):
        raise ShapeError(
            f"moe_experts: gather made {list(found.shape)} of {list(h.shape)}, expected [{h.shape[0]}, {num_columns}], "
            "the columns that w2 multiplies; pass the exchange of the ranks that share the experts"
        )
    return found


def all_turned_columns(
    h: torch.Tensor, num_columns: int, gather: Gather | None, turned: int, *, quantize: bool
) -> tuple[torch.Tensor, int]:
    """Hidden values as the second product reads them, and how many of their columns are turned together.

    Args:
        h: this rank's, written as ``turned_columns`` says.
        num_columns: of all ranks.
        gather: as ``moe_experts`` gets it.
        turned: what ``turned_columns`` said.
        quantize: round to MXFP8, if the rank could not.
    """
    if gather is None:
        return h, turned
    h = all_columns(h, num_columns, gather)
    if turned == E2M1_CODES:
        from deepinfer_kernels.linear.prepare_kernel import prepare_rows

        return prepare_rows(h, codes=E2M1_CODES, quantize=quantize), WORD_BLOCK_K
    return h, turned
