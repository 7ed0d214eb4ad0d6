"""Pictures for tests and demonstrations: the same pixels on every machine."""

from __future__ import annotations

import numpy as np
from PIL import Image

Recipe = tuple[int, int, int]
"""Seed, width and height of a picture."""


def make_picture(recipe: Recipe) -> Image.Image:
    """Coloured blocks under noise, RGB: neither flat nor white noise, so that resizing keeps something to see."""
    seed, width, height = recipe
    words = np.random.PCG64(seed).random_raw(width * height + 48)
    noise = (words[48:, None] >> np.asarray([8, 24, 40], dtype=np.uint64)) & np.uint64(63)
    blocks = (words[:48, None] >> np.asarray([0, 16, 32], dtype=np.uint64)) & np.uint64(191)
    row, column = np.indices((height, width))
    place = (row * 6 // height * 8 + column * 8 // width).reshape(-1)
    return Image.fromarray((noise + blocks[place]).astype(np.uint8).reshape(height, width, 3))
