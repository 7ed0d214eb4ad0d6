"""The router against the golden vectors, its ties, and row independence in fp32."""

import re

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.moe_gate import moe_gate, reference
from deepinfer_kernels.moe_gate.reference import TOLERANCE, make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close, require_golden

HIDDEN_SIZE = 96
NUM_EXPERTS = 21  # no multiple of any vector width
TOP_K = 6


def inputs(num_tokens: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return make_inputs(num_tokens, HIDDEN_SIZE, NUM_EXPERTS, dtype, torch.Generator().manual_seed(5), device)


def route(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return moe_gate(x, weight, bias, top_k=TOP_K, scaling=1.5)


def rows_alone(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [route(x[t : t + 1], weight, bias) for t in range(x.shape[0])]
    return torch.cat([idx for idx, _ in parts]), torch.cat([weights for _, weights in parts])


@pytest.mark.parametrize("file", ["a", "b"])
def test_the_golden_choices_and_weights(file: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{file}.safetensors"), device=device)
    is_image = golden["gate.is_image"].bool()
    assert is_image.any()
    assert not is_image.all()
    # With the identity as weight the product is the recorded logits.
    idx, weights = moe_gate(
        golden["gate.logits"],
        torch.eye(16, device=device),
        golden["gate.bias"],
        top_k=6,
        scaling=1.5,
        bias_image=golden["gate.bias_vl"],
        is_image=is_image,
    )
    want_idx, order = golden["gate.experts"].sort(dim=1)  # stored by score
    assert_bitwise_equal(idx, want_idx, label="experts")
    assert_close(weights, golden["gate.weights"].gather(1, order), TOLERANCE, label="weights")


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 33])
def test_every_row_keeps_its_bits_in_any_batch(num_tokens: int, device: str) -> None:
    x, weight, bias, _ = inputs(num_tokens, device)
    idx, weights = route(x, weight, bias)
    assert idx.shape == weights.shape == (num_tokens, TOP_K)
    assert idx.dtype == torch.int32
    assert weights.dtype == torch.float32
    if num_tokens > 0:
        idx_alone, weights_alone = rows_alone(x, weight, bias)
        assert_bitwise_equal(idx, idx_alone, label="experts")
        assert_bitwise_equal(weights, weights_alone, label="weights")


def test_the_invariance_test_sees_a_softplus_that_depends_on_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, _ = inputs(64, "cpu")
    monkeypatch.setattr(reference, "softplus", torch.nn.functional.softplus)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(route(x, weight, bias)[1], rows_alone(x, weight, bias)[1], label="planted fault")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_rows_give_the_bits_of_contiguous_ones(dtype: torch.dtype, device: str) -> None:
    x, weight, bias, _ = inputs(20, device, dtype)
    strided = x.repeat_interleave(2, dim=1)[::2, ::2]
    assert not strided.is_contiguous()
    for got, want, name in zip(
        route(strided, weight, bias), route(strided.contiguous(), weight, bias), ("experts", "weights"), strict=True
    ):
        assert_bitwise_equal(got, want, label=name)


def test_nan_in_one_row_stays_there(device: str) -> None:
    x, weight, bias, _ = inputs(17, device)
    clean_idx, clean_weights = route(x, weight, bias)
    x[3] = float("nan")
    idx, weights = route(x, weight, bias)
    others = torch.arange(17) != 3
    assert bool(weights[3].isnan().all())
    assert_bitwise_equal(idx[others], clean_idx[others], label="experts beside the NaN")
    assert_bitwise_equal(weights[others], clean_weights[others], label="weights beside the NaN")


def test_equal_scores_go_to_the_lower_id(device: str) -> None:
    x = torch.zeros(5, 4, device=device)
    bias = torch.zeros(9, device=device)
    bias[7] = 1.0
    idx, weights = moe_gate(x, torch.ones(9, 4, device=device), bias, top_k=3, scaling=1.5)
    assert idx.tolist() == [[0, 1, 7]] * 5
    assert_close(weights, torch.full_like(weights, 0.5), 1e-6, label="equal scores without the bias")


def test_the_bias_chooses_and_does_not_weigh(device: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0], device=device)
    idx, weights = moe_gate(logits, torch.eye(4, device=device), bias, top_k=2, scaling=2.0)
    scores = torch.nn.functional.softplus(logits[0, [0, 3]]).sqrt()
    assert idx.tolist() == [[0, 3]]
    assert_close(weights[0], 2 * scores / scores.sum(), 1e-6, label="weights")


def test_with_one_expert_the_score_is_not_normalised(device: str) -> None:
    logits = torch.tensor([[25.0, 1.0], [0.5, 2.0]], device=device)
    idx, weights = moe_gate(logits, torch.eye(2, device=device), torch.zeros(2, device=device), top_k=1, scaling=1.5)
    want = 1.5 * torch.nn.functional.softplus(torch.tensor([[25.0], [2.0]], device=device)).sqrt()
    assert idx.tolist() == [[0], [1]]
    assert_close(weights, want, 1e-6, label="weights")


def test_logits_of_any_size_give_finite_weights(device: str) -> None:
    logits = torch.tensor([[1e30, 200.0, 20.0, -1e30, -200.0, 21.0], [-1e30] * 6], device=device)
    idx, weights = moe_gate(logits, torch.eye(6, device=device), torch.zeros(6, device=device), top_k=3, scaling=1.5)
    assert idx.tolist() == [[0, 1, 5], [0, 1, 2]]
    assert bool(weights.isfinite().all())
    assert weights[1].tolist() == [0.0, 0.0, 0.0]  # all scores underflow; the added 1e-20 keeps 0 / 0 away


def test_image_rows_use_the_image_bias(device: str) -> None:
    x, weight, bias, bias_image = inputs(12, device)
    is_image = torch.arange(12, device=device) % 2 == 0
    idx, weights = moe_gate(x, weight, bias, top_k=TOP_K, scaling=1.5, bias_image=bias_image, is_image=is_image)
    for mask, row_bias in ((is_image, bias_image), (~is_image, bias)):
        want_idx, want_weights = route(x, weight, row_bias)
        assert_bitwise_equal(idx[mask], want_idx[mask], label="experts")
        assert_bitwise_equal(weights[mask], want_weights[mask], label="weights")


def test_arguments_that_do_not_fit_are_named() -> None:
    x, weight, bias, bias_image = inputs(3, "cpu")
    flags = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ShapeError, match=re.escape("moe_gate: weight is [21, 95], expected [21, 96]; its columns")):
        route(x, weight[:, :95], bias)
    with pytest.raises(ShapeError, match=re.escape("moe_gate: bias is [20], expected [21]")):
        route(x, weight, bias[:20])
    with pytest.raises(ShapeError, match=re.escape("moe_gate: is_image is [2], expected [3]")):
        moe_gate(x, weight, bias, top_k=2, scaling=1.5, bias_image=bias_image, is_image=flags[:2])
    with pytest.raises(UnsupportedError, match=re.escape("moe_gate: top_k is 22, expected 1 ... 21")):
        moe_gate(x, weight, bias, top_k=22, scaling=1.5)
    with pytest.raises(UnsupportedError, match=re.escape("moe_gate: bias_image is None, expected bias_image and")):
        moe_gate(x, weight, bias, top_k=2, scaling=1.5, is_image=flags)
    with pytest.raises(UnsupportedError, match=re.escape("moe_gate: is_image is None, expected bias_image and")):
        moe_gate(x, weight, bias, top_k=2, scaling=1.5, bias_image=bias_image)
    with pytest.raises(UnsupportedError, match=re.escape("moe_gate: bias is torch.bfloat16, expected torch.float32")):
        route(x, weight, bias.bfloat16())
    with pytest.raises(UnsupportedError, match=re.escape("moe_gate: x is torch.float16, expected")):
        route(x.half(), weight, bias)
    with pytest.raises(UnsupportedError, match=re.escape("moe_gate: weight is torch.float16, expected")):
        route(x, weight.half(), bias)
