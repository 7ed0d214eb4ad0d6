"""The image tower and the aligner: from patches to rows of the text model.

One image runs alone, and every operation keeps the bits of its rows, so an image's features depend on that image and
the weights only, whatever else the step encodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from deepinfer_kernels.dense_attention import dense_attention
from deepinfer_kernels.linear import linear
from deepinfer_kernels.pointwise import gelu, silu
from deepinfer_kernels.rope import cos_sin, inverse_frequencies, rope
from deepinfer_plugin.images.layout import ImageLayout, Role
from deepinfer_plugin.model.config import VisionConfig
from deepinfer_plugin.model.linear import PlainLinear, RMSNorm, TensorModule, frozen

_NORM_EPS = 1e-6  # not the text model's 1e-20


class _Angles(NamedTuple):
    """Rotation of every patch: cos and sin, [num_patches, head_dim / 2] fp32."""

    cos: torch.Tensor
    sin: torch.Tensor


class Affine(PlainLinear):
    """``x @ weight.T + bias``, accumulated in fp32 and rounded once."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.bias = frozen(out_features, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features], dtype of ``x`` unless ``out_dtype`` says."""
        product = linear(x, self.weight, out_dtype=torch.float32)
        return product.add_(self.bias.float()).to(out_dtype or x.dtype)


class PatchEmbed(nn.Module):
    """Projection of the pixels of a patch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Affine(config.hidden_size, 3 * config.patch_size**2)


class VisionAttention(TensorModule):
    """Attention in both directions over the patches of one image, with a rotation by row and column."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.wqkv = Affine(3 * config.hidden_size, config.hidden_size)
        self.wo = Affine(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, angles: _Angles) -> torch.Tensor:
        """x: [num_patches, hidden_size] -> the same shape and dtype."""
        qkv = self.wqkv(x).view(-1, 3, self.num_heads, self.head_dim)
        q, k = (self._rotate(qkv[:, part], angles) for part in (0, 1))
        out = dense_attention(q, k, qkv[:, 2], self.head_dim**-0.5)
        return self.wo(out.reshape(x.shape))

    def _rotate(self, x: torch.Tensor, angles: _Angles) -> torch.Tensor:
        """Rotate element i of the first half of a head with element i of the second.

        ``rope`` turns neighbours, so the halves are interleaved first. They stay so: a product of a query and a key
        that are both in this order is the same sum.
        """
        halves = torch.unflatten(x, 2, (2, -1)).transpose(2, 3).reshape(x.shape)
        return rope(halves, angles.cos, angles.sin)


class VisionMLP(TensorModule):
    """SwiGLU without clamps, rounded behind the SiLU (REF); w1 holds the rows of the gate, then the other branch's."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = PlainLinear(2 * config.intermediate_size, config.hidden_size)
        self.w2 = PlainLinear(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_patches, hidden_size] -> the same shape and dtype."""
        gate, up = self.w1(x).chunk(2, dim=1)
        return self.w2(silu(gate.float()).to(x.dtype) * up)


class VisionBlock(TensorModule):
    """A pre-norm layer of the tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, _NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, _NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, x: torch.Tensor, angles: _Angles) -> torch.Tensor:
        """x: [num_patches, hidden_size] -> the same shape and dtype."""
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class VisionTower(TensorModule):
    """Patches of one image to one vector each.

    Source: REF, vision tower; spec section 8.2.
    """

    inverse_frequencies: torch.Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, _NORM_EPS)
        # half of a head turns by the row of the patch, half by its column
        rotary_dim = config.hidden_size // config.num_attention_heads // 2
        frequencies = inverse_frequencies(rotary_dim, config.rope_theta, None)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, patches: torch.Tensor, layout: ImageLayout, dtype: torch.dtype) -> torch.Tensor:
        """Encode one image.

        Args:
            patches: [num_patches, 3 * patch_size ** 2] bf16, rows of patches in reading order, channels first.
            layout: of the image.
            dtype: of the activations, bf16 or fp32.

        Returns:
            [num_patches, hidden_size] of ``dtype``, after the final norm.

        Invariance: bitwise; the result depends on this image and the weights only.
        """
        angles = self._angles(layout)
        x = self.patch_embed.proj(patches, dtype)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)

    def _angles(self, layout: ImageLayout) -> _Angles:
        place = torch.arange(layout.num_patches, device=self.inverse_frequencies.device)
        row, column = place // layout.patches_wide, place % layout.patches_wide
        by_row, by_column = (cos_sin(axis, self.inverse_frequencies) for axis in (row, column))
        return _Angles(torch.cat((by_row[0], by_column[0]), dim=1), torch.cat((by_row[1], by_column[1]), dim=1))


class Aligner(TensorModule):
    """Square groups of patches to rows of the text model."""

    def __init__(self, config: VisionConfig, text_width: int) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        self.w1 = Affine(text_width, config.hidden_size * self.ratio**2)
        self.w2 = Affine(text_width, text_width)

    def forward(self, x: torch.Tensor, layout: ImageLayout) -> torch.Tensor:
        """x: [num_patches, vision hidden_size] -> [cells, text hidden_size] in reading order, dtype of ``x``."""
        hidden = self.w1(unfold_cells(x, layout, self.ratio), torch.float32)
        if x.dtype != torch.float32:
            hidden = hidden.to(x.dtype).float()  # REF rounds in front of the activation
        return self.w2(gelu(hidden).to(x.dtype))


def unfold_cells(x: torch.Tensor, layout: ImageLayout, ratio: int) -> torch.Tensor:
    """Gather the patches of every cell, missing ones as zeros.

    Args:
        x: [num_patches, width].
        layout: of the image.
        ratio: patches per side of a cell.

    Returns:
        [cells, width * ratio ** 2]; a channel's patches are neighbours, in reading order.
    """
    width = x.shape[1]
    grid = x.view(layout.patches_high, layout.patches_wide, width)
    missing_high, missing_wide = -layout.patches_high % ratio, -layout.patches_wide % ratio
    grid = pad(grid, (0, 0, 0, missing_wide, 0, missing_high))
    cells = grid.view(layout.cells_high, ratio, layout.cells_wide, ratio, width)
    return cells.permute(0, 2, 4, 1, 3).reshape(-1, width * ratio**2)


def image_span(cells: torch.Tensor, roles: Sequence[Role], delimiters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of a span in the text model.

    Args:
        cells: [cells, hidden_size], the aligner's output.
        roles: of the span.
        delimiters: the learned vectors of start, newline and end, [hidden_size] each.

    Returns:
        [len(roles), hidden_size], dtype of ``cells``.
    """
    start, newline, end = (vector.to(cells.dtype)[None] for vector in delimiters)
    table = torch.cat((start, newline, end, cells))
    places, cell = [], 3
    for role in roles:
        places.append({Role.START: 0, Role.NEWLINE: 1, Role.END: 2}.get(role, cell))
        cell += role is Role.IMAGE
    return table[torch.tensor(places, device=cells.device)]
