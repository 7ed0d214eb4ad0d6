"""Score every visible compressed entry for every row (lightning indexer)."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.indexer_logits.reference import indexer_logits_reference
from deepinfer_kernels.indexer_logits.triton_kernel import fits_tensor_cores, indexer_logits_triton
from deepinfer_kernels.indexer_logits.triton_kernel_fp32 import indexer_logits_fp32_triton
from deepinfer_kernels.kv_store import RecordFormat

__all__ = ["indexer_logits"]

# Rows of 64 bytes, so that BLAS finds every row of a batch on the same alignment and takes the same path.
_HEAD_DIM_MULTIPLE = 16


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_idx: torch.Tensor,
    num_visible: torch.Tensor,
    max_entries: int,
    *,
    fmt: RecordFormat,
    entries_per_block: int,
    round_bf16: bool,
) -> torch.Tensor:
    """Sum over heads of weight * relu(query . key), for the entries of the row's own request.

    Args:
        q: [num_tokens, index_n_heads, index_head_dim], bf16 or fp32, rotated and quantised values.
        weights: [num_tokens, index_n_heads], dtype of ``q``, the constant already multiplied in.
        key_cache: [num_blocks, entries_per_block, record_bytes] uint8, as in ``kv_store``.
        block_table: [num_reqs, max_num_blocks] int32. Entries past the end of a request may hold anything.
        req_idx: [num_tokens] int32, row of ``block_table``; negative in a row that only pads a graph, whose scores
            mean nothing, whatever its ``num_visible``.
        num_visible: [num_tokens] int64, entries the row may see; at most ``max_entries``.
        max_entries: width of the result.
        fmt: MXFP4 pages or FP32 records.
        entries_per_block: entries per page, the second axis of ``key_cache``.
        round_bf16: round as the checkpoint's own forward pass does: the dot product, its product with the weight
            and the sum over heads to bf16 each. Otherwise everything is fp32.

    Returns:
        [num_tokens, max_entries] fp32; -inf from ``num_visible`` on. Heads are added in fp32: on a CPU in ascending
        order, on a GPU by halves, the upper heads onto the lower until one is left.

    Raises:
        ShapeError: arguments that do not fit each other, or index_head_dim is no multiple of 16.
        UnsupportedError: ``q`` is neither bf16 nor fp32, or ``weights`` has another dtype.

    Invariance: bitwise per score; a score depends on its row and its key only, not on ``max_entries``, the page size,
    the number of rows or other requests.
    Source: REF, class Indexer; spec section 2.7.
    """
    _check_queries(q, weights)
    _check_entries(q, key_cache, block_table, req_idx, num_visible, max_entries, entries_per_block)
    if use_triton(q):
        arguments = (q, weights, key_cache, block_table, req_idx, num_visible, max_entries)
        if fits_tensor_cores(q, fmt):
            return indexer_logits_triton(*arguments, round_bf16=round_bf16)
        return indexer_logits_fp32_triton(*arguments, fmt=fmt, round_bf16=round_bf16)
    return indexer_logits_reference(
        q,
        weights,
        key_cache,
        block_table,
        req_idx,
        num_visible,
        max_entries,
        fmt=fmt,
        entries_per_block=entries_per_block,
        round_bf16=round_bf16,
    )


def _check_queries(q: torch.Tensor, weights: torch.Tensor) -> None:
    checks.require_activation("indexer_logits", "q", q)
    checks.require_dtype("indexer_logits", "weights", weights, (q.dtype,))
    if q.dim() != 3 or q.shape[1] == 0 or weights.shape != q.shape[:2]:
        raise ShapeError(
            f"indexer_logits: q has shape {list(q.shape)} and weights {list(weights.shape)}, expected [num_tokens, "
            "index_n_heads, index_head_dim] and [num_tokens, index_n_heads]; reshape the projections"
        )
    if q.shape[2] % _HEAD_DIM_MULTIPLE != 0:
        raise ShapeError(
            f"indexer_logits: q has shape {list(q.shape)}, expected a multiple of {_HEAD_DIM_MULTIPLE} for "
            "index_head_dim; pad it with zeros"
        )


def _check_entries(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_idx: torch.Tensor,
    num_visible: torch.Tensor,
    max_entries: int,
    entries_per_block: int,
) -> None:
    for name, index in (("req_idx", req_idx), ("num_visible", num_visible)):
        if index.shape != q.shape[:1]:
            raise ShapeError(
                f"indexer_logits: {name} has shape {list(index.shape)}, expected [{q.shape[0]}], the first axis of q "
                f"{list(q.shape)}; pass one value per row"
            )
    if max_entries < 0:
        raise ShapeError(f"indexer_logits: max_entries is {max_entries}, expected at least 0; pass the longest row")
    if block_table.dim() != 2 or (q.shape[0] > 0 and block_table.numel() == 0):
        raise ShapeError(
            f"indexer_logits: block_table has shape {list(block_table.shape)}, expected [num_reqs, max_num_blocks], "
            "not empty; pass the table of the step"
        )
    if key_cache.dim() != 3 or key_cache.shape[1] != entries_per_block:
        raise ShapeError(
            f"indexer_logits: key_cache has shape {list(key_cache.shape)}, expected [num_blocks, {entries_per_block}, "
            "record_bytes]; entries_per_block is its second axis"
        )
