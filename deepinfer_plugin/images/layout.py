"""From the size of a picture to patches and tokens: integers only, standard library only.

Source: REF, image processor; spec section 8.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from deepinfer_plugin.model.config import VisionConfig

_DELIMITERS = 2  # start and end of a span; every row of cells adds a newline


class Role(IntEnum):
    """What stands at a position of an image span; all of them carry ``image_token_id``."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """How a picture is cut.

    Attributes:
        height: rows of pixels after resizing and padding, a multiple of the patch.
        width: columns of pixels.
        patches_high: rows of patches.
        patches_wide: patches of a row.
        cells_high: rows of cells, each of ``downsample_ratio`` x ``downsample_ratio`` patches, the last one filled up.
        cells_wide: cells of a row.
    """

    height: int
    width: int
    patches_high: int
    patches_wide: int
    cells_high: int
    cells_wide: int

    @classmethod
    def of_pixels(cls, height: int, width: int, config: VisionConfig) -> ImageLayout:
        """The layout of a picture of exactly this size, both sides multiples of the patch."""
        high, wide = height // config.patch_size, width // config.patch_size
        return cls.of_patches(high, wide, config)

    @classmethod
    def of_patches(cls, high: int, wide: int, config: VisionConfig) -> ImageLayout:
        """The layout of a grid of patches."""
        ratio = config.downsample_ratio
        return cls(
            height=high * config.patch_size,
            width=wide * config.patch_size,
            patches_high=high,
            patches_wide=wide,
            cells_high=-(-high // ratio),
            cells_wide=-(-wide // ratio),
        )

    @property
    def num_patches(self) -> int:
        """Rows that pass the tower."""
        return self.patches_high * self.patches_wide

    @property
    def num_tokens(self) -> int:
        """Positions of the span."""
        return self.cells_high * (self.cells_wide + 1) + _DELIMITERS

    def roles(self) -> list[Role]:
        """What stands at each position of the span, in reading order."""
        row = [Role.IMAGE] * self.cells_wide + [Role.NEWLINE]
        return [Role.START, *row * self.cells_high, Role.END]


def longest_row(config: VisionConfig) -> int:
    """Cells of a picture that is one row of cells."""
    return config.max_image_tokens - _DELIMITERS - 1


def longest_column(config: VisionConfig) -> int:
    """Cells of a picture that is one column of cells."""
    return (config.max_image_tokens - _DELIMITERS) // 2


def plan_layout(width: int, height: int, config: VisionConfig) -> ImageLayout:
    """The size to which a picture is resized and padded.

    Args:
        width: of the picture, > 0.
        height: of the picture, > 0.
        config: limits and sizes.

    Returns:
        A layout of at most ``max_image_tokens`` tokens.
    """
    wide, high = float(width), float(height)
    if config.max_wh_ratio is not None:
        wide = min(wide, high * config.max_wh_ratio)
    if wide * high < config.min_pixels:
        grown = math.sqrt(config.min_pixels / (wide * high))
        wide, high = int(wide * grown), int(high * grown)
    patch = config.patch_size
    layout = ImageLayout.of_pixels(_round_up(high, patch), _round_up(wide, patch), config)
    if layout.num_tokens <= config.max_image_tokens:
        return layout
    return ImageLayout.of_pixels(*_shrunk(high, wide, config), config)


def _round_up(side: float, step: int) -> int:
    return max(math.ceil(side / step), 1) * step


def _shrunk(high: float, wide: float, config: VisionConfig) -> tuple[int, int]:
    """(height, width) in pixels that keep the shape and cost at most ``max_image_tokens``."""
    cell = config.patch_size * config.downsample_ratio
    shape = high / wide
    cells_wide = math.sqrt((config.max_image_tokens - _DELIMITERS) / shape + 0.25) - 0.5
    cells_high = cells_wide * shape
    if cells_wide < 1:
        return longest_column(config) * cell, cell
    if cells_high < 1:
        return cell, longest_row(config) * cell
    factor = min(math.floor(cells_wide) * cell / wide, math.floor(cells_high) * cell / high)
    patch = config.patch_size
    return math.floor(high * factor / patch) * patch, math.floor(wide * factor / patch) * patch


def largest_layout(config: VisionConfig) -> ImageLayout:
    """The layout with the most patches: what a run that measures memory has to hold."""
    ratio, room = config.downsample_ratio, config.max_image_tokens - _DELIMITERS
    shapes = [(high, room // high - 1) for high in range(1, room // 2 + 1)]
    high, wide = max(shapes, key=lambda shape: shape[0] * shape[1])
    return ImageLayout.of_patches(high * ratio, wide * ratio, config)
