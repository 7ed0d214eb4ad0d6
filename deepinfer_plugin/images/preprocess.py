"""From a picture to patches.

Source: REF, image processor; spec section 8.1.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from PIL import Image, ImageOps

from deepinfer_plugin.images.decode import check_picture
from deepinfer_plugin.images.layout import ImageLayout, plan_layout
from deepinfer_plugin.model.config import VisionConfig

_GRAY = (127, 127, 127)


def to_patches(picture: Image.Image, config: VisionConfig) -> tuple[torch.Tensor, ImageLayout]:
    """Resize, pad and cut one picture.

    Args:
        picture: any mode and size that ``check_picture`` lets pass.
        config: limits and sizes.

    Returns:
        Patches [num_patches, 3 * patch_size ** 2] bf16 from -1 to 1, in reading order, channels first; and the layout.

    Raises:
        PromptError: the picture is beyond a limit.

    Invariance: a function of the pixels, ``config`` and the version of Pillow.
    """
    check_picture(picture, config)
    picture = picture.convert("RGB")
    layout = plan_layout(picture.width, picture.height, config)
    size = (layout.width, layout.height)
    if config.max_wh_ratio is not None and picture.width >= config.max_wh_ratio * picture.height:
        fitted = picture.resize(size)
    else:
        fitted = ImageOps.pad(picture, size, color=_GRAY)
    pixels = torch.from_numpy(np.asarray(fitted, dtype=np.float32))  # [height, width, 3]
    values = ((pixels / 255 - 0.5) / 0.5).to(torch.bfloat16)
    patch = config.patch_size
    grid = values.view(layout.patches_high, patch, layout.patches_wide, patch, 3)
    return grid.permute(0, 2, 4, 1, 3).reshape(layout.num_patches, -1), layout


def picture_hash(picture: Image.Image) -> str:
    """SHA-256 of size and pixels: the name under which caches know an image.

    vLLM would take an identity that the file claims for itself, so that one user's image could pass for another's.
    """
    rgb = picture.convert("RGB")
    digest = hashlib.sha256(f"RGB {rgb.width} x {rgb.height}\n".encode())
    digest.update(np.asarray(rgb))
    return digest.hexdigest()
