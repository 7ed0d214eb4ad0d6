import math

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.sample_tokens import sample_tokens, top_tokens
from deepinfer_kernels.sample_tokens.reference import make_inputs
from deepinfer_kernels.sampling_noise import gumbel_noise
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

INF, NAN = float("inf"), float("nan")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(num_rows: int, vocab_size: int, device: str) -> Inputs:
    return make_inputs(num_rows, vocab_size, torch.Generator().manual_seed(21), device)


def _greedy(rows: list[list[float]], device: str) -> list[int]:
    zeros = torch.zeros(len(rows), dtype=torch.int64, device=device)
    tokens = sample_tokens(torch.tensor(rows, device=device), zeros.float(), zeros, zeros, zeros)
    return [int(token) for token in tokens]


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 130])
@pytest.mark.parametrize("num_rows", [0, 1, 50])
def test_the_token_is_the_first_with_the_largest_score(num_rows: int, vocab_size: int, device: str) -> None:
    logits, temperature, *numbers = _inputs(num_rows, vocab_size, device)
    seeds, prompts, positions = numbers
    noise = gumbel_noise(seeds, prompts, positions, vocab_size).cpu()
    want = []
    for row in range(num_rows):
        scale = float(temperature[row])
        scaled = logits[row] if scale == 0.0 else logits[row] / temperature[row]
        score = scaled.cpu().double() + (0.0 if scale == 0.0 else noise[row])
        values = [-INF if math.isnan(value) else value for value in score.tolist()]
        want.append(values.index(max(values)))
    got = sample_tokens(logits, temperature, *numbers)
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int64), label="tokens")


def test_greedy_ties_go_to_the_lower_id_and_nan_never_wins(device: str) -> None:
    rows = [[0.0, 2.0, 2.0, 2.0], [NAN, -1.0, NAN, -2.0], [-0.0, 0.0, -0.0, -1.0], [INF, 0.0, INF, NAN]]
    assert _greedy(rows, device) == [1, 1, 0, 0]
    assert _greedy([[-INF, -INF, -5.0], [-INF, -INF, -INF], [NAN, NAN, NAN]], device) == [2, 0, 0]


def test_a_masked_token_is_never_drawn(device: str) -> None:
    numbers = torch.arange(5000, device=device)
    zeros = torch.zeros_like(numbers)
    logits = torch.tensor([[0.0, -INF, 0.0, NAN, 0.0]], device=device).expand(5000, 5)
    drawn = sample_tokens(logits, torch.ones(5000, device=device), numbers, zeros, zeros)
    assert sorted(set(drawn.tolist())) == [0, 2, 4]


def test_temperature_divides_in_fp32_before_the_noise(device: str) -> None:
    logits, _, *numbers = _inputs(60, 90, device)
    temperature = torch.full((60,), 0.7, device=device)
    ones = torch.ones(60, device=device)
    assert torch.equal(sample_tokens(logits, temperature, *numbers), sample_tokens(logits / 0.7, ones, *numbers))


@pytest.mark.parametrize("vocab_size", [5, 64, 131])
def test_every_row_keeps_its_token_in_any_batch(vocab_size: int, device: str) -> None:
    inputs = _inputs(50, vocab_size, device)
    assert_rows_keep_their_bits(lambda rows: sample_tokens(*(x[rows] for x in inputs)), 50, "tokens")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_strides_and_edges_of_a_batch(num_rows: int, device: str) -> None:
    logits, temperature, *numbers = _inputs(num_rows, 40, device)
    wide = torch.full((num_rows, 51), INF, device=device)
    wide[:, :40] = logits
    want = sample_tokens(logits, temperature, *numbers)
    spread = [torch.stack((x, x + 1), dim=1)[:, 0] for x in numbers]
    assert_bitwise_equal(sample_tokens(wide[:, :40], temperature, *spread), want, label="strided")
    assert sample_tokens(logits[:, :0], temperature, *numbers).tolist() == [0] * num_rows


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64, 65, 130])
def test_the_best_tokens_stand_in_total_order(num_tokens: int, device: str) -> None:
    logits = _inputs(20, 130, device)[0]
    want = []
    for row in logits.tolist():
        values = [-INF if math.isnan(value) else value for value in row]
        want.append(sorted(range(130), key=lambda token, v=values: (-v[token], token))[:num_tokens])  # type: ignore[misc]
    got = top_tokens(logits, num_tokens)
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int64).view(20, num_tokens), label="best tokens")
    assert_bitwise_equal(got, top_tokens(logits, 130)[:, :num_tokens].contiguous(), label="begin of the longest list")


def test_extremes_in_the_order_of_tokens(device: str) -> None:
    largest = torch.finfo(torch.float32).max
    row = torch.tensor([[-INF, -largest, NAN, -0.0, 0.0, largest, INF, -1e-45]], device=device)
    assert top_tokens(row, 8).tolist() == [[6, 5, 3, 4, 7, 1, 0, 2]]


def test_errors_name_operation_argument_and_rule() -> None:
    logits, temperature, seeds, prompts, positions = _inputs(3, 9, "cpu")
    with pytest.raises(UnsupportedError, match=r"sample_tokens: logits is torch.float64, expected torch.float32"):
        sample_tokens(logits.double(), temperature, seeds, prompts, positions)
    with pytest.raises(UnsupportedError, match=r"sample_tokens: positions is torch.int32, expected torch.int64"):
        sample_tokens(logits, temperature, seeds, prompts, positions.int())
    with pytest.raises(ShapeError, match=r"sample_tokens: seeds is \[1\], expected \[3\]"):
        sample_tokens(logits, temperature, seeds[:1], prompts, positions)
    with pytest.raises(ShapeError, match="top_tokens: num_tokens is 10, expected 0 to 9"):
        top_tokens(logits, 10)
