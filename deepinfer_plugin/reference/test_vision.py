"""Tower, aligner and image rows: the fp64 oracle against the golden data, then the served code against both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deepinfer_kernels.testing import assert_bitwise_equal, assert_close, require_golden
from deepinfer_plugin.conftest import CheckpointFixture, ModelFixture
from deepinfer_plugin.images.layout import ImageLayout, Role
from deepinfer_plugin.model.config import ModelConfig, VisionConfig
from deepinfer_plugin.model.vision import Aligner, VisionTower, image_span
from deepinfer_plugin.reference import vision as oracle
from deepinfer_plugin.reference.golden import Checkpoint, GoldenCase, RowErrors
from deepinfer_plugin.reference.model import ReferenceModel, load_vision_weights
from deepinfer_plugin.settings import Arithmetic

NAMES = ("nano", "tiny")
FP32_ATOL = 5e-6  # values of order 2; measured 1.3e-6
BF16_ATOL = 0.06  # from fp64; measured 0.03, as far as the golden bf16 rows are
BF16_EQUAL = 0.98  # share of the recorded bf16 elements that are met exactly: every rounding is in its place
DTYPES = {Arithmetic.S32: torch.float32, Arithmetic.Q32: torch.float32, Arithmetic.REF: torch.bfloat16}


class Vision(nn.Module):
    """The served tower and aligner with the weights of a small checkpoint."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        assert config.vision_config is not None
        self.vision = VisionTower(config.vision_config)
        self.aligner = Aligner(config.vision_config, config.hidden_size)
        self.delimiters = [weights[f"image_{name}"] for name in ("start", "newline", "end")]
        for name, parameter in self.named_parameters():
            parameter.data.copy_(weights[name])

    def span(self, patches: torch.Tensor, layout: ImageLayout, dtype: torch.dtype) -> torch.Tensor:
        rows = self.aligner(self.vision(patches.flatten(1), layout, dtype), layout)
        return image_span(rows, layout.roles(), self.delimiters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The recorded image of one small checkpoint."""

    name: str
    config: ModelConfig
    vision: VisionConfig
    weights: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    grid: tuple[int, int]

    @property
    def layout(self) -> ImageLayout:
        return ImageLayout.of_patches(*self.grid, self.vision)


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, checkpoint: CheckpointFixture) -> Golden:
    name = str(request.param)
    folder = checkpoint(name, 0)
    config = ModelConfig.from_model_dir(folder)
    assert config.vision_config is not None
    tensors = load_file(require_golden(f"{name}-s0/vision.safetensors"))
    high, wide = tensors["grid"].tolist()
    return Golden(
        name=name,
        config=config,
        vision=config.vision_config,
        weights=load_vision_weights(folder),
        tensors=tensors,
        grid=(high, wide),
    )


def test_the_oracle_gives_the_recorded_tower_and_features(golden: Golden) -> None:
    tower = oracle.tower(golden.tensors["patches"], golden.grid, golden.weights, golden.vision)
    features = oracle.features(tower, golden.grid, golden.weights, golden.vision)
    for mode in ("s32", "q32"):
        assert_close(tower, golden.tensors[f"tower.{mode}"].double(), FP32_ATOL, f"tower {mode}")
        assert_close(features, golden.tensors[f"features.{mode}"].double(), FP32_ATOL, f"features {mode}")


def test_the_served_tower_agrees_with_the_oracle_and_the_recorded_rows(golden: Golden) -> None:
    tower = oracle.tower(golden.tensors["patches"], golden.grid, golden.weights, golden.vision)
    features = oracle.features(tower, golden.grid, golden.weights, golden.vision)
    served = Vision(golden.config, golden.weights)
    for mode, dtype, atol in (("s32", torch.float32, FP32_ATOL), ("ref", torch.bfloat16, BF16_ATOL)):
        rows = served.vision(golden.tensors["patches"].flatten(1), golden.layout, dtype)
        found = served.aligner(rows, golden.layout)
        for label, got, recorded, exact in (("tower", rows, "tower", tower), ("features", found, "features", features)):
            assert got.dtype == dtype
            assert_close(got.double(), exact, atol, f"{label} {mode}, fp64")
            assert_close(got.double(), golden.tensors[f"{recorded}.{mode}"].double(), atol, f"{label} {mode}, recorded")
            if mode == "ref":
                assert float((got == golden.tensors[f"{recorded}.ref"]).float().mean()) >= BF16_EQUAL, label


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        ("columns before rows", ("grid",)),
        ("halves of the MLP swapped", ("vision.blocks.0.mlp.w1.weight",)),
        ("no bias of the attention", ("vision.blocks.0.attn.wqkv.bias",)),
        ("cell-major aligner", ("aligner.w1.weight",)),
    ],
)
def test_a_mistake_in_the_tower_would_show(golden: Golden, mistake: str, names: tuple[str, ...]) -> None:
    weights, grid = dict(golden.weights), golden.grid
    for name in names:
        if name == "grid":
            grid = (grid[1], grid[0])
        elif name.endswith("bias"):
            weights[name] = torch.zeros_like(weights[name])
        elif name.startswith("aligner"):
            weights[name] = torch.unflatten(weights[name], 1, (-1, 9)).transpose(1, 2).flatten(1)
        else:
            weights[name] = weights[name].roll(golden.vision.intermediate_size, 0)
    served = Vision(golden.config, weights)
    layout = ImageLayout.of_patches(*grid, golden.vision)
    found = served.aligner(served.vision(golden.tensors["patches"].flatten(1), layout, torch.float32), layout)
    assert float((found - golden.tensors["features.s32"]).abs().max()) > 100 * FP32_ATOL, mistake


def test_the_span_has_the_recorded_roles_and_the_oracles_rows(golden: Golden) -> None:
    assert [int(role) for role in golden.layout.roles()] == golden.tensors["types"].tolist()
    cells = golden.tensors["features.s32"]
    want = oracle.span(cells.double(), golden.grid, golden.weights, golden.vision)
    delimiters = [golden.weights[f"image_{name}"] for name in ("start", "newline", "end")]
    got = image_span(cells, golden.layout.roles(), delimiters)
    assert_bitwise_equal(got.double(), want, "span")
    assert golden.layout.roles()[0] is Role.START


def test_an_image_has_its_bits_whatever_was_encoded_before(golden: Golden) -> None:
    served = Vision(golden.config, golden.weights)
    patches, layout = golden.tensors["patches"], golden.layout
    for dtype in (torch.float32, torch.bfloat16):
        alone = served.span(patches, layout, dtype)
        served.span(patches.flip(0), layout, dtype)
        assert_bitwise_equal(served.span(patches.clone(), layout, dtype), alone, str(dtype))


def run(model: ReferenceModel, golden: Golden, sizes: tuple[int, ...]) -> torch.Tensor:
    """Logits of the recorded prompt, the image's rows from the served tower."""
    arithmetic = model.arithmetic
    rows = Vision(golden.config, golden.weights).span(golden.tensors["patches"], golden.layout, DTYPES[arithmetic])
    tokens = golden.tensors["tokens"].long()
    cache = model.new_cache(len(tokens))
    cache.place_image(int(golden.tensors["start"]), rows)
    found = [model.forward(tokens[cache.length : cache.length + size], cache) for size in sizes]
    return torch.cat(found)


def case_of(golden: Golden, arithmetic: Arithmetic) -> GoldenCase:
    tokens = golden.tensors["tokens"].long()
    return GoldenCase(
        checkpoint=Checkpoint(golden.name, 0),
        label="vision",
        arithmetic=arithmetic,
        tokens=tokens,
        num_prompt=len(tokens),
        rows=torch.arange(len(tokens)),
        logits=golden.tensors[f"logits.{arithmetic.value}"],
        is_stable=golden.tensors[f"stable.{arithmetic.value}"].bool(),
    )


def test_the_reference_gives_the_recorded_logits(golden: Golden, reference_model: ModelFixture) -> None:
    model = reference_model(Checkpoint(golden.name, 0), Arithmetic.S32)
    num_tokens = len(golden.tensors["tokens"])
    RowErrors.of(case_of(golden, Arithmetic.S32), run(model, golden, (num_tokens,))).assert_s32()
    for arithmetic, atol, share in ((Arithmetic.Q32, 1e-3, 0.85), (Arithmetic.REF, 2e-3, 0.5)):
        model = reference_model(Checkpoint(golden.name, 0), arithmetic)
        errors = RowErrors.of(case_of(golden, arithmetic), run(model, golden, (num_tokens,)))
        assert errors.stable_share(atol) >= share, arithmetic


def test_chunks_that_cut_the_span_change_no_bit(golden: Golden, reference_model: ModelFixture) -> None:
    model = reference_model(Checkpoint(golden.name, 0), Arithmetic.S32)
    num_tokens, start = len(golden.tensors["tokens"]), int(golden.tensors["start"])
    whole = run(model, golden, (num_tokens,))
    for sizes in ((start + 4, num_tokens - start - 4), (1,) * num_tokens):
        assert_bitwise_equal(run(model, golden, sizes), whole, str(sizes))


@pytest.mark.parametrize("mistake", ["text bias for images", "n-grams across images", "no image rows"])
def test_a_mistake_in_the_text_model_would_show(golden: Golden, mistake: str, reference_model: ModelFixture) -> None:
    model = reference_model(Checkpoint(golden.name, 0), Arithmetic.S32)
    tokens = golden.tensors["tokens"].long()
    cache = model.new_cache(len(tokens))
    rows = Vision(golden.config, golden.weights).span(golden.tensors["patches"], golden.layout, torch.float32)
    cache.place_image(int(golden.tensors["start"]), rows)
    if mistake == "no image rows":
        cache = model.new_cache(len(tokens))
    elif mistake == "n-grams across images":
        cache.is_image[int(golden.tensors["start"]) + len(rows) - 1] = False
    else:
        cache.is_image.logical_not_()
    error = RowErrors.of(case_of(golden, Arithmetic.S32), model.forward(tokens, cache)).error
    assert float(error.max()) > 1e-2, mistake
