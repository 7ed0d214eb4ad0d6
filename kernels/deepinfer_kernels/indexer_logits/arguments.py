"""What both Triton kernels of the index scores are launched with, in their common order."""

from typing import Any

import torch
import triton


def tensors_of(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_idx: torch.Tensor,
    num_visible: torch.Tensor,
    out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Inputs and result."""
    return q, weights, key_cache, block_table, req_idx.contiguous(), num_visible.contiguous(), out


def strides_of(block_table: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> tuple[int, ...]:
    """Two strides each; those of the cache stand before them."""
    return tuple(tensor.stride(axis) for tensor in (block_table, q, weights) for axis in (0, 1))


def constants_of(q: torch.Tensor, round_bf16: bool) -> dict[str, Any]:
    """Heads, filled up to a tile of the tensor cores, and how to compile."""
    _, num_heads, head_dim = q.shape
    heads = max(16, triton.next_power_of_2(num_heads))
    return {
        "NUM_HEADS": num_heads,
        "HEADS": heads,
        "LEVELS": heads.bit_length() - 1,
        "HEAD_DIM": head_dim,
        "ROUND": round_bf16,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
