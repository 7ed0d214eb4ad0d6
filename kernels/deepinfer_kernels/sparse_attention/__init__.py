"""Attention of each row over its own list of cached vectors, with a sink per head."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_tilelang, use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.kv_store import RecordFormat, require_cache
from deepinfer_kernels.sparse_attention.hopper_kernel import fits_hopper, sparse_attention_hopper
from deepinfer_kernels.sparse_attention.reference import SlotList, sparse_attention_reference
from deepinfer_kernels.sparse_attention.triton_kernel import fits_tensor_cores, sparse_attention_triton
from deepinfer_kernels.sparse_attention.triton_kernel_fp32 import sparse_attention_fp32_triton

__all__ = ["sparse_attention"]

# Rows of 64 bytes, so that BLAS finds every row of a batch on the same alignment and takes the same path.
_HEAD_DIM_MULTIPLE = 16


def sparse_attention(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    compressed_cache: torch.Tensor | None,
    compressed_slots: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
    *,
    window_format: RecordFormat,
    compressed_format: RecordFormat,
    round_p: bool,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """One softmax over window entries, then compressed entries; each vector is key and value.

    The list is cut into blocks of 64 list slots with a running maximum that starts at -1e30. The denominator sums the
    unrounded weights; the sink joins it once, at the end, in score units, and contributes no value.

    Args:
        q: [num_tokens, num_heads, head_dim], bf16 or fp32, rotated.
        window_cache: [num_blocks, block_size, record_bytes] uint8, as in ``kv_store``.
        window_slots: [num_tokens, W] int64; negative for none, anywhere in the list.
        compressed_cache: the same for compressed entries; None where the layer has none.
        compressed_slots: [num_tokens, K] int64; None together with ``compressed_cache``.
        sink: [num_heads] fp32.
        scale: factor of q . k, head_dim ** -0.5.
        window_format: records of ``window_cache``.
        compressed_format: records of ``compressed_cache``.
        round_p: round the weights to bf16 before they multiply the values.
        cos: [num_tokens, rotary_dim / 2] fp32; with ``sin`` the rounded result is rotated back by the row's own
            position and rounded again. None: left as it is.
        sin: the same.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of ``q``, a new tensor; 0 in a row that lists nothing.

    Raises:
        ShapeError: arguments that do not fit each other, or head_dim is no multiple of 16.
        UnsupportedError: ``q`` is neither bf16 nor fp32, or ``sink`` is not fp32.

    Invariance: bitwise per row; a row depends on its query, its list, the listed records and ``sink`` only. More -1 at
    the end of the list change nothing.
    Source: REF-K, sparse_attn; spec section 2.8.
    """
    _check_queries(q, sink)
    if (compressed_cache is None) != (compressed_slots is None) or (cos is None) != (sin is None):
        raise ShapeError(
            "sparse_attention: only one of compressed_cache and compressed_slots, or of cos and sin, is None, expected "
            "both or neither; pass the pair"
        )
    _check_slots("window_slots", window_slots, q)
    parts = [SlotList(kv_cache=window_cache, slots=window_slots, fmt=window_format)]
    if compressed_cache is not None and compressed_slots is not None:
        _check_slots("compressed_slots", compressed_slots, q)
        parts.append(SlotList(kv_cache=compressed_cache, slots=compressed_slots, fmt=compressed_format))
    if use_triton(q):
        return _on_gpu(q, parts, sink, scale, round_p=round_p, cos=cos, sin=sin)
    return sparse_attention_reference(q, parts, sink, scale, round_p=round_p, cos=cos, sin=sin)


def _on_gpu(
    q: torch.Tensor,
    parts: list[SlotList],
    sink: torch.Tensor,
    scale: float,
    *,
    round_p: bool,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """Choose the kernel by formats, widths and device, never by the number of rows."""
    for part in parts:
        require_cache("sparse_attention", part.kv_cache, q.shape[2], part.fmt)
    if fits_tensor_cores(q, parts, round_p):
        if use_tilelang(q):
            from deepinfer_kernels.sparse_attention.tilelang_kernel import fits_tilelang, sparse_attention_tilelang

            if fits_tilelang(q, parts):
                return sparse_attention_tilelang(q, parts, sink, scale, cos=cos, sin=sin)
        if fits_hopper(q, parts):
            return sparse_attention_hopper(q, parts, sink, scale, cos=cos, sin=sin)
        return sparse_attention_triton(q, parts, sink, scale, cos=cos, sin=sin)
    return sparse_attention_fp32_triton(q, parts, sink, scale, round_p=round_p, cos=cos, sin=sin)


def _check_slots(name: str, slots: torch.Tensor, q: torch.Tensor) -> None:
    if slots.dim() != 2 or slots.shape[0] != q.shape[0]:
        raise ShapeError(
            f"sparse_attention: {name} has shape {list(slots.shape)}, expected [{q.shape[0]}, length], the first axis "
            f"of q {list(q.shape)}; pass one list per row"
        )


def _check_queries(q: torch.Tensor, sink: torch.Tensor) -> None:
    checks.require_activation("sparse_attention", "q", q)
    checks.require_dtype("sparse_attention", "sink", sink, (torch.float32,))
    if q.dim() != 3 or sink.shape != q.shape[1:2]:
        raise ShapeError(
            f"sparse_attention: q has shape {list(q.shape)} and sink {list(sink.shape)}, expected [num_tokens, "
            "num_heads, head_dim] and [num_heads]; reshape the projection"
        )
    if q.shape[2] % _HEAD_DIM_MULTIPLE != 0:
        raise ShapeError(
            f"sparse_attention: q has shape {list(q.shape)}, expected a multiple of {_HEAD_DIM_MULTIPLE} for head_dim; "
            "pad it with zeros"
        )
