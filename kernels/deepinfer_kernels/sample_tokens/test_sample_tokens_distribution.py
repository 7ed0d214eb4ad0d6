"""Draws follow the softmax, and draws that differ in one argument are independent.

Arguments are fixed numbers, so each p-value is one number: a sound generator passes 1e-3 once and then always.
Each test of independence repeats itself with the planted fault that it is there to find, and must reject it.
"""

from collections.abc import Callable

import pytest
import torch

from deepinfer_kernels.sample_tokens import sample_tokens

NUM_DRAWS = 30_000
ACCEPTED, REJECTED = 1e-3, 1e-12
VOCABULARY = 12
PROMPT = 0x1234_5678_9ABC_DEF0
SEED = 987_654_321

Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # seeds, prompt hashes, positions


def _logits(device: str) -> torch.Tensor:
    return torch.linspace(0.0, 2.5, VOCABULARY, device=device)


def _draw(numbers: Numbers, temperature: float = 1.0) -> torch.Tensor:
    count, device = numbers[0].shape[0], numbers[0].device
    scale = torch.full((count,), temperature, device=device)
    return sample_tokens(_logits(str(device)).expand(count, -1), scale, *numbers)


def _numbers(device: str, **lines: torch.Tensor) -> Numbers:
    """Fixed seed, prompt and position 100, except what ``lines`` gives."""
    fixed = {"seed": SEED, "prompt": PROMPT, "position": 100}
    seeds, prompts, positions = (
        lines.get(name, torch.full((NUM_DRAWS,), value, device=device)) for name, value in fixed.items()
    )
    return seeds, prompts, positions


def _tail(statistic: torch.Tensor, freedom: int) -> float:
    """Probability that a chi-square variable is larger."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0, dtype=torch.float64), statistic.cpu() / 2))


def _p_of_fit(tokens: torch.Tensor, temperature: float) -> float:
    expected = torch.softmax(_logits(str(tokens.device)).double() / temperature, dim=0) * tokens.numel()
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    return _tail(((counts - expected) ** 2 / expected).sum(), VOCABULARY - 1)


def _p_of_independence(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square test of a table of pairs against the product of the softmax with itself."""
    chance = torch.softmax(_logits(str(first.device)).double(), dim=0)
    expected = chance[:, None] * chance[None, :] * first.numel()
    counts = torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2).double().view_as(expected)
    return _tail(((counts - expected) ** 2 / expected).sum(), VOCABULARY**2 - 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("line", ["seed", "prompt", "position"])
def test_draws_follow_the_softmax(line: str, temperature: float, device: str) -> None:
    tokens = _draw(_numbers(device, **{line: torch.arange(NUM_DRAWS, device=device)}), temperature)
    assert _p_of_fit(tokens, temperature) > ACCEPTED
    assert _p_of_fit(tokens, temperature * 1.25) < REJECTED  # a planted fault: a temperature of another request


def _consecutive(step: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda line: line + step


# What the second draw of a pair differs in, how, and the line along which pairs are taken.
PAIRS: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "the next position": ("position", "position", _consecutive(1)),
    "the position after next": ("position", "position", _consecutive(2)),
    "the neighbouring seed": ("seed", "seed", _consecutive(1)),
    "sample 3 of one request": ("seed", "seed", _consecutive(3)),
    "another seed": ("position", "seed", lambda line: torch.full_like(line, 31_337)),
    "the opposite seed": ("position", "seed", lambda line: torch.full_like(line, -SEED)),
    "a seed that differs in its high word": ("position", "seed", lambda line: torch.full_like(line, SEED + (7 << 40))),
    "another prompt, seed broadcast": ("position", "prompt", lambda line: torch.full_like(line, 99)),
    "the prompt hash's high word": ("position", "prompt", lambda line: torch.full_like(line, PROMPT ^ (1 << 62))),
    "seed and position exchanged": ("position", "seed", lambda line: torch.full_like(line, 100)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_draws_that_differ_in_one_argument_are_independent(what: str, device: str) -> None:
    along, changed, change = PAIRS[what]
    line = torch.arange(NUM_DRAWS, device=device) * 4
    first = _numbers(device, **{along: line})
    names = ("seed", "prompt", "position")
    second = dict(zip(names, first, strict=True))
    second[changed] = change(second[changed])
    first_tokens, second_tokens = _draw(first), _draw((second["seed"], second["prompt"], second["position"]))
    assert _p_of_independence(first_tokens, second_tokens) > ACCEPTED
    # the planted fault: the noise of the second draw does not see the argument that changed, and is shared
    assert _p_of_independence(first_tokens, _draw(first)) < REJECTED


def test_noise_shared_by_one_draw_in_twenty_is_noticed(device: str) -> None:
    line = torch.arange(NUM_DRAWS, device=device)
    first = _draw(_numbers(device, position=line))
    second = _draw(_numbers(device, position=line, prompt=torch.full_like(line, 99)))
    assert _p_of_independence(first, torch.where(line % 20 == 0, first, second)) < REJECTED


def test_positions_have_no_serial_correlation(device: str) -> None:
    tokens = _draw(_numbers(device, position=torch.arange(NUM_DRAWS, device=device))).double()
    centred = tokens - tokens.mean()
    limit = 4 / NUM_DRAWS**0.5  # four standard errors
    for lag in range(1, 17):
        correlation = float((centred[lag:] * centred[:-lag]).mean() / centred.square().mean())
        assert abs(correlation) < limit, f"lag {lag}: {correlation}"


def test_the_same_numbers_draw_the_same_token(device: str) -> None:
    numbers = _numbers(device, position=torch.arange(NUM_DRAWS, device=device))
    assert torch.equal(_draw(numbers), _draw(numbers))
