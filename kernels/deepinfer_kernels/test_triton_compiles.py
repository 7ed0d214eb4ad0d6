"""Every kernel of the linear layers, the experts and the quantisers compiles for SM90 and SM100, without a GPU."""

import sys
from collections.abc import Callable

import pytest
import torch

from deepinfer_kernels import tiling

pytest.importorskip("triton", reason="Triton is not installed")

from deepinfer_kernels.attention_output.triton_kernel import attention_output_triton
from deepinfer_kernels.compiling import Launch, compile_launch, launches_of
from deepinfer_kernels.expert_places.triton_kernel import expert_places_triton
from deepinfer_kernels.experts_output.triton_kernel import experts_output_triton
from deepinfer_kernels.hc_norm.triton_kernel import hc_norm_triton
from deepinfer_kernels.latent_projections.triton_kernel import latent_projections_triton
from deepinfer_kernels.linear.triton_kernel import grouped_linear_triton, linear_triton, mxfp8_linear_triton
from deepinfer_kernels.linear.weights import Weight
from deepinfer_kernels.moe_combine.triton_kernel import moe_combine_triton
from deepinfer_kernels.moe_experts.triton_kernel import moe_experts_triton
from deepinfer_kernels.moe_gate.triton_kernel import moe_gate_triton
from deepinfer_kernels.mxfp4_quant.triton_kernel import mxfp4_fake_quant_triton, mxfp4_quant_triton
from deepinfer_kernels.mxfp8_quant.triton_kernel import mxfp8_fake_quant_triton, mxfp8_quant_triton
from deepinfer_kernels.nvfp4_quant.triton_kernel import nvfp4_fake_quant_triton, nvfp4_quant_triton
from deepinfer_kernels.shared_expert.triton_kernel import shared_expert_triton
from deepinfer_kernels.swiglu.triton_kernel import swiglu_triton

_BF16 = torch.bfloat16


