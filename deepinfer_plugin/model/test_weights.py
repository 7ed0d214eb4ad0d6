"""From checkpoint to parameters: what is read, where it goes, and how much memory that takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.errors import CheckpointError
from deepinfer_plugin.model.bench_load import READERS, make_parameters, measure_in_fresh_process
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.shards import read_header
from deepinfer_plugin.model.tensors import Group, expected_tensors
from deepinfer_plugin.model.weights import iterate_tensors, load_into, parameter_specs
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.reference.synthetic import tensor_bytes, write_synthetic

NORM, EXPERT = "norm.weight", "layers.2.ffn.experts.3.w2.weight"


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_the_released_checkpoint_has_the_tensors_of_its_contract() -> None:
    specs = expected_tensors(ModelConfig.from_dict(released_config_dict()))
    assert len(specs) == 96_085
    assert specs["layers.14.engram.embed.scale"].shape == (384016682, 8)
    assert specs["layers.39.ffn.experts.383.w2.weight"].shape == (5120, 1152)
    assert specs["layers.0.attn.wo_a.scale"].shape == (256, 128)
    assert specs["mtp.0.main_proj.weight"].shape == (5120, 15360)
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)
    assert specs["aligner.w1.weight"].shape == (5120, 9216)
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.24.attn.indexer.wk.weight" not in specs


def test_without_vision_there_is_no_tower_and_no_image_bias(nano_config: ModelConfig) -> None:
    left_out = expected_tensors(nano_config).keys() - expected_tensors(replace(nano_config, vision_config=None)).keys()
    assert {name.partition(".")[0] for name in left_out if not name.endswith(".gate.bias_vl")} == {
        "vision",
        "aligner",
        "image_start",
        "image_newline",
        "image_end",
    }


def test_every_tensor_is_read_once_with_the_bits_on_disk(
    checkpoint: Callable[..., Path], nano_config: ModelConfig, nano_tensors: dict[str, torch.Tensor]
) -> None:
    read = list(iterate_tensors(checkpoint("nano", 0), nano_config))
    assert sorted(name for name, _ in read) == sorted(nano_tensors)
    for name, tensor in read:
        assert (tensor.dtype, tensor.shape) == (nano_tensors[name].dtype, nano_tensors[name].shape), name
        assert_bitwise_equal(raw_bytes(tensor), raw_bytes(nano_tensors[name]), label=name)


def test_groups_that_are_not_asked_for_are_not_read(checkpoint: Callable[..., Path], nano_config: ModelConfig) -> None:
    specs = expected_tensors(nano_config)
    groups: tuple[Group, ...] = ("draft",)
    read = [name for name, _ in iterate_tensors(checkpoint("nano", 0), nano_config, groups)]
    assert read
    assert {specs[name].group for name in read} == {"draft"}


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_every_parameter_gets_the_bits_of_its_tensors(name: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(name, 0)
    config = ModelConfig.from_model_dir(folder)
    tensors = {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}
    model = make_parameters(config)
    parameters = dict(model.named_parameters())
    assert load_into(model, iterate_tensors(folder, config), config) == set(parameters)
    inter, consumed = config.moe_intermediate_size, set()
    for tensor_name, tensor in tensors.items():
        if expected_tensors(config)[tensor_name].group != "text":
            continue
        match = re.fullmatch(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.(weight|scale)", tensor_name)
        label = tensor_name
        if match is not None:
            prefix, expert, matrix, part = match.groups()
            suffix = "_scale" if part == "scale" else ""
            stacked = parameters[f"{prefix}.{'w2' if matrix == 'w2' else 'w13'}{suffix}"][int(expert)]
            got = {"w1": stacked[:inter], "w2": stacked, "w3": stacked[inter:]}[matrix]
            assert got.dtype == torch.uint8, label
        else:
            got = parameters[tensor_name]
        assert_bitwise_equal(raw_bytes(got.data), raw_bytes(tensor), label=label)
        consumed.add(tensor_name)
    assert sum(tensors[name].nbytes for name in consumed) == sum(p.nbytes for p in parameters.values())


def test_names_from_vllm_may_carry_the_prefix_and_come_in_any_order(
    nano_config: ModelConfig, nano_tensors: dict[str, torch.Tensor]
) -> None:
    straight, others = make_parameters(nano_config), make_parameters(nano_config)
    load_into(straight, nano_tensors.items(), nano_config)
    backwards = ((f"model.{name}", nano_tensors[name]) for name in sorted(nano_tensors, reverse=True))
    load_into(others, backwards, nano_config)
    for name, parameter in straight.named_parameters():
        assert_bitwise_equal(raw_bytes(others.get_parameter(name).data), raw_bytes(parameter.data), label=name)


GIVEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], list[tuple[str, torch.Tensor]]], str]] = {
    "missing": (lambda t: [item for item in t.items() if item[0] != EXPERT], f"tensor {EXPERT} is missing, expected"),
    "extra": (lambda t: [*t.items(), ("layers.0.new.weight", t[NORM])], "tensor layers.0.new.weight is not part of"),
    "twice": (lambda t: [*t.items(), (f"model.{NORM}", t[NORM])], f"tensor {NORM} is given twice, expected once"),
    "wrong shape": (
        lambda t: list((t | {EXPERT: t[EXPERT][:5]}).items()),
        rf"tensor {EXPERT} is torch.int8 \[5, 16\], expected torch.int8 \[64, 16\]",
    ),
    "wrong dtype": (
        lambda t: list((t | {NORM: t[NORM].float()}).items()),
        rf"tensor {NORM} is torch.float32 \[64\], expected torch.bfloat16 \[64\]",
    ),
    "wrong shape in a part that is passed over": (
        lambda t: list((t | {"vision.norm.weight": t["vision.norm.weight"][:3]}).items()),
        r"tensor vision.norm.weight is torch.bfloat16 \[3\], expected torch.bfloat16 \[16\]",
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_tensors_that_do_not_fit_are_refused_by_name(
    case: str, nano_config: ModelConfig, nano_tensors: dict[str, torch.Tensor]
) -> None:
    make, message = GIVEN[case]
    with pytest.raises(CheckpointError, match=f"load_into: {message}"):
        load_into(make_parameters(nano_config), make(nano_tensors), nano_config)


def drop_parameter(model: nn.Module) -> None:
    del model.get_submodule("layers.3.attn.wkv").weight


def add_parameter(model: nn.Module) -> None:
    model.register_parameter("spare", nn.Parameter(torch.zeros(1)))


def change_parameter(model: nn.Module) -> None:
    model.get_submodule("norm").weight = nn.Parameter(torch.zeros(64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_parameter, r"parameter layers.3.attn.wkv.weight of the model is missing, expected torch.float8_e4m3fn"),
        (add_parameter, r"parameter spare of the model is filled by no tensor"),
        (change_parameter, r"parameter norm.weight of the model is torch.float32 \[64\], expected torch.bfloat16"),
    ],
)
def test_a_model_with_other_parameters_is_refused_before_a_tensor_is_taken(
    change: Callable[[nn.Module], None], message: str, nano_config: ModelConfig
) -> None:
    model = make_parameters(nano_config)
    change(model)

    def no_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        pytest.fail("a tensor was taken")
        yield

    with pytest.raises(CheckpointError, match=message):
        load_into(model, no_tensors(), nano_config)


# Memory.


@pytest.mark.parametrize("reader", READERS)
def test_loading_holds_the_model_once_and_less_than_a_shard_beside_it(reader: str, tmp_path: Path) -> None:
    written = write_synthetic(tmp_path, 200_000_000, 4)
    figures = measure_in_fresh_process(tmp_path, reader)
    assert figures.num_shards == 4
    assert figures.parameter_bytes > 0.75 * written.total_bytes
    assert figures.peak_bytes - figures.before_bytes > figures.parameter_bytes
    assert figures.overhead_ratio < 1.2


def test_loading_a_synthetic_checkpoint_keeps_every_byte(tmp_path: Path) -> None:
    written = write_synthetic(tmp_path, 150_000_000, 3)
    headers = [read_header(shard) for shard in sorted(tmp_path.glob("*.safetensors"))]
    assert max(sum(t.num_bytes for t in header.values()) for header in headers) == written.largest_shard_bytes
    model = make_parameters(written.config)
    load_into(model, iterate_tensors(tmp_path, written.config), written.config)
    for name in ("embed.weight", "layers.9.attn.wo_b.scale", "layers.4.engram.embed.weight"):
        parameter = model.get_parameter(name)
        assert raw_bytes(parameter.data).numpy().tobytes() == tensor_bytes(name, parameter.nbytes), name
    assert set(parameter_specs(written.config)) == {name for name, _ in model.named_parameters()}
