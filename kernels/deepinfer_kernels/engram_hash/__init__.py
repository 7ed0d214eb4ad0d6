"""Engram hash: from the compressed ids of a token and the three before it to rows of the n-gram table."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.engram_hash.layout import EngramLayerHash, engram_layout
from deepinfer_kernels.engram_hash.reference import engram_rows_reference
from deepinfer_kernels.engram_hash.triton_kernel import engram_rows_triton
from deepinfer_kernels.errors import ShapeError

__all__ = ["EngramLayerHash", "engram_layout", "engram_rows"]


def engram_rows(
    compressed_ids: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Hash every n-gram that ends at a token to one table row per head.

    Args:
        compressed_ids: [num_tokens, max_ngram] int64, column s is the compressed id of the token s positions back;
            already replaced by the pad id where a position before the request or an image token blocks the n-gram.
            Ids lie in 0 ... compressed_vocab_size - 1 (not checked: the values stay on the device).
        multipliers: [max_ngram] int64, from ``engram_layout``.
        primes: [num_columns] int64, num_columns = (max_ngram - 1) * num_heads, order-major, head-minor.
        offsets: [num_columns] int64.

    Returns:
        [num_tokens, num_columns] int32 table rows, a new tensor.

    Raises:
        ShapeError: the shapes do not fit together.
        UnsupportedError: an argument is not int64.

    Invariance: bitwise per row; a row depends on that row of ``compressed_ids`` and the layer's constants only.
    Source: REF, class Engram; spec 2.9.
    """
    for name, tensor in (
        ("compressed_ids", compressed_ids),
        ("multipliers", multipliers),
        ("primes", primes),
        ("offsets", offsets),
    ):
        checks.require_dtype("engram_rows", name, tensor, (torch.int64,))
    checks.require_rank("engram_rows", "compressed_ids", compressed_ids, 2, "[num_tokens, max_ngram]")
    checks.require_rank("engram_rows", "primes", primes, 1, "[num_columns]")
    max_ngram, num_columns = compressed_ids.shape[1], primes.shape[0]
    if max_ngram < 2 or num_columns == 0 or num_columns % (max_ngram - 1) != 0:
        raise ShapeError(
            f"engram_rows: primes is [{num_columns}], expected max_ngram - 1 columns per head for compressed_ids "
            f"{list(compressed_ids.shape)}; take both sizes from engram_layout"
        )
    checks.require_shape("engram_rows", "multipliers", multipliers, (max_ngram,), "one per column of compressed_ids")
    checks.require_shape("engram_rows", "offsets", offsets, (num_columns,), "one per prime")
    if use_triton(compressed_ids):
        return engram_rows_triton(compressed_ids, multipliers, primes, offsets)
    return engram_rows_reference(compressed_ids, multipliers, primes, offsets)