def _empty(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _mxfp8(num_rows: int, num_out: int, depth: int) -> Callable[[], object]:
    weight = _empty(num_out, depth, dtype=torch.float8_e4m3fn)
    scale = _empty(num_out // 32, depth // 32, dtype=torch.uint8)
    return lambda: mxfp8_linear_triton(_empty(num_rows, depth), weight, scale, _BF16, True)


def _grouped() -> object:
    weight = _empty(8192, 512, dtype=torch.float8_e4m3fn)
    return grouped_linear_triton(_empty(64, 8, 512), weight, _empty(256, 16, dtype=torch.uint8), _BF16)


def _experts(num_tokens: int, dtype: torch.dtype, num_shares: int = 1) -> Callable[[], object]:
    """Whole, or one share of the outputs of both products."""
    num_experts, hidden_size, intermediate_size = 8, 512, 256
    own, outputs = intermediate_size // num_shares, hidden_size // num_shares
    byte = torch.uint8
    return lambda: moe_experts_triton(
        _empty(num_tokens, hidden_size, dtype=dtype),
        _empty(num_tokens, 6, dtype=torch.int32),
        _empty(num_tokens, 6, dtype=torch.float32),
        _empty(num_experts, 2 * own, hidden_size // 2, dtype=byte),
        _empty(num_experts, 2 * own, hidden_size // 32, dtype=byte),
        _empty(num_experts, outputs, intermediate_size // 2, dtype=byte),
        _empty(num_experts, outputs, intermediate_size // 32, dtype=byte),
        None,
        limit=10.0,
        quantize_input=True,
        gather=None if num_shares == 1 else lambda h: h.repeat(1, num_shares),
    )


def _gate() -> object:
    bias = _empty(384, dtype=torch.float32)
    is_image = _empty(4, dtype=torch.bool)
    return moe_gate_triton(
        _empty(4, 256), _empty(384, 256), bias, top_k=6, scaling=1.5, bias_image=bias, is_image=is_image
    )


def _places() -> None:
    ids, table, counts = (_empty(*shape, dtype=torch.int32) for shape in ((64, 6), (384, 5), (388,)))
    expert_places_triton(ids, 97, 1, table, table[:, 0], ids, counts)
    expert_places_triton(ids, 96, 1, None, None, None, None)


def _weight(num_out: int, depth: int) -> Weight:
    scale = _empty(num_out // 32, depth // 32, dtype=torch.uint8)
    return _empty(num_out, depth, dtype=torch.float8_e4m3fn), scale


def _mix(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(3, 4, width), _empty(3, 4, dtype=torch.float32), _empty(3, 4, 4, dtype=torch.float32)


def _sublayers() -> None:
    """Everything between attention and the routed experts, at shapes with parts of K."""
    streams, pre, comb = _mix(2048)
    norm = _empty(2048)
    _, rows, _ = hc_norm_triton(streams, pre, norm, 1e-20, quantize=True, for_experts=True)
    weights = _weight(1280, 2048), _weight(512, 2048)
    latent_projections_triton(rows, *weights, norm[:1280], norm[:512], 1e-20, out_dtype=_BF16, quantize=True)
    wo_a, wo_b = _weight(8192, 4096), _weight(2048, 8192)
    attention_output_triton(_empty(3, 8, 4096), wo_a, wo_b, streams, pre, comb, quantize=True)
    shared = _weight(2304, 2048), _weight(2304, 2048), _weight(2048, 2304)
    out = shared_expert_triton(rows, *shared, limit=10.0, out_dtype=_BF16, quantize=True)
    experts_output_triton(_empty(3, 6, 2048), out, streams, pre, comb)


CALLS: dict[str, Callable[[], object]] = {
    "mxfp8, one row, parts of K": _mxfp8(1, 256, 2048),
    "mxfp8, 64 rows": _mxfp8(64, 8192, 256),
    "mxfp8, K no multiple of 128": _mxfp8(17, 96, 96),
    "mxfp8, many rows": _mxfp8(300, 8192, 256),
    "mxfp8, many rows, parts of K": _mxfp8(300, 256, 2048),
    "grouped": _grouped,
    "bf16, few rows": lambda: linear_triton(_empty(16, 512), _empty(8192, 512), torch.float32),
    "bf16, many rows": lambda: linear_triton(_empty(600, 512), _empty(8192, 512), torch.float32),
    "fp32": lambda: linear_triton(_empty(16, 512, dtype=torch.float32), _empty(64, 512), torch.float32),
    "experts, few tokens": _experts(4, _BF16),
    "experts, fp32": _experts(4, torch.float32),
    "experts, 64 rows each": _experts(80, _BF16),
    "experts, many tokens": _experts(2000, _BF16),
    "experts, shares of whole blocks": _experts(4, _BF16, 2),
    "experts, shares of 32 columns": _experts(4, _BF16, 4),
    "experts, shares of 32 columns, many tokens": _experts(2000, _BF16, 4),
    "experts, small shares": _experts(4, torch.float32, 16),
    "router": _gate,
    "places of experts": _places,
    "combine": lambda: moe_combine_triton(_empty(4, 6, 512), _empty(4, 512)),
    "sublayers": _sublayers,
    "swiglu": lambda: swiglu_triton(_empty(4, 512), _empty(4, 512), 10.0, _empty(4, dtype=torch.float32)),
    "mxfp8_quant": lambda: (mxfp8_quant_triton(_empty(4, 64)), mxfp8_fake_quant_triton(_empty(4, 64))),
    "mxfp4_quant": lambda: (mxfp4_quant_triton(_empty(4, 64)), mxfp4_fake_quant_triton(_empty(4, 64))),
    "nvfp4_quant": lambda: (nvfp4_quant_triton(_empty(4, 64)), nvfp4_fake_quant_triton(_empty(4, 64))),
}


def _compile(launch: Launch, capability: int) -> None:
    compiled = compile_launch(launch, capability)
    assert "cubin" in compiled.asm, launch.name


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_that_start_early_wait_before_they_read(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("deepinfer_kernels.")]:
        if hasattr(module, "starts_early"):
            monkeypatch.setattr(module, "starts_early", lambda device: True)
    launched = launches_of(_sublayers) + launches_of(_places)
    launches = [launch for launch in launched if launch.options.get("launch_pdl")]
    assert {launch.name for launch in launches} >= {"_expert_places_kernel"}
    assert len(launches) >= 10, "hardly anything starts early"
    for launch in launches:
        text = compile_launch(launch, capability).asm["ptx"]
        assert "griddepcontrol.wait" in text, launch.name
        reads = [at for at in (text.find("ld.global.v"), text.find("cp.async.c"), text.find("st.global")) if at >= 0]
        if launch.name not in ("_hc_norm_kernel", "_norm_latents_kernel"):  # they read the norm's weight before
            assert text.index("griddepcontrol.wait") < min(reads), launch.name


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile(name: str, capability: int) -> None:
    launches = launches_of(CALLS[name])
    assert launches, "the call launched nothing"
    for launch in launches:
        _compile(launch, capability)


def test_unpacked_weights_reach_the_tensor_core_from_registers() -> None:
    for name in ("mxfp8, one row, parts of K", "experts, few tokens", "experts, many tokens"):
        for launch in launches_of(CALLS[name]):
            if launch.name in ("_mxfp8_narrow_kernel", "_experts_up_kernel", "_experts_down_kernel"):
                text = compile_launch(launch, 90).asm["ttgir"]
                assert "warp_group_dot" in text, f"{launch.name}: no wgmma"
                assert "#ttg.dot_op" in text, f"{launch.name}: the weight passes through shared memory again"


@pytest.mark.parametrize("name", ["experts, shares of 32 columns", "experts, shares of 32 columns, many tokens"])
def test_hidden_values_of_units_are_copied_16_bytes_at_a_time(name: str) -> None:
    # The compiler does not see by itself that 8 columns follow each other; it would load each alone, and wait for it.
    (launch,) = (launch for launch in launches_of(CALLS[name]) if launch.name == "_experts_down_kernel")
    copies = [line for line in compile_launch(launch, 90).asm["ttgir"].splitlines() if "async_copy_global" in line]
    assert any("xbf16" in line and "contiguity = 8" in line for line in copies), "\n".join(copies)


def test_every_tile_has_the_rows_and_warps_of_wgmma() -> None:
    tables = (tiling.MXFP8_TILES, tiling.MXFP8_SPLIT_TILES, tiling.EXPERT_TILES, tiling.EXPERT_DOWN_TILES)
    for table in tables:
        for _, tile in table:
            assert tile.columns >= 64
            assert tile.num_warps >= 4
    assert [limit for limit, _ in tiling.PLAIN_LARGE_TILES] == [limit for limit, _ in tiling.PLAIN_TILES]
    for (up_limit, up), (down_limit, down) in zip(tiling.EXPERT_TILES, tiling.EXPERT_DOWN_TILES, strict=True):
        assert (up_limit, up.rows) == (down_limit, down.rows), "one routing serves both products"
