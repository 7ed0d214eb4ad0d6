"""Attention over all keys in plain PyTorch.

Rows keep their bits because every product has one shape, [16 queries, head_dim] x [head_dim, 64 keys] and back; missing
queries are zero and missing keys have the weight 0.
"""

import torch
from torch.nn.functional import pad

from deepinfer_kernels.tiling import REFERENCE_KEY_TILE, REFERENCE_ROW_TILE

TOLERANCE_FP32 = 1e-5
TOLERANCE_BF16 = 8e-3  # of values up to 2: one rounding
_FIRST_MAXIMUM = -1e30


def make_inputs(
    num_queries: int,
    num_keys: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v with scores that reach from -10 to 10."""
    shapes = ((num_queries, num_heads, head_dim), *(((num_keys, num_heads, head_dim),) * 2))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (2 * q).to(device, dtype), (1.5 * k).to(device, dtype), v.to(device, dtype)


def dense_attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    num_queries, num_heads, head_dim = q.shape
    num_keys = k.shape[0]
    missing = -num_queries % REFERENCE_ROW_TILE
    # [row tiles * heads, 16, head_dim], in memory of its own: BLAS may take another path on other alignments
    rows = pad(q.float(), (0, 0, 0, 0, 0, missing)).view(-1, REFERENCE_ROW_TILE, num_heads, head_dim)
    rows = rows.transpose(1, 2).reshape(-1, REFERENCE_ROW_TILE, head_dim).contiguous()
    num_row_tiles = rows.shape[0] // num_heads
    missing = -num_keys % REFERENCE_KEY_TILE
    keys, values = (pad(x.float(), (0, 0, 0, 0, 0, missing)).transpose(0, 1).contiguous() for x in (k, v))
    maximum = rows.new_full((rows.shape[0], REFERENCE_ROW_TILE, 1), _FIRST_MAXIMUM)
    denominator = torch.zeros_like(maximum)
    total = torch.zeros_like(rows)
    for start in range(0, num_keys, REFERENCE_KEY_TILE):
        tile = slice(start, start + REFERENCE_KEY_TILE)
        tile_keys, tile_values = (x[:, tile].repeat(num_row_tiles, 1, 1) for x in (keys, values))
        scores = torch.bmm(rows, tile_keys.transpose(1, 2)).mul_(scale)
        scores[:, :, num_keys - start :] = -torch.inf
        new_maximum = torch.maximum(maximum, scores.amax(dim=2, keepdim=True))
        p = scores.sub_(new_maximum).exp_()
        rescale = (maximum - new_maximum).exp_()
        denominator = denominator * rescale + p.sum(dim=2, keepdim=True)
        total = total * rescale + torch.bmm(p, tile_values)
        maximum = new_maximum
    out = (total / denominator).view(num_row_tiles, num_heads, REFERENCE_ROW_TILE, head_dim).transpose(1, 2)
    return out.reshape(-1, num_heads, head_dim)[:num_queries].to(q.dtype, copy=True)
