import math

import numpy as np
import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.sampling_noise import gumbel_noise, philox4x32_10, random_words
from deepinfer_kernels.sampling_noise.reference import make_inputs
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

# Random123 1.14, file kat_vectors: counter, key, result of philox 4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """The same function in Python's integers, from the paper's description."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def _plain_words(seed: int, prompt: int, position: int, vocab_size: int) -> list[int]:
    words: list[int] = []
    for group in range(-(-vocab_size // 4)):
        counter = (group, position, prompt & 0xFFFFFFFF, (prompt >> 32) & 0xFFFFFFFF)
        words += _plain_philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return words[:vocab_size]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, ...], device: str
) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word], device=device) for word in (*counter, *key))
    assert [int(word) for word in philox4x32_10((c0, c1, c2, c3), (k0, k1))] == list(want)
    assert _plain_philox(counter, key) == list(want)


@pytest.mark.parametrize("vocab_size", [0, 1, 3, 4, 5, 66])
def test_words_are_those_of_the_documented_layout(vocab_size: int, device: str) -> None:
    seeds, prompts, positions = make_inputs(6, torch.Generator().manual_seed(5), device)
    seeds[:4] = torch.tensor([0, -1, -(1 << 63), (1 << 63) - 1], device=device)
    positions[:2] = torch.tensor([0, (1 << 32) - 1], device=device)
    rows = zip(seeds.tolist(), prompts.tolist(), positions.tolist(), strict=True)
    want = [_plain_words(*row, vocab_size) for row in rows]
    got = random_words(seeds, prompts, positions, vocab_size)
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int64).view(6, vocab_size), label="words")


def test_the_noise_is_the_gumbel_quantile_of_each_word(device: str) -> None:
    inputs = make_inputs(3, torch.Generator().manual_seed(6), device)
    words = random_words(*inputs, 101).cpu().numpy().astype(np.float64)
    want = -np.log(-np.log((words + 0.5) / 2.0**32))
    got = gumbel_noise(*inputs, 101)
    assert got.dtype == torch.float64
    assert np.abs(got.cpu().numpy() - want).max() < 1e-13


def test_the_extreme_words_stay_finite(device: str) -> None:
    for word, want in [(0, -3.13), (0xFFFFFFFF, 22.87)]:
        u = (torch.tensor([word], device=device).double() + 0.5) * 2.0**-32
        assert 0.0 < u.item() < 1.0
        assert u.log().neg().log().neg().item() == pytest.approx(want, abs=0.01)


@pytest.mark.parametrize("vocab_size", [3, 64, 130])
def test_every_row_keeps_its_bits_in_any_batch(vocab_size: int, device: str) -> None:
    seeds, prompts, positions = make_inputs(40, torch.Generator().manual_seed(7), device)
    assert_rows_keep_their_bits(
        lambda rows: gumbel_noise(seeds[rows], prompts[rows], positions[rows], vocab_size), 40, "noise"
    )


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_a_wider_vocabulary_begins_with_the_narrower(num_rows: int, device: str) -> None:
    inputs = make_inputs(num_rows, torch.Generator().manual_seed(8), device)
    wide = gumbel_noise(*inputs, 67)
    assert_bitwise_equal(gumbel_noise(*inputs, 21), wide[:, :21].contiguous(), label="21 of 67 tokens")


def test_strided_arguments(device: str) -> None:
    inputs = make_inputs(9, torch.Generator().manual_seed(9), device)
    seeds, prompts, positions = (torch.stack((x, x + 1), dim=1)[:, 0] for x in inputs)
    assert_bitwise_equal(gumbel_noise(seeds, prompts, positions, 20), gumbel_noise(*inputs, 20), label="strided")


def _p_of_uniformity(words: torch.Tensor, num_bins: int) -> float:
    """Chi-square test that 32-bit words fall into equal bins equally often."""
    counts = torch.bincount((words.cpu().flatten() * num_bins) >> 32, minlength=num_bins).double()
    expected = words.numel() / num_bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((num_bins - 1) / 2.0).double(), statistic / 2))


@pytest.mark.parametrize("axis", ["seed", "prompt", "position", "token"])
def test_words_are_uniform_along_each_argument(axis: str, device: str) -> None:
    count = 40_000
    numbers = torch.arange(count, device=device)
    zero = torch.zeros(count, dtype=torch.int64, device=device)
    if axis == "token":
        words = random_words(zero[:1], zero[:1], zero[:1], count)
    else:
        seeds, prompts, positions = (numbers if name == axis else zero for name in ("seed", "prompt", "position"))
        words = random_words(seeds, prompts, positions, 4)
    assert _p_of_uniformity(words, 64) > 1e-3
    # neighbours along the axis: the difference of two independent uniform words is uniform
    line = words.flatten() if axis == "token" else words[:, 1]
    assert _p_of_uniformity((line[1:] - line[:-1]) & 0xFFFFFFFF, 64) > 1e-3
    shared = line.clone()
    shared[1::2] = line[::2]  # a planted fault: two neighbours share their word
    assert _p_of_uniformity((shared[1:] - shared[:-1]) & 0xFFFFFFFF, 64) < 1e-12


def test_the_noise_has_the_moments_of_a_gumbel_variable(device: str) -> None:
    inputs = make_inputs(50, torch.Generator().manual_seed(10), device)
    noise = gumbel_noise(*inputs, 4000)
    deviation = math.pi / math.sqrt(6.0)
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=4 * deviation / math.sqrt(200_000))
    assert noise.std().item() == pytest.approx(deviation, rel=0.01)


def test_errors_name_operation_argument_and_rule() -> None:
    seeds, prompts, positions = make_inputs(3, torch.Generator().manual_seed(0), "cpu")
    with pytest.raises(UnsupportedError, match=r"random_words: seeds is torch.int32, expected torch.int64"):
        random_words(seeds.int(), prompts, positions, 4)
    with pytest.raises(ShapeError, match=r"gumbel_noise: positions is \[2\], expected \[3\]"):
        gumbel_noise(seeds, prompts, positions[:2], 4)
    with pytest.raises(ShapeError, match="random_words: vocab_size is -1, expected at least 0"):
        random_words(seeds, prompts, positions, -1)
