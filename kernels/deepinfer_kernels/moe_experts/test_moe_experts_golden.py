"""Router, experts and combine on the recorded inputs of every layer of the small golden checkpoints."""

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.linear import mxfp8_linear
from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.moe_experts import moe_experts
from deepinfer_kernels.moe_gate import moe_gate
from deepinfer_kernels.swiglu import swiglu
from deepinfer_kernels.testing import assert_close, require_golden, ulp_distance_bf16

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    config: dict[str, Any]
    tensors: Tensors


@pytest.fixture(scope="module", params=["nano", "tiny"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Checkpoint]:
    name = str(request.param)
    folder: Path = tmp_path_factory.mktemp(name)
    runpy.run_path(str(require_golden("make_checkpoint.py")))["write_checkpoint"](name, 0, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    tensors: Tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
    return name, Checkpoint(config=config, tensors=tensors)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def layer_tensors(checkpoint: Checkpoint, layer: int) -> Tensors:
    prefix = f"layers.{layer}.ffn."
    return {k.removeprefix(prefix): v for k, v in checkpoint.tensors.items() if k.startswith(prefix)}


def stacked(tensors: Tensors, num_experts: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 of all experts; ``kind`` is weight or scale."""
    experts = [[as_bytes(tensors[f"experts.{e}.{w}.{kind}"]) for w in ("w1", "w3", "w2")] for e in range(num_experts)]
    return torch.stack([torch.cat((w1, w3)) for w1, w3, _ in experts]), torch.stack([w2 for _, _, w2 in experts])


def shared_expert(x: torch.Tensor, tensors: Tensors, limit: float, quantize_input: bool) -> torch.Tensor:
    def project(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight, scale = tensors[f"shared_experts.{name}.weight"], as_bytes(tensors[f"shared_experts.{name}.scale"])
        return mxfp8_linear(rows, weight, scale, out_dtype=x.dtype, quantize_input=quantize_input)

    return project(swiglu(project(x, "w1"), project(x, "w3"), limit, None), "w2")


def moe_layer(
    x: torch.Tensor, tensors: Tensors, config: dict[str, Any], quantize_input: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w13, w2 = stacked(tensors, config["n_routed_experts"], "weight")
    w13_scale, w2_scale = stacked(tensors, config["n_routed_experts"], "scale")
    limit = config["swiglu_limit"]
    idx, weights = moe_gate(
        x,
        tensors["gate.weight"],
        tensors["gate.bias"],
        top_k=config["num_experts_per_tok"],
        scaling=config["routed_scaling_factor"],
    )
    routed = moe_experts(x, idx, weights, w13, w13_scale, w2, w2_scale, limit=limit, quantize_input=quantize_input)
    return idx, weights, moe_combine(routed, shared_expert(x, tensors, limit, quantize_input))


@pytest.mark.parametrize("prefix", ["", "step."])
@pytest.mark.parametrize("mode", ["ref", "s32"])
def test_every_layer_gives_its_recorded_output(checkpoint: tuple[str, Checkpoint], mode: str, prefix: str) -> None:
    name, content = checkpoint
    golden = load_file(require_golden(f"{name}-s0/layers_{mode}.safetensors"))
    exact, within, total = 0, 0, 0
    for layer in range(content.config["num_hidden_layers"]):
        recorded = {k: golden[f"{prefix}L{layer}.{k}"] for k in ("ffn_in", "gate_experts", "gate_weights", "moe_out")}
        idx, weights, out = moe_layer(
            recorded["ffn_in"], layer_tensors(content, layer), content.config, quantize_input=mode == "ref"
        )
        want_idx, order = recorded["gate_experts"].sort(dim=1)
        assert torch.equal(idx, want_idx), f"experts of layer {layer}"
        assert_close(weights, recorded["gate_weights"].gather(1, order), 1e-5, label=f"weights of layer {layer}")
        if mode == "s32":
            assert_close(out, recorded["moe_out"], 2e-5, label=f"output of layer {layer}")
            continue
        distance = ulp_distance_bf16(out, recorded["moe_out"])
        near = (out.float() - recorded["moe_out"].float()).abs() <= 2**-9
        exact += int((distance == 0).sum())
        within += int(((distance <= 1) | near).sum())
        total += distance.numel()
    # One product on a rounding boundary moves a whole row of a layer; the golden data allow 1 % for that.
    assert exact >= 0.99 * total
    assert within >= 0.999 * total
