"""Draws of drafts are those of the model: its parameters, its noise; and they lie where a CUDA graph finds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.sample_tokens import sample_tokens
from deepinfer_plugin.draft.draws import Draws

NUM_SLOTS, VOCABULARY = 5, 300


def _sampler() -> Any:
    """Slot 0 is greedy, the others draw, some of them from a few tokens only."""
    values = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0]),
        "top_k": torch.tensor([VOCABULARY, VOCABULARY, 5, VOCABULARY, 40], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 1.0, 0.5, 0.9]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.01]),
        "seeds": torch.arange(NUM_SLOTS) + 40,
    }
    states = SimpleNamespace(**{name: SimpleNamespace(gpu=value) for name, value in values.items()})
    return SimpleNamespace(sampling_states=states, prompt_hashes=SimpleNamespace(gpu=torch.arange(NUM_SLOTS) * 7 - 3))


def _draws(sampler: Any) -> Draws:
    return Draws(cast("Any", sampler), torch.device("cpu"))


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([3, 0, 4, 1, 2, 2])
    return torch.randn(len(slots), VOCABULARY, generator=generator) * 2, slots, torch.arange(len(slots)) + 100


def test_a_draft_is_what_the_model_would_draw_from_the_same_logits() -> None:
    sampler = _sampler()
    logits, slots, positions = _inputs()
    found = _draws(sampler).draw(logits, slots, positions)
    states = sampler.sampling_states
    for row, slot in enumerate(slots.tolist()):
        one = slice(slot, slot + 1)
        temperature = states.temperature.gpu[one]
        scaled = logits[row : row + 1] / torch.where(temperature == 0, 1.0, temperature)
        limited = restrict_logits(scaled, states.top_k.gpu[one], states.top_p.gpu[one], states.min_p.gpu[one])
        drawn = (temperature != 0).float()
        noise = (states.seeds.gpu[one], sampler.prompt_hashes.gpu[one], positions[row : row + 1])
        assert found[row] == sample_tokens(limited, drawn, *noise)[0], slot
    assert found[1] == logits[1].argmax()


def test_a_row_without_a_request_draws_some_token_of_the_vocabulary() -> None:
    logits, slots, positions = _inputs()
    logits[0] = torch.nan
    found = _draws(_sampler()).draw(logits, torch.full_like(slots, -1), positions)
    assert bool(((found >= 0) & (found < VOCABULARY)).all())


def test_parameters_of_another_step_arrive_at_the_same_addresses() -> None:
    sampler = _sampler()
    draws = _draws(sampler)
    logits, slots, positions = _inputs()
    before, addresses = draws.draw(logits, slots, positions), [held.data_ptr() for held in draws._held]
    sampler.sampling_states.seeds.gpu = sampler.sampling_states.seeds.gpu + 1000  # vLLM hands on another buffer
    assert draws.draw(logits, slots, positions).tolist() == before.tolist()
    draws.refresh()
    assert draws.draw(logits, slots, positions).tolist() != before.tolist()
    assert [held.data_ptr() for held in draws._held] == addresses


def test_parameters_of_the_step_before_are_not_copied_again() -> None:
    draws = _draws(_sampler())
    for held in draws._held:
        held.fill_(7)
    draws.refresh()
    assert [set(held.tolist()) for held in draws._held] == [{7}] * len(draws._held)
