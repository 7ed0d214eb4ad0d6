"""The image tower, the aligner and the span in fp64, written from spec section 8 alone: the oracle of ``model/vision``.

Nothing here is shared with the served code but the names of the tensors: positions are walked one by one, rotations are
complex numbers, attention is one softmax over all patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from deepinfer_plugin.model.config import VisionConfig

_EPS = 1e-6
Weights = Mapping[str, torch.Tensor]


def tower(patches: torch.Tensor, grid: tuple[int, int], weights: Weights, config: VisionConfig) -> torch.Tensor:
    """Vectors of all patches of one image.

    Args:
        patches: [num_patches, 3, patch, patch] or flattened.
        grid: patches high, patches wide.
        weights: checkpoint name to tensor.
        config: sizes.

    Returns:
        [num_patches, hidden_size] fp64.
    """
    x = _affine(patches.double().reshape(grid[0] * grid[1], -1), weights, "vision.patch_embed.proj")
    turn = _rotation(grid, config)
    for index in range(config.num_hidden_layers):
        block = f"vision.blocks.{index}."
        x = x + _attention(_norm(x, weights[f"{block}norm1.weight"]), turn, weights, f"{block}attn.", config)
        hidden = _norm(x, weights[f"{block}norm2.weight"]) @ weights[f"{block}mlp.w1.weight"].double().T
        gate, up = hidden[:, : config.intermediate_size], hidden[:, config.intermediate_size :]
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[f"{block}mlp.w2.weight"].double().T
    return _norm(x, weights["vision.norm.weight"])


def features(x: torch.Tensor, grid: tuple[int, int], weights: Weights, config: VisionConfig) -> torch.Tensor:
    """The aligner: [cells, text hidden_size] fp64 from the tower's [num_patches, hidden_size]."""
    side = config.downsample_ratio
    high, wide = grid
    rows = []
    for top in range(0, high, side):
        for left in range(0, wide, side):
            cell = torch.zeros(x.shape[1], side * side, dtype=torch.float64)
            for i in range(side):
                for j in range(side):
                    if top + i < high and left + j < wide:
                        cell[:, i * side + j] = x[(top + i) * wide + left + j]
            rows.append(cell.reshape(-1))  # channel-major: the places of one channel are neighbours
    hidden = _affine(torch.stack(rows), weights, "aligner.w1")
    return _affine(hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2, weights, "aligner.w2")


def span(cells: torch.Tensor, grid: tuple[int, int], weights: Weights, config: VisionConfig) -> torch.Tensor:
    """Rows of the text model: start, then every row of cells with a newline behind it, then end; fp64."""
    wide = math.ceil(grid[1] / config.downsample_ratio)
    rows = [weights["image_start"].double()]
    for first in range(0, cells.shape[0], wide):
        rows += [*cells[first : first + wide], weights["image_newline"].double()]
    return torch.stack([*rows, weights["image_end"].double()])


def _affine(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].double().T + weights[f"{name}.bias"].double()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.double() * x / (x.square().mean(dim=1, keepdim=True) + _EPS).sqrt()


def _rotation(grid: tuple[int, int], config: VisionConfig) -> torch.Tensor:
    """[num_patches, head_dim / 2] complex: first the angles of the patch's row, then those of its column."""
    quarter = config.hidden_size // config.num_attention_heads // 4
    turns = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            angles = [place * config.rope_theta ** (-k / quarter) for place in (row, column) for k in range(quarter)]
            turns.append([complex(math.cos(angle), math.sin(angle)) for angle in angles])
    return torch.tensor(turns, dtype=torch.complex128)


def _attention(
    x: torch.Tensor, turn: torch.Tensor, weights: Weights, prefix: str, config: VisionConfig
) -> torch.Tensor:
    width = config.hidden_size
    head_dim = width // config.num_attention_heads
    qkv = _affine(x, weights, f"{prefix}wqkv")
    outputs = []
    for head in range(config.num_attention_heads):
        q, k, v = (qkv[:, part * width + head * head_dim :][:, :head_dim] for part in range(3))
        q, k = (_turned(vector, turn) for vector in (q, k))
        outputs.append((q @ k.T / math.sqrt(head_dim)).softmax(dim=1) @ v)
    return _affine(torch.cat(outputs, dim=1), weights, f"{prefix}wo")


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Element i of the first half is the real part, element i of the second half the imaginary part."""
    half = x.shape[1] // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=1)
