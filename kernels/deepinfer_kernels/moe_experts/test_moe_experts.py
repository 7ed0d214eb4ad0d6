"""The routed experts against a plain loop in fp64, at the edges of the row tiles, and row independence in fp32."""

import re
from functools import partial

import pytest
import torch

from deepinfer_kernels import dense_cache
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.moe_experts import moe_experts, reference
from deepinfer_kernels.moe_experts.reference import cut_weights, make_inputs, run_shares
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close, run_interpreted
from deepinfer_kernels.tiling import REFERENCE_ROW_TILE

HIDDEN_SIZE = 96
INTERMEDIATE_SIZE = 64
NUM_EXPERTS = 5
TOP_K = 2
LIMIT = 2.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def inputs(num_tokens: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return make_inputs(num_tokens, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS, dtype, generator, device)


def run(arguments: dict[str, torch.Tensor], *, quantize_input: bool = False, limit: float = LIMIT) -> torch.Tensor:
    return moe_experts(num_shares=1, gather=None, **arguments, limit=limit, quantize_input=quantize_input)


def some_rows(arguments: dict[str, torch.Tensor], rows: slice | torch.Tensor) -> dict[str, torch.Tensor]:
    return {k: v[rows] if k in ("x", "topk_idx", "topk_weights") else v for k, v in arguments.items()}


def rows_alone(arguments: dict[str, torch.Tensor], *, quantize_input: bool = False) -> torch.Tensor:
    num_tokens = arguments["x"].shape[0]
    return torch.cat(
        [run(some_rows(arguments, slice(t, t + 1)), quantize_input=quantize_input) for t in range(num_tokens)]
    )


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 to fp64 by table: low nibble first, bit 3 is the sign."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).cpu()
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64)[codes.long()]
    return values * torch.pow(2.0, scale.cpu().double() - 127).repeat_interleave(32, dim=-1)


def by_hand(arguments: dict[str, torch.Tensor], limit: float) -> torch.Tensor:
    """One token and one expert at a time in fp64, without quantised activations."""
    w13, w2 = decode(arguments["w13"], arguments["w13_scale"]), decode(arguments["w2"], arguments["w2_scale"])
    out = torch.empty(*arguments["topk_idx"].shape, HIDDEN_SIZE, dtype=torch.float64)
    for t, experts in enumerate(arguments["topk_idx"].tolist()):
        for slot, expert in enumerate(experts):
            gate, up = (w13[expert] @ arguments["x"][t].cpu().double()).chunk(2)
            if limit > 0:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = gate * torch.sigmoid(gate) * up * arguments["topk_weights"][t, slot].item()
            out[t, slot] = w2[expert] @ h
    return out


@pytest.mark.parametrize("limit", [0.0, LIMIT])
def test_each_slot_holds_the_output_of_its_expert(limit: float, device: str) -> None:
    arguments = inputs(23, device)
    want = by_hand(arguments, limit)
    got = run(arguments, limit=limit)
    assert_close(got.cpu().double() / want.abs().max(), want / want.abs().max(), 1e-6, label="experts")
    if limit > 0:
        assert not torch.allclose(want, by_hand(arguments, 0.0)), "the clamp never acted"


def test_quantised_inputs_are_the_fake_quantised_ones(device: str) -> None:
    arguments = inputs(9, device)
    got = run(arguments, quantize_input=True)
    assert not torch.equal(got, run(arguments))
    # Quantising a quantised x changes nothing, so only x differs from the call above.
    arguments["x"] = mxfp8_fake_quant(arguments["x"])
    assert_bitwise_equal(run(arguments, quantize_input=True), got, label="x quantised before")


@pytest.mark.parametrize("quantize_input", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 40])
def test_every_row_keeps_its_bits_in_any_batch(num_tokens: int, quantize_input: bool, device: str) -> None:
    arguments = inputs(num_tokens, device)
    batch = run(arguments, quantize_input=quantize_input)
    assert batch.shape == (num_tokens, TOP_K, HIDDEN_SIZE)
    if num_tokens > 0:
        alone = rows_alone(arguments, quantize_input=quantize_input)
        assert_bitwise_equal(batch, alone, label=f"{num_tokens} rows in one batch")


