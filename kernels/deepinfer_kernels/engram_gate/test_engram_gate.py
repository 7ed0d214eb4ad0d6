"""The Engram gate against the golden vectors, at the edges, and row independence in fp32."""

import re

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.engram_gate import engram_gate, reference
from deepinfer_kernels.engram_gate.reference import TOLERANCE, make_inputs
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close, require_golden

EPS = 1e-20
HIDDEN_SIZE = 97  # no multiple of any vector width
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(num_tokens: int, dtype: torch.dtype, device: str) -> Inputs:
    return make_inputs(num_tokens, 4, HIDDEN_SIZE, dtype, torch.Generator().manual_seed(4), device)


def rows_alone(arguments: Inputs) -> torch.Tensor:
    streams, key, value, q_weight, k_weight = arguments
    return torch.cat(
        [
            engram_gate(streams[t : t + 1], key[t : t + 1], value[t : t + 1], q_weight, k_weight, EPS)
            for t in range(streams.shape[0])
        ]
    )


@pytest.mark.parametrize("file", ["a", "b"])
def test_the_golden_output_in_bf16(file: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{file}.safetensors"), device=device)
    x, key, value, q_weight, k_weight = (
        golden[f"engram.gate.{name}"] for name in ("x", "key", "value", "q_weight", "k_weight")
    )
    got = engram_gate(x, key, value, q_weight, k_weight, EPS)
    if device == "cpu":
        assert_bitwise_equal(got, golden["engram.gate.out"], label="out")
    assert_close(got.float(), golden["engram.gate.out"].float(), 2**-5, label="out")


@pytest.mark.parametrize("file", ["a", "b"])
def test_the_golden_gate_in_fp32(file: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{file}.safetensors"), device=device)
    assert bool((golden["engram.gate.u"] == 0).any())
    x, key = golden["engram.gate.x"].float(), golden["engram.gate.key"].float()
    ones = torch.ones(x.shape[0], x.shape[2], device=device)
    got = engram_gate(x, key, ones, golden["engram.gate.q_weight"], golden["engram.gate.k_weight"], EPS)
    want = x + golden["engram.gate.g"][:, :, None]
    assert_close(got, want, TOLERANCE, label="x + gate")


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_every_row_keeps_its_bits_in_any_batch(num_tokens: int, device: str) -> None:
    arguments = inputs(num_tokens, torch.float32, device)
    batch = engram_gate(*arguments, EPS)
    assert batch.shape == (num_tokens, 4, HIDDEN_SIZE)
    if num_tokens > 0:
        assert_bitwise_equal(batch, rows_alone(arguments), label=f"{num_tokens} rows in one batch")


def test_the_invariance_test_sees_a_sigmoid_that_depends_on_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(64, torch.float32, "cpu")
    monkeypatch.setattr(reference, "sigmoid", torch.sigmoid)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(engram_gate(*arguments, EPS), rows_alone(arguments), label="planted fault")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_inputs_give_the_bits_of_contiguous_ones(dtype: torch.dtype, device: str) -> None:
    streams, key, value, q_weight, k_weight = inputs(18, dtype, device)
    x, k, v = streams[::2], key[1::2], value[::2]
    got = engram_gate(x, k, v, q_weight, k_weight, EPS)
    want = engram_gate(x.contiguous(), k.contiguous(), v.contiguous(), q_weight, k_weight, EPS)
    assert_bitwise_equal(got, want, label="strided rows")
    transposed = streams.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    got = engram_gate(transposed, key, value, q_weight, k_weight, EPS)
    assert_bitwise_equal(got, engram_gate(streams, key, value, q_weight, k_weight, EPS), label="strided columns")


def test_nan_in_one_row_stays_there(device: str) -> None:
    arguments = inputs(17, torch.float32, device)
    clean = engram_gate(*arguments, EPS)
    for tensor in arguments[:3]:
        tensor[6] = float("nan")
    got = engram_gate(*arguments, EPS)
    assert bool(got[6].isnan().all())
    others = torch.arange(17) != 6
    assert_bitwise_equal(got[others], clean[others], label="rows beside the NaN")


def test_image_rows_are_returned_unchanged(device: str) -> None:
    streams, key, value, q_weight, k_weight = inputs(9, torch.bfloat16, device)
    is_image = torch.arange(9, device=device) % 3 == 1
    streams[1, 0, 0] = -0.0
    value[4] = float("nan")
    got = engram_gate(streams, key, value, q_weight, k_weight, EPS, is_image)
    plain = engram_gate(streams, key, value, q_weight, k_weight, EPS)
    assert_bitwise_equal(got[is_image], streams[is_image], label="image rows")
    assert_bitwise_equal(got[~is_image], plain[~is_image], label="text rows")


def test_a_zero_row_opens_the_gate_by_the_floor_of_the_square_root(device: str) -> None:
    streams, key, value, q_weight, k_weight = inputs(2, torch.float32, device)
    streams[0] = 0
    got = engram_gate(streams, key, value, q_weight, k_weight, EPS)[0]
    gate = 1 / (1 + torch.exp(torch.tensor(-1e-3, device=device)))
    assert_close(got, (gate * value[0]).expand(4, -1), 1e-6, label="zero row")


def test_arguments_that_do_not_fit_are_named() -> None:
    streams, key, value, q_weight, k_weight = inputs(3, torch.float32, "cpu")
    with pytest.raises(ShapeError, match=re.escape("engram_gate: streams is [4, 97], expected 3 axes")):
        engram_gate(streams[0], key, value, q_weight, k_weight, EPS)
    with pytest.raises(ShapeError, match=re.escape("engram_gate: key is [2, 4, 97], expected [3, 4, 97]")):
        engram_gate(streams, key[:2], value, q_weight, k_weight, EPS)
    with pytest.raises(ShapeError, match=re.escape("engram_gate: value is [3, 96], expected [3, 97]")):
        engram_gate(streams, key, value[:, :96], q_weight, k_weight, EPS)
    with pytest.raises(ShapeError, match=re.escape("engram_gate: k_weight is [3, 97], expected [4, 97]")):
        engram_gate(streams, key, value, q_weight, k_weight[:3], EPS)
    with pytest.raises(UnsupportedError, match=re.escape("engram_gate: is_image is torch.int64, expected torch.bool")):
        engram_gate(streams, key, value, q_weight, k_weight, EPS, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match=re.escape("engram_gate: streams is torch.float16, expected")):
        engram_gate(streams.half(), key, value, q_weight, k_weight, EPS)
    with pytest.raises(UnsupportedError, match=re.escape("engram_gate: value is torch.bfloat16, expected torch.float")):
        engram_gate(streams, key, value.bfloat16(), q_weight, k_weight, EPS)
