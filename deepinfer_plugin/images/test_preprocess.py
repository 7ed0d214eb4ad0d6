"""Sizes and patches against the rules of the specification and against vLLM's own code for this model."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from vllm.models.deepseek_v41.common.mm_preprocess import load_image

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.errors import PromptError
from deepinfer_plugin.images.__main__ import RELEASED
from deepinfer_plugin.images.layout import ImageLayout, Role, largest_layout, longest_column, longest_row, plan_layout
from deepinfer_plugin.images.preprocess import to_patches
from deepinfer_plugin.model.config import VisionConfig
from deepinfer_plugin.reference.pictures import make_picture

SMALL = replace(RELEASED, max_image_tokens=64, min_pixels=7056)
SIZES = ((1, 1), (13, 14), (14, 15), (84, 84), (100, 40), (61, 1), (1, 31), (300, 200), (700, 90), (90, 1000))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("max_wh_ratio", [None, 2.0])
def test_patches_are_those_of_vllm(width: int, height: int, max_wh_ratio: float | None) -> None:
    config = replace(SMALL, max_wh_ratio=max_wh_ratio)
    picture = make_picture((width * 1000 + height, width, height))
    got, layout = to_patches(picture, config)
    want, high, wide, cells_high, cells_wide = load_image(
        picture,
        patch_size=14,
        downsample_ratio=3,
        max_n_token=config.max_image_tokens,
        min_pixels=config.min_pixels,
        max_wh_ratio=max_wh_ratio,
    )
    assert (layout.patches_high, layout.patches_wide) == (high, wide)
    assert (layout.cells_high, layout.cells_wide) == (cells_high, cells_wide)
    assert_bitwise_equal(got, want.flatten(1), "patches")


@pytest.mark.parametrize("config", [RELEASED, SMALL], ids=["released", "small"])
def test_every_size_fits_and_keeps_its_shape(config: VisionConfig) -> None:
    source = random.Random(3)
    for _ in range(3000):
        width, height = (round(math.exp(source.uniform(0, 9))) for _ in range(2))
        if width > longest_row(config) * height or height > longest_column(config) * width:
            continue
        layout = plan_layout(width, height, config)
        assert 3 <= layout.num_tokens <= config.max_image_tokens, (width, height)
        assert layout.height % 14 == layout.width % 14 == 0
        assert len(layout.roles()) == layout.num_tokens
        assert layout.roles().count(Role.IMAGE) == layout.cells_high * layout.cells_wide
        assert layout.num_patches <= largest_layout(config).num_patches


def test_known_sizes_of_the_released_model() -> None:
    assert plan_layout(544, 544, RELEASED) == ImageLayout.of_patches(39, 39, RELEASED)
    assert plan_layout(544, 544, RELEASED).num_tokens == 13 * 14 + 2
    assert plan_layout(1, 1, RELEASED).num_patches == 39 * 39
    assert plan_layout(5000, 5000, RELEASED).num_tokens <= 1024
    assert plan_layout(1021, 1, RELEASED).cells_high == 1


def test_a_picture_beyond_a_limit_is_refused_here_too() -> None:
    with pytest.raises(PromptError, match="too narrow"):
        to_patches(make_picture((1, 5000, 1)), RELEASED)


def test_pixels_run_from_minus_one_to_one() -> None:
    patches, _ = to_patches(make_picture((4, 80, 90)), SMALL)
    assert patches.dtype == torch.bfloat16
    assert -1 <= float(patches.min()) < float(patches.max()) <= 1
