import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.log_softmax import log_softmax, log_sum_exp, token_log_softmax
from deepinfer_kernels.log_softmax.reference import ABSOLUTE_TOLERANCE, make_inputs
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_close, assert_rows_keep_their_bits
from deepinfer_kernels.tiling import LOGSUM_BLOCK, LOGSUM_CHUNK

INF, NAN = float("inf"), float("nan")
VOCABULARIES = (1, LOGSUM_BLOCK - 1, LOGSUM_BLOCK, LOGSUM_BLOCK + 1, 2 * LOGSUM_BLOCK, LOGSUM_CHUNK + 1, 20000)


def _logits(num_rows: int, vocab_size: int, device: str) -> torch.Tensor:
    return make_inputs(num_rows, vocab_size, torch.Generator().manual_seed(3), device)


@pytest.mark.parametrize("vocab_size", [*VOCABULARIES, 129280])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_values_are_those_of_float64(num_rows: int, vocab_size: int, device: str) -> None:
    logits = _logits(num_rows, vocab_size, device)
    exact = torch.log_softmax(logits.double(), dim=1)
    assert_close(log_softmax(logits), exact.float(), ABSOLUTE_TOLERANCE, label="log-softmax")
    total = torch.logsumexp(logits.double(), dim=1)
    assert_close(log_sum_exp(logits), total.float(), ABSOLUTE_TOLERANCE, label="log-sum-exp")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_edges_of_a_batch(num_rows: int, device: str) -> None:
    logits = _logits(num_rows, 70, device)
    assert log_softmax(logits).shape == (num_rows, 70)
    assert log_sum_exp(logits[:, :0]).tolist() == [-INF] * num_rows
    assert log_softmax(logits[:, :0]).shape == (num_rows, 0)
    assert token_log_softmax(logits, torch.zeros(num_rows, 0, dtype=torch.int64, device=device)).shape == (num_rows, 0)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_every_row_keeps_its_bits_in_any_batch(vocab_size: int, device: str) -> None:
    logits = _logits(40, vocab_size, device)
    assert_rows_keep_their_bits(lambda rows: log_softmax(logits[rows]), 40, "log-softmax")
    assert_rows_keep_their_bits(lambda rows: log_sum_exp(logits[rows]), 40, "log-sum-exp")


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_strides_and_columns_behind_the_end_change_no_bit(vocab_size: int, device: str) -> None:
    logits = _logits(5, vocab_size, device)
    want = log_softmax(logits)
    wide = torch.full((5, vocab_size + 13), NAN, device=device)
    wide[:, 7 : 7 + vocab_size] = logits
    assert_bitwise_equal(log_softmax(wide[:, 7 : 7 + vocab_size]), want, label="rows of a wider matrix")
    assert_bitwise_equal(log_softmax(logits.t().contiguous().t()), want, label="columns contiguous")
    assert_bitwise_equal(log_softmax(torch.cat((logits, logits))[::2]), want[[0, 2, 4, 1, 3]], label="every other row")


def _halved(lanes: torch.Tensor) -> torch.Tensor:
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes


def test_the_sum_has_the_order_of_the_contract() -> None:
    # On the CPU: Triton's exp and log are not those of PyTorch on a GPU, so only the order there is that of this test.
    logits = _logits(2, 2 * LOGSUM_CHUNK + 5, "cpu")
    largest = logits.amax(dim=1, keepdim=True)
    sums = torch.zeros(2, 4)  # three chunks, and a zero
    for index in range(3):
        chunk = logits[:, index * LOGSUM_CHUNK : (index + 1) * LOGSUM_CHUNK]
        of_chunk = chunk.amax(dim=1, keepdim=True)
        weights = torch.exp(chunk - of_chunk)
        lanes = torch.zeros(2, LOGSUM_BLOCK)
        for column in range(chunk.shape[1]):
            lanes[:, column % LOGSUM_BLOCK] += weights[:, column]
        sums[:, index] = _halved(lanes)[:, 0] * torch.exp(of_chunk - largest)[:, 0]
    assert_bitwise_equal(log_softmax(logits), logits - largest - torch.log(_halved(sums)), label="written out")


def test_chunks_without_finite_values_take_no_part(device: str) -> None:
    logits = _logits(3, 3 * LOGSUM_CHUNK, device)
    middle = slice(LOGSUM_CHUNK, 2 * LOGSUM_CHUNK)
    logits[:, middle] = -INF
    assert_close(log_sum_exp(logits).double(), logits.double().logsumexp(dim=1), ABSOLUTE_TOLERANCE, label="hidden")
    logits[0, LOGSUM_CHUNK], logits[1, LOGSUM_CHUNK] = NAN, INF
    got = log_softmax(logits)
    assert bool(got[:2].masked_fill(logits[:2] == -INF, NAN).isnan().all()), "NaN and +inf reach every chunk"
    assert bool((got[2, middle] == -INF).all())


@pytest.mark.parametrize("num_ids", [1, 2, 21, 500])
def test_chosen_tokens_have_the_bits_of_the_matrix_however_many_are_asked_for(num_ids: int, device: str) -> None:
    logits = _logits(9, 3000, device)
    ids = torch.randint(0, 3000, (9, num_ids), generator=torch.Generator().manual_seed(1)).to(device)
    assert_bitwise_equal(token_log_softmax(logits, ids), log_softmax(logits).gather(1, ids), label=f"{num_ids} ids")


def test_rows_without_finite_values(device: str) -> None:
    rows = [[-INF, -INF, -INF], [0.0, -INF, 0.0], [0.0, NAN, -INF], [INF, 0.0, -INF]]
    got = log_softmax(torch.tensor(rows, device=device))
    half = torch.tensor(0.5).log().item()
    assert got[:2].tolist() == [[-INF] * 3, [half, -INF, half]]
    assert got[2].isnan().tolist() == [True, True, False]
    assert got[3].isnan().tolist() == [True, True, False]
    assert log_sum_exp(torch.tensor(rows, device=device)).tolist()[:2] == [-INF, torch.tensor(2.0).log().item()]


def test_errors_name_operation_argument_and_rule() -> None:
    logits = _logits(3, 5, "cpu")
    with pytest.raises(UnsupportedError, match=r"log_softmax: logits is torch.bfloat16, expected torch.float32"):
        log_softmax(logits.bfloat16())
    with pytest.raises(ShapeError, match=r"log_sum_exp: logits is \[5\], expected 2 axes"):
        log_sum_exp(logits[0])
    with pytest.raises(ShapeError, match=r"token_log_softmax: token_ids is \[2, 1\], expected \[3, 1\]"):
        token_log_softmax(logits, torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match=r"token_log_softmax: token_ids is torch.int32, expected torch.int64"):
        token_log_softmax(logits, torch.zeros(3, 1, dtype=torch.int32))
