"""On the device: the router's row keeps its bits in any batch, and never names an expert that does not exist."""

import pytest
import torch

from deepinfer_kernels.moe_gate import moe_gate
from deepinfer_kernels.moe_gate.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]


def test_every_row_keeps_its_bits_in_any_batch() -> None:
    x, weight, bias, _ = make_inputs(4097, 5120, 384, torch.bfloat16, torch.Generator().manual_seed(51), "cuda")
    idx, weights = moe_gate(x, weight, bias, top_k=6, scaling=1.5)
    for size in (1, 2, 16, 17, 64, 65, 129, 1024, 1025):
        for rows in (slice(0, size), slice(4097 - size, None)):
            got_idx, got_weights = moe_gate(x[rows], weight, bias, top_k=6, scaling=1.5)
            assert_bitwise_equal(got_idx, idx[rows], f"experts of {size} rows")
            assert_bitwise_equal(got_weights, weights[rows], f"weights of {size} rows")


def test_choice_and_weights_agree_with_double_precision() -> None:
    x, weight, bias, _ = make_inputs(300, 5120, 384, torch.bfloat16, torch.Generator().manual_seed(52), "cuda")
    idx, weights = moe_gate(x, weight, bias, top_k=6, scaling=1.5)
    scores = torch.nn.functional.softplus(x.double() @ weight.double().t()).sqrt()
    ranked = (scores + bias).sort(dim=1, descending=True)
    clear = (ranked.values[:, 5] - ranked.values[:, 6]) > 1e-5
    want = ranked.indices[:, :6].sort(dim=1).values
    assert int(clear.sum()) > 290
    assert torch.equal(idx[clear].long(), want[clear])
    chosen = scores.gather(1, want)
    want_weights = chosen / chosen.sum(dim=1, keepdim=True) * 1.5
    assert float((weights - want_weights)[clear].abs().max()) < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_rows_of_any_content_choose_experts_that_exist(value: float) -> None:
    x, weight, bias, _ = make_inputs(3, 256, 384, torch.bfloat16, torch.Generator().manual_seed(53), "cuda")
    x[1] = value
    idx, _ = moe_gate(x, weight, bias, top_k=6, scaling=1.5)
    assert bool((idx >= 0).all())
    assert bool((idx < 384).all())
    assert bool((idx[:, 1:] > idx[:, :-1]).all())
