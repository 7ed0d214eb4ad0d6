"""Without a GPU: the TileLang kernels are lowered to CUDA source and compiled for SM90 and SM100."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed")

from deepinfer_kernels import tiling
from deepinfer_kernels.dispatch import (
    TILELANG_OPERATIONS,
    KernelSet,
    choose_kernel_set,
    chosen_kernel_set,
    use_tilelang,
)
from deepinfer_kernels.engram_gate import engram_gate
from deepinfer_kernels.engram_gate.tilelang_kernel import engram_gate_tilelang
from deepinfer_kernels.hc_mix import hc_mix
from deepinfer_kernels.hc_mix.tilelang_kernel import hc_mix_tilelang
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.hc_post.tilelang_kernel import hc_post_tilelang
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.moe_experts.tilelang_kernel import moe_experts_tilelang, weight_row
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.sparse_attention.tilelang_kernel import sparse_attention_tilelang
from deepinfer_kernels.tilelang_compiling import tile_launches_of, to_cuda, to_machine_code, value_of

ROWS, WIDTH, STREAMS, HEADS, HEAD_DIM, PAGE = 3, 5120, 4, 64, 512, 64
FORMATS = (RecordFormat.MXFP8, RecordFormat.NVFP4)


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _attend(num_heads: int, num_lists: int, num_pairs: int) -> None:
    lists = [
        SlotList(
            kv_cache=_zeros(4, PAGE, fmt.record_bytes(HEAD_DIM), dtype=torch.uint8),
            slots=_zeros(ROWS, length, dtype=torch.int64),
            fmt=fmt,
        )
        for fmt, length in zip(FORMATS, (128, 512), strict=True)
    ]
    angles = _zeros(ROWS, num_pairs, dtype=torch.float32) if num_pairs else None
    sink = _zeros(num_heads, dtype=torch.float32)
    q = _zeros(ROWS, num_heads, HEAD_DIM)
    sparse_attention_tilelang(q, lists[:num_lists], sink, HEAD_DIM**-0.5, cos=angles, sin=angles)


def _experts(num_tokens: int, num_shares: int = 1, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Whole, or one share of the outputs of both products."""
    num_experts, hidden_size, intermediate, byte = 8, 5120, 2304, torch.uint8
    own, outputs = intermediate // num_shares, hidden_size // num_shares
    moe_experts_tilelang(
        _zeros(num_tokens, hidden_size, dtype=dtype),
        _zeros(num_tokens, 6, dtype=torch.int32),
        _zeros(num_tokens, 6, dtype=torch.float32),
        _zeros(num_experts, 2 * own, hidden_size // 2, dtype=byte),
        _zeros(num_experts, 2 * own, hidden_size // 32, dtype=byte),
        _zeros(num_experts, outputs, intermediate // 2, dtype=byte),
        _zeros(num_experts, outputs, intermediate // 32, dtype=byte),
        None,
        limit=10.0,
        quantize_input=True,
        gather=None if num_shares == 1 else lambda h: h.repeat(1, num_shares),
    )


def _gate(dtype: torch.dtype) -> None:
    streams, weight = _zeros(ROWS, STREAMS, WIDTH, dtype=dtype), _zeros(STREAMS, WIDTH)
    flags = _zeros(ROWS, dtype=torch.bool)
    engram_gate_tilelang(streams, streams, _zeros(ROWS, WIDTH, dtype=dtype), weight, weight, 1e-20, flags)


def _post(width: int) -> None:
    fp32 = torch.float32
    comb = _zeros(ROWS, STREAMS, STREAMS, dtype=fp32)
    hc_post_tilelang(_zeros(ROWS, width), _zeros(ROWS, STREAMS, width), _zeros(ROWS, STREAMS, dtype=fp32), comb)


CALLS: dict[str, Callable[[], object]] = {
    "attention over window and entries": lambda: _attend(HEADS, 2, 32),
    "experts, few tokens": lambda: _experts(4),
    "experts, many tokens": lambda: _experts(2000),
    "experts, shares of whole blocks": lambda: _experts(4, 2),
    "experts, shares of 32 columns": lambda: _experts(4, 8),
    "experts, small shares": lambda: _experts(4, 16, dtype=torch.float32),
    "Engram gate": lambda: _gate(torch.bfloat16),
    "streams": lambda: _post(WIDTH),
    "mix logits": lambda: hc_mix_tilelang(_zeros(ROWS, STREAMS, WIDTH), _zeros(24, 20480, dtype=torch.float32), 1e-20),
}
# Products on the tensor cores: wgmma of SM90; on SM100, where results stay in registers, mma.sync.
INSTRUCTION = {90: "tl::wgmma_ss<", 100: "tl::mma_sync<"}


# Other tiles and shares of the experts differ in no instruction of the target: one target is enough.
ON_SM100 = tuple(name for name in CALLS if name.startswith("experts") and name != "experts, few tokens")
CASES = [(name, target) for name in CALLS for target in INSTRUCTION if target == 100 or name not in ON_SM100]


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_kernels_compile(name: str, capability: int) -> None:
    launches = tile_launches_of(CALLS[name])
    assert launches, "the call launched nothing"
    for launch in launches:
        source = to_cuda(launch, capability)
        if name.startswith(("attention", "experts")):
            assert INSTRUCTION[capability] in source, launch.name
        # TileLang takes (a + b) - b for a, and would round nothing. Small shares are rounded behind their exchange.
        if launch.name == "experts_up_kernel" and name != "experts, small shares":
            assert "__fsub_rn(__fadd_rn(" in source, "hidden values are not rounded to MXFP8"
        assert len(to_machine_code(source, capability)) > 1000, launch.name


def test_importing_the_operations_does_not_load_tilelang() -> None:
    code = (
        "import sys, deepinfer_kernels.sparse_attention, deepinfer_kernels.moe_experts, deepinfer_kernels.hc_post,"
        "deepinfer_kernels.engram_gate, deepinfer_kernels.hc_mix; sys.exit(str('tilelang' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.stderr.strip() == "False", result.stderr


def _public(op: str) -> None:
    """Call the public function of an operation, so that it must choose."""
    fp32, streams, y = torch.float32, _zeros(ROWS, STREAMS, WIDTH), _zeros(ROWS, WIDTH)
    if op == "hc_mix":
        hc_mix(streams, _zeros(24, STREAMS * WIDTH, dtype=fp32), 1e-20)
    elif op == "hc_post":
        hc_post(y, streams, _zeros(ROWS, STREAMS, dtype=fp32), _zeros(ROWS, STREAMS, STREAMS, dtype=fp32))
    else:
        engram_gate(streams, streams, y, _zeros(STREAMS, WIDTH), _zeros(STREAMS, WIDTH), 1e-20)


@pytest.mark.parametrize("op", ["engram_gate", "hc_mix", "hc_post"])
def test_a_public_function_launches_the_chosen_kernels(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert op in TILELANG_OPERATIONS
    assert tile_launches_of(lambda: _public(op)) == []
    monkeypatch.setattr(f"deepinfer_kernels.{op}.use_tilelang", lambda x: True)
    names = [launch.name for launch in tile_launches_of(lambda: _public(op))]
    assert names, "no TileLang kernel was launched"
    assert all(name.startswith(op) for name in names)


def test_the_cpu_keeps_its_references_whatever_is_chosen() -> None:
    before = chosen_kernel_set()
    try:
        choose_kernel_set(KernelSet.TILELANG)
        assert chosen_kernel_set() is KernelSet.TILELANG
        assert not use_tilelang(_zeros(1))
    finally:
        choose_kernel_set(before)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 160, 5120])
def test_a_tile_of_the_experts_loads_no_row_behind_the_weight(width: int) -> None:
    """The last expert ends where its tensor ends: with 64 outputs a tile once read 64 rows behind it."""
    half, columns = tiling.EXPERT_TILELANG_COLUMNS // 2, tiling.EXPERT_TILELANG_COLUMNS
    for first in range(0, width, columns):  # the second product: 128 outputs in a row
        rows = [value_of(weight_row(row, first, first + half, width, width)) for row in range(columns)]
        assert rows == [min(first + row, width - 1) for row in range(columns)]
    for first in range(0, width, half):  # the first one: 64 gate rows, and the up rows of the same outputs
        rows = [value_of(weight_row(row, first, width + first, width, 2 * width)) for row in range(columns)]
        gate = [min(first + row, width - 1) for row in range(half)]
        assert rows == [*gate, *(width + row for row in gate)]
