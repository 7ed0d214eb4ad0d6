"""Every public operation of ``deepinfer_kernels``, with inputs for the row property.

A new operation without an entry fails ``test_operations.py``. Widths are small, and odd where the contract allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from deepinfer_determinism.operations import Operation, Run, rowwise
from deepinfer_kernels import (
    engram_gate,
    engram_hash,
    engram_lookup,
    expert_places,
    hc_collapse,
    hc_mix,
    hc_post,
    hc_sinkhorn,
    linear,
    log_softmax,
    moe_combine,
    moe_experts,
    moe_gate,
    mxfp4_quant,
    mxfp8_quant,
    nvfp4_quant,
    restrict_logits,
    rms_norm,
    rope,
    sample_tokens,
    sampling_noise,
    sum_smaller_probs,
    swiglu,
)
from deepinfer_kernels.engram_gate.reference import make_inputs as engram_gate_inputs
from deepinfer_kernels.engram_hash.reference import make_inputs as engram_hash_inputs
from deepinfer_kernels.engram_lookup.reference import make_inputs as engram_lookup_inputs
from deepinfer_kernels.expert_places.reference import make_inputs as expert_places_inputs
from deepinfer_kernels.hc_collapse.reference import make_inputs as hc_collapse_inputs
from deepinfer_kernels.hc_mix.reference import make_inputs as hc_mix_inputs
from deepinfer_kernels.hc_post.reference import make_inputs as hc_post_inputs
from deepinfer_kernels.hc_sinkhorn.reference import make_inputs as hc_sinkhorn_inputs
from deepinfer_kernels.linear.reference import make_inputs as linear_inputs
from deepinfer_kernels.log_softmax.reference import make_inputs as log_softmax_inputs
from deepinfer_kernels.moe_combine.reference import make_inputs as moe_combine_inputs
from deepinfer_kernels.moe_experts.reference import make_inputs as moe_experts_inputs
from deepinfer_kernels.moe_gate.reference import make_inputs as moe_gate_inputs
from deepinfer_kernels.mxfp8_quant.reference import make_inputs as mxfp8_inputs
from deepinfer_kernels.restrict_logits.reference import make_inputs as restrict_logits_inputs
from deepinfer_kernels.rms_norm.reference import make_inputs as rms_norm_inputs
from deepinfer_kernels.rope.reference import make_inputs as rope_inputs
from deepinfer_kernels.sample_tokens.reference import make_inputs as sample_tokens_inputs
from deepinfer_kernels.sampling_noise.reference import make_inputs as sampling_noise_inputs
from deepinfer_kernels.swiglu.reference import make_inputs as swiglu_inputs

FP32 = torch.float32
Tensors = Mapping[str, torch.Tensor]
Maker = Callable[[int, str, torch.Generator, str], tuple[Mapping[str, torch.Tensor], Sequence[str]]]
LARGE_SIZES = (1, 15, 16, 17, 33, 64, 65, 130)
_EPS = 1e-6


def operation(
    name: str,
    make: Maker,
    call: Callable[[Tensors, str], Any],
    variants: tuple[str, ...] = ("",),
    sizes: tuple[int, ...] | None = None,
    sizes_of: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Operation:
    """An operation whose units are rows: ``make`` gives its tensors, and the names of those with one row per unit."""

    def build(num_rows: int, variant: str, generator: torch.Generator, device: str) -> Run:
        inputs, rows = make(num_rows, variant, generator, device)
        return rowwise(inputs, rows, lambda tensors: call(tensors, variant))

    given = {} if sizes is None else {"sizes": sizes}
    return Operation(name=name, build=build, variants=variants, sizes_of=sizes_of, **given)


def named(names: str, rows: str, values: Sequence[torch.Tensor]) -> tuple[Tensors, Sequence[str]]:
    """Tensors under their names, and the names of those with one row per unit."""
    return dict(zip(names.split(), values, strict=True)), rows.split()


def _linear(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    x, weight, scale = linear_inputs(n, 80, 96, FP32, device, g)
    dense = torch.randn(50, 96 if variant == "even" else 33, generator=g).to(device)
    return named("x weight scale dense", "x", (x[:, : dense.shape[1]], weight, scale, dense))


def _grouped(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    x, weight, scale = linear_inputs(2 * n, 64, 96, FP32, device, g)
    return named("x weight scale", "x", (x.view(n, 2, 96), weight, scale))


EXPERTS = ("x", "topk_idx", "topk_weights", "w13", "w13_scale", "w2", "w2_scale")


def _experts(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    num_experts = 3 if variant == "crowded" else 16  # crowded: more than a row tile per expert
    return moe_experts_inputs(n, 2, 64, 32, num_experts, FP32, g, device), ("x", "topk_idx", "topk_weights")


def _places(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    """One replica of every expert: among several the number of the row chooses, by contract."""
    return named("topk_idx table num_replicas is_real", "topk_idx", expert_places_inputs(n, 3, 12, 12, g, device))


def _blocks(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    return {"x": mxfp8_inputs(n, 96, FP32, device, g)}, ("x",)


def _codes(
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Maker:
    def make(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
        codes, scale = quantise(torch.randn(n, 96, generator=g).to(device))
        return {"codes": codes.view(torch.uint8), "scale": scale}, ("codes", "scale")

    return make


def _rope(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    x, positions = rope_inputs(n, 3, 33, FP32, device, g)
    frequencies = rope.inverse_frequencies(16, 10000.0, None).to(device)
    return named("x positions frequencies", "x positions", (x[:, :, :32], positions, frequencies))


def _hash(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    layout = engram_hash.engram_layout([1, 3], 2, 4, 64, 256)[1]
    constants = [torch.tensor(values, device=device) for values in (layout.multipliers, layout.primes, layout.offsets)]
    return named("ids multipliers primes offsets", "ids", (engram_hash_inputs(n, 256, 4, g, device), *constants))


def _token_ids(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    logits = log_softmax_inputs(n, 1100, g, device)
    return named("logits ids", "logits ids", (logits, torch.randint(0, 1100, (n, 5), generator=g).to(device)))


def _one_id(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    vocab_size = _VOCABULARY[variant]
    logits = log_softmax_inputs(n, vocab_size, g, device)
    return named("logits ids", "logits ids", (logits, torch.randint(0, vocab_size, (n,), generator=g).to(device)))


def _numbers(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Tensors, Sequence[str]]:
    names = "seeds prompt_hashes positions"
    return named(names, names, sampling_noise_inputs(n, g, device))


def _noise(function: Callable[..., torch.Tensor]) -> Callable[[Tensors, str], torch.Tensor]:
    return lambda t, _: function(t["seeds"], t["prompt_hashes"], t["positions"], 129)


def _image(n: int, g: torch.Generator, device: str) -> torch.Tensor:
    return (torch.rand(n, generator=g) < 0.3).to(device)


_GATE_NAMES = "streams key value q_weight k_weight is_image"
_SAMPLE_NAMES = "logits temperature seeds prompt_hashes positions"
_RESTRICT_NAMES = "logits top_k top_p min_p"
# The sampling references cut a batch at SAMPLING_ELEMENTS / vocab_size rows.
_VOCABULARY = {"": 65, "wide": (1 << 14) + 1}
_AT_ONCE = (127, 130)
_FAMILIES = ((mxfp8_quant, "mxfp8"), (mxfp4_quant, "mxfp4"), (nvfp4_quant, "nvfp4"))


def _quantiser(module: Any, family: str) -> tuple[Operation, ...]:
    quant, dequant, fake = (getattr(module, f"{family}_{word}") for word in ("quant", "dequant", "fake_quant"))
    dtype = torch.float8_e4m3fn if family == "mxfp8" else torch.uint8
    folder = f"{family}_quant"

    def quantised(t: Tensors, _: str) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = quant(t["x"])
        return codes.view(torch.uint8), scale

    return (
        operation(f"{folder}.{family}_quant", _blocks, quantised),
        operation(f"{folder}.{family}_fake_quant", _blocks, lambda t, _: fake(t["x"])),
        operation(
            f"{folder}.{family}_dequant", _codes(quant), lambda t, _: dequant(t["codes"].view(dtype), t["scale"], FP32)
        ),
    )


DENSE: tuple[Operation, ...] = (
    operation(
        "rms_norm.rms_norm",
        lambda n, _, g, d: named("x weight", "x", rms_norm_inputs(n, 97, FP32, d, g)),
        lambda t, _: rms_norm.rms_norm(t["x"], t["weight"], _EPS),
    ),
    operation(
        "rope.rope",
        _rope,
        lambda t, v: rope.rope(t["x"], *rope.cos_sin(t["positions"], t["frequencies"]), inverse=v == "inverse"),
        variants=("forward", "inverse"),
    ),
    operation("rope.cos_sin", _rope, lambda t, _: rope.cos_sin(t["positions"], t["frequencies"])),
    operation(
        "linear.linear",
        _linear,
        lambda t, _: linear.linear(t["x"], t["dense"], out_dtype=FP32),
        variants=("even", "odd depth"),
        sizes=LARGE_SIZES,
    ),
    operation(
        "linear.mxfp8_linear",
        lambda n, _, g, d: _linear(n, "even", g, d),
        lambda t, v: linear.mxfp8_linear(
            t["x"], t["weight"], t["scale"], out_dtype=FP32, quantize_input=v == "quantised"
        ),
        variants=("exact", "quantised"),
        sizes=LARGE_SIZES,
    ),
    operation(
        "linear.grouped_linear",
        _grouped,
        lambda t, _: linear.grouped_linear(t["x"], t["weight"], t["scale"], out_dtype=FP32),
    ),
    operation(
        "hc_mix.hc_mix",
        lambda n, _, g, d: named("streams fn", "streams", hc_mix_inputs(n, 4, 33, FP32, d, g)),
        lambda t, _: hc_mix.hc_mix(t["streams"], t["fn"], _EPS),
        sizes=LARGE_SIZES,
    ),
    operation(
        "hc_sinkhorn.hc_sinkhorn",
        lambda n, _, g, d: named("logits scale base", "logits", hc_sinkhorn_inputs(n, 4, d, g)),
        lambda t, _: hc_sinkhorn.hc_sinkhorn(t["logits"], t["scale"], t["base"], iters=20, eps=_EPS),
    ),
    operation(
        "hc_collapse.hc_collapse",
        lambda n, _, g, d: named("streams pre", "streams pre", hc_collapse_inputs(n, 4, 97, FP32, d, g)),
        lambda t, _: hc_collapse.hc_collapse(t["streams"], t["pre"]),
    ),
    operation(
        "hc_post.hc_post",
        lambda n, _, g, d: named("y streams post comb", "y streams post comb", hc_post_inputs(n, 4, 97, FP32, d, g)),
        lambda t, _: hc_post.hc_post(t["y"], t["streams"], t["post"], t["comb"]),
    ),
    operation(
        "swiglu.swiglu",
        lambda n, _, g, d: named("gate up weight", "gate up weight", swiglu_inputs(n, 97, FP32, d, g)),
        lambda t, v: swiglu.swiglu(t["gate"], t["up"], 10.0, t["weight"] if v == "weighted" else None),
        variants=("plain", "weighted"),
    ),
    operation(
        "moe_gate.moe_gate",
        lambda n, _, g, d: named("x weight bias bias_image", "x", moe_gate_inputs(n, 96, 12, FP32, g, d)),
        lambda t, _: moe_gate.moe_gate(t["x"], t["weight"], t["bias"], top_k=3, scaling=1.5),
    ),
    operation(
        "expert_places.expert_places",
        _places,
        lambda t, v: expert_places.expert_places(
            t["topk_idx"],
            slots_per_rank=4,
            rank=1,
            **({name: t[name] for name in ("table", "num_replicas")} if v == "moved" else {}),
        ),
        variants=("first", "moved"),
    ),
    operation(
        "moe_experts.moe_experts",
        _experts,
        # sums of a few e4m3 and e2m1 products are exact in any order: only whole fp32 inputs show one
        lambda t, v: moe_experts.moe_experts(*(t[name] for name in EXPERTS), limit=10.0, quantize_input=v != "crowded"),
        variants=("sparse", "crowded"),
        sizes=LARGE_SIZES,
    ),
    operation(
        "moe_combine.moe_combine",
        lambda n, _, g, d: named("routed shared", "routed shared", moe_combine_inputs(n, 3, 97, FP32, g, d)),
        lambda t, _: moe_combine.moe_combine(t["routed"], t["shared"]),
    ),
    operation(
        "engram_gate.engram_gate",
        lambda n, _, g, d: named(
            _GATE_NAMES, "streams key value is_image", (*engram_gate_inputs(n, 4, 97, FP32, g, d), _image(n, g, d))
        ),
        lambda t, v: engram_gate.engram_gate(
            t["streams"],
            t["key"],
            t["value"],
            t["q_weight"],
            t["k_weight"],
            _EPS,
            t["is_image"] if v == "image" else None,
        ),
        variants=("text", "image"),
    ),
    operation(
        "engram_hash.engram_rows",
        _hash,
        lambda t, _: engram_hash.engram_rows(t["ids"], t["multipliers"], t["primes"], t["offsets"]),
    ),
    operation(
        "engram_lookup.engram_lookup",
        lambda n, _, g, d: named("table scale rows", "rows", engram_lookup_inputs(n, 6, 40, 64, g, d)),
        lambda t, _: engram_lookup.engram_lookup(t["table"], t["scale"], t["rows"], FP32),
    ),
    *(operation for module, family in _FAMILIES for operation in _quantiser(module, family)),
    operation("log_softmax.log_softmax", _token_ids, lambda t, _: log_softmax.log_softmax(t["logits"])),
    operation("log_softmax.log_sum_exp", _token_ids, lambda t, _: log_softmax.log_sum_exp(t["logits"])),
    operation(
        "log_softmax.token_log_softmax", _token_ids, lambda t, _: log_softmax.token_log_softmax(t["logits"], t["ids"])
    ),
    operation(
        "restrict_logits.restrict_logits",
        lambda n, v, g, d: named(_RESTRICT_NAMES, _RESTRICT_NAMES, restrict_logits_inputs(n, _VOCABULARY[v], g, d)),
        lambda t, _: restrict_logits.restrict_logits(*(t[name] for name in _RESTRICT_NAMES.split())),
        variants=tuple(_VOCABULARY),
        sizes_of={"wide": _AT_ONCE},
    ),
    operation(
        "sample_tokens.sample_tokens",
        lambda n, v, g, d: named(_SAMPLE_NAMES, _SAMPLE_NAMES, sample_tokens_inputs(n, _VOCABULARY[v], g, d)),
        lambda t, _: sample_tokens.sample_tokens(*(t[name] for name in _SAMPLE_NAMES.split())),
        variants=tuple(_VOCABULARY),
        sizes_of={"wide": _AT_ONCE},
    ),
    operation(
        "sample_tokens.top_tokens",
        lambda n, _, g, d: named(_SAMPLE_NAMES, _SAMPLE_NAMES, sample_tokens_inputs(n, 65, g, d)),
        lambda t, _: sample_tokens.top_tokens(t["logits"], 7),
    ),
    operation(
        "sum_smaller_probs.sum_smaller_probs",
        _one_id,
        lambda t, _: sum_smaller_probs.sum_smaller_probs(t["logits"], t["ids"]),
        variants=tuple(_VOCABULARY),
        sizes_of={"wide": _AT_ONCE},
    ),
    operation("sampling_noise.random_words", _numbers, _noise(sampling_noise.random_words)),
    operation("sampling_noise.gumbel_noise", _numbers, _noise(sampling_noise.gumbel_noise)),
)
