"""Attention of every row over all rows of one image, in both directions."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dense_attention.reference import dense_attention_reference
from deepinfer_kernels.dense_attention.triton_kernel import dense_attention_triton
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError

__all__ = ["dense_attention"]

# Rows of 64 bytes, so that BLAS finds every row of a batch on the same alignment and takes the same path.
_HEAD_DIM_MULTIPLE = 16


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` per head, without a mask: every query sees every key.

    Keys are taken in blocks of 64 from the first one on, with a running maximum that starts at -1e30. The weights are
    not rounded to bf16; on tensor cores each is the sum of two bf16 numbers.

    Args:
        q: [num_queries, num_heads, head_dim], bf16 or fp32, any strides.
        k: [num_keys, num_heads, head_dim], dtype of ``q``.
        v: as ``k``.
        scale: factor of q . k, head_dim ** -0.5.

    Returns:
        [num_queries, num_heads, head_dim], dtype of ``q``, a new tensor; fp32 inside, rounded once.

    Raises:
        ShapeError: arguments that do not fit each other, no key, or head_dim is no multiple of 16.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row; a row depends on its query and on all keys and values in their order, not on the
    other queries. Images are told apart by the caller: one call, one image.
    Source: REF, vision attention; spec section 8.2.
    """
    checks.require_activation("dense_attention", "q", q)
    checks.require_rank("dense_attention", "q", q, 3, "[num_queries, num_heads, head_dim]")
    for name, tensor in (("k", k), ("v", v)):
        checks.require_dtype("dense_attention", name, tensor, (q.dtype,))
        checks.require_rank("dense_attention", name, tensor, 3, "[num_keys, num_heads, head_dim]")
        checks.require_shape(
            "dense_attention", name, tensor, (k.shape[0], *q.shape[1:]), "heads and width are those of q"
        )
    if k.shape[0] == 0 or q.shape[2] % _HEAD_DIM_MULTIPLE != 0:
        raise ShapeError(
            f"dense_attention: q is {list(q.shape)} and k {list(k.shape)}, expected at least one key and a multiple of "
            f"{_HEAD_DIM_MULTIPLE} for head_dim; pass the keys of one image, and pad the heads with zeros"
        )
    if use_triton(q):
        return dense_attention_triton(q, k, v, scale)
    return dense_attention_reference(q, k, v, scale)
