"""Log-softmax on the device, at the width of the vocabulary."""

import torch

from deepinfer_kernels.log_softmax import log_softmax, log_sum_exp, token_log_softmax
from deepinfer_kernels.log_softmax.reference import ABSOLUTE_TOLERANCE, make_inputs
from deepinfer_kernels.row_testing import NEEDS_GPU, assert_graph_gives_eager_bits
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close

pytestmark = NEEDS_GPU


def test_rows_keep_their_bits_and_agree_with_double_precision() -> None:
    logits = make_inputs(70, 129280, torch.Generator().manual_seed(3), "cuda")
    batch = log_softmax(logits)
    alone = torch.cat([log_softmax(logits[t : t + 1]) for t in range(70)])
    assert_bitwise_equal(alone, batch, "each row alone")
    assert_close(batch, logits.double().log_softmax(dim=1).float(), ABSOLUTE_TOLERANCE, "log_softmax")
    ids = torch.randint(0, 129280, (70, 5), device="cuda")
    assert_bitwise_equal(token_log_softmax(logits, ids), batch.gather(1, ids), "chosen ids")
    want = logits.double().logsumexp(dim=1).float()
    assert_close(log_sum_exp(logits), want, 2 * ABSOLUTE_TOLERANCE, "log_sum_exp")
    assert_graph_gives_eager_bits(lambda: log_softmax(logits), "log_softmax")


def test_rows_without_finite_logits_and_with_nan() -> None:
    logits = make_inputs(4, 20000, torch.Generator().manual_seed(4), "cuda")
    logits[0, 8192:16384] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 17] = float("nan")
    got = log_softmax(logits)
    assert bool((got[1] == -torch.inf).all())
    assert bool(got[2][logits[2] != -torch.inf].isnan().all())
    assert bool(got[[0, 3]].isfinite().any())
