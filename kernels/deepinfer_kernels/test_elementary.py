"""The elementary functions of the sampler: error against fp64 and exact arithmetic, and the same bits in any buffer."""

import math
from decimal import Decimal, localcontext

import pytest
import torch

from deepinfer_kernels.elementary import exp_nonpositive, log_positive
from deepinfer_kernels.testing import assert_bitwise_equal


def test_exp_lies_within_two_units_of_the_last_place() -> None:
    generator = torch.Generator().manual_seed(1)
    x = -torch.rand(200_000, generator=generator) * torch.tensor([1.0, 30.0, 87.0, 1e-4]).repeat(50_000)
    want = torch.exp(x.double())
    error = (exp_nonpositive(x).double() - want).abs() / want
    assert error.max().item() < 2 * 2.0**-24


def test_exp_at_its_edges() -> None:
    x = torch.tensor([0.0, -0.0, -torch.inf, -87.0, -87.01, -1e30, -1e-45])
    got = exp_nonpositive(x).tolist()
    assert got[:3] == [1.0, 1.0, 0.0]
    assert got[3] == pytest.approx(math.exp(-87.0), rel=1e-6)
    assert got[4:] == [0.0, 0.0, 1.0]


def test_log_lies_within_two_units_of_the_last_place() -> None:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, 1 << 32, (3000,), generator=generator).double()
    uniform = (words + 0.5) * 2.0**-32
    edges = [0.5 * 2.0**-32, 1.0 - 0.5 * 2.0**-32, 0.5, math.sqrt(0.5), math.sqrt(2.0), 1.0, 22.9, 1e-10, 1e300, 1e-300]
    x = torch.cat((uniform, torch.tensor(edges, dtype=torch.float64)))
    with localcontext() as context:
        context.prec = 40
        for value, got in zip(x.tolist(), log_positive(x).tolist(), strict=True):
            want = Decimal(value).ln()
            assert abs(Decimal(got) - want) <= abs(want) * Decimal(2.0**-51), value


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33, 1000])
def test_bits_do_not_follow_the_place_in_the_buffer(size: int, device: str) -> None:
    x = (-torch.rand(1000, generator=torch.Generator().manual_seed(3)) * 20).to(device)
    y = -x.double()
    for start in (0, 1, 1000 - size):
        part = slice(start, start + size)
        assert_bitwise_equal(exp_nonpositive(x[part].clone()), exp_nonpositive(x)[part], "exp")
        assert_bitwise_equal(log_positive(y[part].clone()), log_positive(y)[part], "log")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False")
def test_both_devices_give_the_same_bits() -> None:
    x = -torch.rand(100_000, generator=torch.Generator().manual_seed(4)) * 90
    assert_bitwise_equal(exp_nonpositive(x.cuda()).cpu(), exp_nonpositive(x), "exp")
    y = -x.double() + 1e-9
    assert_bitwise_equal(log_positive(y.cuda()).cpu(), log_positive(y), "log")
