"""Mix coefficients against the golden vectors, the example of the specification, and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_sinkhorn import hc_sinkhorn
from deepinfer_kernels.hc_sinkhorn.reference import TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    require_golden,
)

_NAMES = ("pre", "post", "comb")


def _joined(mix_logits: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in hc_sinkhorn(mix_logits, scale, base, iters=20, eps=1e-6)], dim=1)


def _inputs(num_rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, 4, device, torch.Generator().manual_seed(17))


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("case", ["zero", "base", "full"])
def test_coefficients_agree_with_the_golden_vectors(case: str, name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    base = torch.zeros(24, device=device) if case == "zero" else golden["mhc.base.base"]
    mix_logits = golden["mhc.full.mix"] if case == "full" else golden["mhc.mix"]
    got = hc_sinkhorn(mix_logits, golden["mhc.scale"], base, iters=20, eps=1e-6)
    for label, part in zip(_NAMES, got, strict=True):
        assert_close(part, golden[f"mhc.{case}.{label}"], TOLERANCE_FP32, label)


def test_example_of_the_specification_gives_its_numbers(device: str) -> None:
    mix_logits = torch.sin(1.7 * torch.arange(24.0)).unsqueeze(0).to(device)
    scale, base = torch.tensor([1.0, 0.5, 2.0], device=device), torch.zeros(24, device=device)
    pre, post, comb = hc_sinkhorn(mix_logits, scale, base, iters=20, eps=1e-6)
    assert_close(pre, torch.tensor([[0.500001, 0.729418, 0.436461, 0.283776]]), 1e-6, "pre")
    assert_close(post, torch.tensor([[1.122904, 1.197012, 0.826795, 0.846684]]), 1e-6, "post")
    want = torch.tensor(
        [
            [0.228056, 0.589508, 0.133751, 0.048685],
            [0.386272, 0.274302, 0.167482, 0.171944],
            [0.282237, 0.098248, 0.253400, 0.366114],
            [0.103435, 0.037941, 0.445366, 0.413256],
        ]
    )
    assert_close(comb, want.unsqueeze(0), 1e-6, "comb")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_columns_sum_to_one(num_rows: int, device: str) -> None:
    _, _, comb = hc_sinkhorn(*_inputs(num_rows, device), iters=20, eps=1e-6)
    assert comb.shape == (num_rows, 4, 4)
    assert_close(comb.sum(1), torch.ones(num_rows, 4), 1e-4, "columns")


def test_one_iteration_less_is_another_result(device: str) -> None:
    arguments = _inputs(4, device)
    twenty, nineteen = (hc_sinkhorn(*arguments, iters=iters, eps=1e-6)[2] for iters in (20, 19))
    assert bool((twenty != nineteen).any())


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    mix_logits, scale, base = _inputs(61, device)
    assert_rows_keep_their_bits(lambda rows: _joined(mix_logits[rows], scale, base), 61, "hc_sinkhorn")


def test_strided_input_gives_the_same_bits(device: str) -> None:
    mix_logits, scale, base = _inputs(40, device)
    got = _joined(mix_logits.t().contiguous().t(), scale, base)
    assert_bitwise_equal(got, _joined(mix_logits, scale, base), "column-major")


def test_nan_in_one_row_stays_there(device: str) -> None:
    mix_logits, scale, base = _inputs(20, device)
    want = _joined(mix_logits, scale, base)
    mix_logits[3] = float("nan")
    got = _joined(mix_logits, scale, base)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    mix_logits, scale, base = _inputs(2, device)
    with pytest.raises(ShapeError, match=r"^hc_sinkhorn: mix_logits is \[2, 23\], expected a width of"):
        hc_sinkhorn(mix_logits[:, :23], scale, base, iters=20, eps=1e-6)
    with pytest.raises(ShapeError, match=r"^hc_sinkhorn: base is \[23\], expected \[24\]; one value per mix logit"):
        hc_sinkhorn(mix_logits, scale, base[:23], iters=20, eps=1e-6)
    with pytest.raises(UnsupportedError, match=r"^hc_sinkhorn: scale is torch.bfloat16, expected torch.float32;"):
        hc_sinkhorn(mix_logits, scale.bfloat16(), base, iters=20, eps=1e-6)
    with pytest.raises(UnsupportedError, match=r"^hc_sinkhorn: iters is 0, expected >= 1;"):
        hc_sinkhorn(mix_logits, scale, base, iters=0, eps=1e-6)
