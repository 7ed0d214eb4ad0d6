"""The table of trusted operations, and the check that refuses the rest."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from deepinfer_batch_invariant.aten import PROOFS, Kind
from deepinfer_batch_invariant.gaps import GapRecorder, InvarianceGapError, check_forward
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.row_tiles import tiled_matmul

MEASURED = sorted(name for name, proof in PROOFS.items() if proof.kind is Kind.MEASURED and not name.endswith("_"))


def _inputs(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(count, generator=generator, dtype=dtype) * 8 + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_operation_gives_an_element_its_bits_at_any_place_of_any_buffer(
    name: str, dtype: torch.dtype
) -> None:
    """The sampler's noise is a logarithm in fp64; everything else is fp32."""
    operation: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, name)
    values = _inputs(97, dtype)
    alone = torch.stack([operation(values[i : i + 1])[0] for i in range(97)])
    for offset in range(0, 40):
        buffer = torch.cat((torch.full((offset,), 3.0, dtype=dtype), values))
        assert torch.equal(operation(buffer)[offset:], alone), f"{name} at offset {offset}"


def test_the_test_above_would_find_sigmoid_whose_bits_follow_the_place_in_the_buffer() -> None:
    values = torch.randn(4097, generator=torch.Generator().manual_seed(7)) * 4
    alone = torch.stack([torch.sigmoid(value[None])[0] for value in values])
    assert not torch.equal(torch.sigmoid(values), alone)
    assert "sigmoid" not in PROOFS


def test_a_forward_of_proven_operations_passes_and_counts_them() -> None:
    x, weight = torch.ones(5, 48), torch.ones(48)
    assert check_forward(lambda: tiled_matmul(rms_norm(x, weight, 1e-6), torch.ones(7, 48)), label="the test") > 3


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: torch.sigmoid(torch.ones(3)), "sigmoid is not in the table"),
        (lambda: functional.softplus(torch.ones(3)), "softplus is not in the table"),
        (lambda: torch.ones(3, 32) @ torch.ones(32, 4), "mm multiplies 3 rows of depth 32"),
        (lambda: torch.mm(torch.ones(16, 33), torch.ones(33, 4)), "mm multiplies 16 rows of depth 33"),
        (lambda: torch.bmm(torch.ones(2, 3, 5), torch.ones(2, 5, 3)), "bmm has depth 5"),
        (lambda: torch.ones(3, 4).sum(dim=0), r"sum sums axes \[0\]"),
        (lambda: torch.ones(3, 4).cumsum(dim=1), "cumsum adds up torch.float32, expected integers"),
        (lambda: torch.ones(3, 4).logsumexp(dim=1), "logsumexp is not in the table"),
    ],
)
def test_an_unproven_call_stops_the_start_and_is_named(run: Callable[[], object], words: str) -> None:
    with pytest.raises(InvarianceGapError, match=words):
        check_forward(run, label="the test")


def test_sums_of_integers_need_no_proof() -> None:
    with GapRecorder() as recorder:
        torch.ones(3, 4, dtype=torch.int64).sum(dim=0)
        torch.ones(3, 4, dtype=torch.int64).cumsum(dim=1)
        torch.ones(3, 4, dtype=torch.bool).sum(dim=1)
    assert recorder.gaps == set()


def test_a_pass_that_runs_nothing_proves_nothing() -> None:
    with pytest.raises(InvarianceGapError, match="ran 0 operations"):
        check_forward(lambda: None, label="an empty pass")
