"""Operations that join others: a sublayer's input, the latent projections, and the ends of both sublayers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_determinism.operation_cases import FP32, LARGE_SIZES, Tensors, named, operation
from deepinfer_determinism.operations import Operation
from deepinfer_kernels import (
    attention_output,
    dense_attention,
    experts_output,
    hc_norm,
    latent_projections,
    linear,
    shared_expert,
)
from deepinfer_kernels.attention_output.reference import make_inputs as attention_output_inputs
from deepinfer_kernels.dense_attention.reference import make_inputs as dense_attention_inputs
from deepinfer_kernels.experts_output.reference import make_inputs as experts_output_inputs
from deepinfer_kernels.hc_norm.reference import make_inputs as hc_norm_inputs
from deepinfer_kernels.latent_projections.reference import make_inputs as latent_inputs
from deepinfer_kernels.linear.reference import make_inputs as linear_inputs
from deepinfer_kernels.shared_expert.reference import make_inputs as shared_expert_inputs

_EPS = 1e-6
_MIX = "streams post comb"
_LATENT = "rows q q_scale kv kv_scale q_norm kv_norm"
_ATTENTION = "out a a_scale b b_scale streams post comb"
_SHARED = "rows w1 s1 w3 s3 w2 s2"
_EXPERTS = f"routed shared {_MIX}"


def _prepared(x: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` as the norm prepares them, quantised."""
    pre = torch.ones(x.shape[0], 1, device=x.device)
    weight = torch.ones(x.shape[1], device=x.device)
    return hc_norm.hc_norm(x.unsqueeze(1), pre, weight, _EPS, quantize=True, for_experts=False).rows


def _linear(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    x, weight, scale = linear_inputs(n, 80, 96, FP32, device, g)
    return named("rows weight scale", "rows", (_prepared(x), weight, scale))


def _latents(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    x, *rest = latent_inputs(n, 96, 64, 160, FP32, device, g)
    return named(_LATENT, "rows", (_prepared(x), *rest))


def _shared(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    x, *rest = shared_expert_inputs(n, 160, 96, FP32, device, g)
    return named(_SHARED, "rows", (_prepared(x), *rest))


FUSED: tuple[Operation, ...] = (
    operation(
        "hc_norm.hc_norm",
        lambda n, _, g, d: named("streams pre weight", "streams pre", hc_norm_inputs(n, 4, 160, FP32, d, g)),
        lambda t, v: tuple(
            hc_norm.hc_norm(t["streams"], t["pre"], t["weight"], _EPS, quantize=v == "quantised", for_experts=True)
        ),
        variants=("exact", "quantised"),
    ),
    operation(
        "linear.mxfp8_prepared_linear",
        _linear,
        lambda t, _: linear.mxfp8_prepared_linear(t["rows"], t["weight"], t["scale"], out_dtype=FP32),
        sizes=LARGE_SIZES,
    ),
    operation(
        "latent_projections.latent_projections",
        _latents,
        lambda t, v: latent_projections.latent_projections(
            t["rows"],
            (t["q"], t["q_scale"]),
            (t["kv"], t["kv_scale"]),
            t["q_norm"],
            t["kv_norm"],
            _EPS,
            out_dtype=FP32,
            quantize=v == "quantised",
        ),
        variants=("exact", "quantised"),
        sizes=LARGE_SIZES,
    ),
    operation(
        "attention_output.attention_output",
        lambda n, _, g, d: named(_ATTENTION, f"out {_MIX}", attention_output_inputs(n, 2, 48, 128, FP32, d, g)),
        lambda t, v: attention_output.attention_output(
            t["out"],
            (t["a"], t["a_scale"]),
            (t["b"], t["b_scale"]),
            *(t[name] for name in _MIX.split()),
            quantize=v == "quantised",
        ),
        variants=("exact", "quantised"),
        sizes=LARGE_SIZES,
    ),
    operation(
        "shared_expert.shared_expert",
        _shared,
        lambda t, v: shared_expert.shared_expert(
            t["rows"],
            (t["w1"], t["s1"]),
            (t["w3"], t["s3"]),
            (t["w2"], t["s2"]),
            limit=10.0,
            out_dtype=FP32,
            quantize=v == "quantised",
        ),
        variants=("exact", "quantised"),
        sizes=LARGE_SIZES,
    ),
    operation(
        "experts_output.experts_output",
        lambda n, _, g, d: named(_EXPERTS, _EXPERTS, experts_output_inputs(n, 97, FP32, d, g)),
        lambda t, _: experts_output.experts_output(*(t[name] for name in _EXPERTS.split())),
    ),
    operation(
        "dense_attention.dense_attention",
        lambda n, _, g, d: named("q k v", "q", dense_attention_inputs(n, 100, 2, 16, FP32, g, d)),
        lambda t, _: dense_attention.dense_attention(t["q"], t["k"], t["v"], 0.25),
    ),
)