@pytest.mark.parametrize("num_tokens", [REFERENCE_ROW_TILE - 1, REFERENCE_ROW_TILE, REFERENCE_ROW_TILE + 1])
def test_rows_keep_their_bits_where_all_choose_the_same_experts(num_tokens: int, device: str) -> None:
    arguments = inputs(num_tokens, device)
    arguments["topk_idx"][:] = torch.tensor([1, 3], dtype=torch.int32, device=device)
    assert_bitwise_equal(run(arguments), rows_alone(arguments), label=f"{num_tokens} rows of one expert")


def test_the_order_of_the_rows_changes_no_row(device: str) -> None:
    arguments = inputs(37, device)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(8)).to(device)
    assert_bitwise_equal(run(some_rows(arguments, order)), run(arguments)[order], label="rows in another order")


def test_the_invariance_test_sees_products_without_row_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(40, "cpu")
    monkeypatch.setattr(reference, "tiled_matmul", lambda x, w: x @ w.t())
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(run(arguments), rows_alone(arguments), label="planted fault")


def test_what_is_remembered_changes_no_bit(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    arguments = inputs(21, device)
    want = run(arguments)
    assert_bitwise_equal(run(arguments), want, label="remembered")
    calls: list[int] = []

    def counted(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        calls.append(packed.dim())
        return mxfp4_dequant(packed, scale, dtype)

    monkeypatch.setattr(reference, "mxfp4_dequant", counted)
    run(arguments)
    assert calls == [], "the weights were not remembered"
    monkeypatch.setattr(reference, "DENSE_STACK_BYTES", 0)
    assert_bitwise_equal(run(arguments), want, label="one expert at a time")
    experts_present = len(set(arguments["topk_idx"].flatten().tolist()))
    assert calls == [2] * (2 * experts_present)


def test_a_full_cache_changes_no_bit(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    arguments = inputs(21, device)
    want = run(arguments)
    monkeypatch.setattr(dense_cache, "_budget_bytes", 0)
    fresh = {name: tensor.clone() for name, tensor in arguments.items()}
    assert_bitwise_equal(run(fresh), want, label="nothing remembered")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_rows_give_the_bits_of_contiguous_ones(dtype: torch.dtype, device: str) -> None:
    arguments = some_rows(inputs(20, device, dtype), slice(None, None, 2))
    assert not arguments["x"].is_contiguous()
    contiguous = {name: tensor.contiguous() for name, tensor in arguments.items()}
    got = run(arguments, quantize_input=True)
    assert got.dtype == dtype
    assert_bitwise_equal(got, run(contiguous, quantize_input=True), label="strided")


@pytest.mark.parametrize("quantize_input", [False, True])
def test_nan_in_one_row_stays_there(quantize_input: bool, device: str) -> None:
    arguments = inputs(17, device)
    clean = run(arguments, quantize_input=quantize_input)
    arguments["x"][4] = float("nan")
    got = run(arguments, quantize_input=quantize_input)
    others = torch.arange(17) != 4
    assert_bitwise_equal(got[others], clean[others], label="rows beside the NaN")


def test_nan_in_an_unused_expert_reaches_no_row(device: str) -> None:
    arguments = inputs(17, device)
    arguments["topk_idx"][:] = torch.tensor([0, 4], dtype=torch.int32, device=device)
    clean = run(arguments)
    arguments["w13_scale"][2] = 255
    arguments["w2_scale"][2] = 255
    assert_bitwise_equal(run(arguments), clean, label="expert 2 is NaN")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_shares_side_by_side_have_the_bits_of_the_whole(
    num_ranks: int, num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    # 32, 16 and 8 columns of each rank
    arguments = inputs(num_tokens, device, dtype)
    for quantize in (True,) if device == "cuda" and dtype == torch.float32 else (False, True):
        share = partial(moe_experts, limit=LIMIT, quantize_input=quantize)
        want = run(arguments, quantize_input=quantize)
        assert_bitwise_equal(run_shares(share, arguments, num_ranks), want, label=f"{num_ranks} ranks")


def test_shares_in_another_order_are_seen(device: str) -> None:
    arguments, share = inputs(17, device), partial(moe_experts, limit=LIMIT, quantize_input=True)
    got = run_shares(share, arguments, 2, lambda parts: torch.cat(parts[::-1], dim=1))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(got, run(arguments, quantize_input=True), label="planted fault")


def test_the_kernels_put_shares_together_in_the_interpreter() -> None:
    assert run_interpreted("moe_experts.interpreted_shares").startswith("launches ")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gather": lambda h: h}, "moe_experts: gather made [6, 32] of [6, 32], expected [6, 64], the columns that w2"),
        ({"w2": torch.zeros(5, 96, 32, dtype=torch.uint8)}, "w2 is [5, 96, 32] for rows of 96, expected equal shares"),
        ({"w13": torch.zeros(5, 40, 48, dtype=torch.uint8)}, "w13 is [5, 40, 48] and w2 is [5, 48, 32] for rows of 96"),
        ({"w13": torch.zeros(5, 0, 48, dtype=torch.uint8)}, "w13 is [5, 0, 48] and w2 is [5, 48, 32] for rows of 96"),
        ({"w2_scale": torch.zeros(5, 96, 2, dtype=torch.uint8)}, "w2_scale is [5, 96, 2], expected [5, 48, 2]"),
    ],
)
def test_shares_that_do_not_fit_are_named(change: dict[str, object], text: str) -> None:
    arguments = inputs(3, "cpu")
    names = ("w13", "w13_scale", "w2", "w2_scale")
    cut = dict(zip(names, cut_weights([arguments[name] for name in names], 0, 2), strict=True))
    options: dict[str, object] = {"limit": LIMIT, "quantize_input": True, "gather": lambda h: h.repeat(1, 2)}
    with pytest.raises(ShapeError, match=re.escape(text)):
        moe_experts(**(arguments | cut | options | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("x", lambda t: t[:, :80], "moe_experts: w13 is [5, 128, 48] for rows of 80, expected hidden_size and"),
        ("x", lambda t: t[:, :64], "moe_experts: w13 is [5, 128, 48], expected [5, 128, 32]; x and w13 set it"),
        ("topk_idx", lambda t: t[:2], "moe_experts: topk_idx is [2, 2], expected [3, 2]; one row per row of x"),
        ("topk_weights", lambda t: t[:, :1], "moe_experts: topk_weights is [3, 1], expected [3, 2]"),
        ("w13", lambda t: t[:, :100], "moe_experts: w13 is [5, 100, 48] for rows of 96, expected hidden_size and"),
        ("w13_scale", lambda t: t[..., :2], "moe_experts: w13_scale is [5, 128, 2], expected [5, 128, 3]"),
        ("w2", lambda t: t[:4], "moe_experts: w2 is [4, 96, 32], expected [5, 96, 32]"),
        ("w2_scale", lambda t: t[:, :95], "moe_experts: w2_scale is [5, 95, 2], expected [5, 96, 2]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(name: str, change: object, text: str) -> None:
    arguments = inputs(3, "cpu")
    assert callable(change)
    arguments[name] = change(arguments[name])
    with pytest.raises(ShapeError, match=re.escape(text)):
        run(arguments)


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [
        ("x", torch.float16, "moe_experts: x is torch.float16, expected torch.bfloat16 or torch.float32"),
        ("topk_idx", torch.int64, "moe_experts: topk_idx is torch.int64, expected torch.int32"),
        ("topk_weights", torch.bfloat16, "moe_experts: topk_weights is torch.bfloat16, expected torch.float32"),
        ("w2", torch.int8, "moe_experts: w2 is torch.int8, expected torch.uint8; convert it before the call"),
    ],
)
def test_other_dtypes_are_named(name: str, dtype: torch.dtype, text: str) -> None:
    arguments = inputs(3, "cpu")
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        run(arguments)
