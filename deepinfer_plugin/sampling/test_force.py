"""Forced tokens on hand-made batches: which row is forced follows from its position alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from deepinfer_plugin.sampling.force import ForcedTokens

pytestmark = pytest.mark.usefixtures("vllm_variables")

VOCAB_SIZE = 7
SLOTS = 4


def params(tokens: object) -> Any:
    return SimpleNamespace(extra_args=None if tokens is None else {"golden_token_ids": tokens})


def make(prompt_lens: list[int]) -> ForcedTokens:
    from deepinfer_plugin.sampling.force import ForcedTokens

    state: Any = SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        vocab_size=VOCAB_SIZE,
        prompt_len=SimpleNamespace(np=np.array(prompt_lens, dtype=np.int32)),
    )
    return ForcedTokens(state)


def step(processor: ForcedTokens, slots: list[int], positions: list[int], logits: torch.Tensor) -> torch.Tensor:
    processor.apply_staged_writes()
    context: Any = SimpleNamespace(
        expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array(slots),
        pos=torch.tensor(positions),
    )
    return processor.apply(logits, context)


def test_each_row_gets_the_token_of_its_own_position() -> None:
    processor = make([3, 1, 0, 5])
    assert processor.add_request(0, params([4, 5])) is True
    assert processor.add_request(1, params([6, 0, 2])) is True
    assert processor.add_request(3, params(None)) is False
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    got = step(processor, [3, 1, 0, 1], [4, 2, 2, 0], logits)
    assert got.argmax(-1).tolist()[1:] == [2, 4, 6]
    assert torch.equal(got[0], logits[0])
    assert torch.isinf(got[1:]).sum(-1).tolist() == [VOCAB_SIZE - 1] * 3


def test_rows_before_and_after_the_list_keep_their_bits() -> None:
    processor = make([3, 0, 0, 0])
    processor.add_request(0, params([4, 5]))
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    got = step(processor, [0, 0, 0], [1, 3, 4], logits)
    assert torch.equal(got[0], logits[0])  # still inside the prompt
    assert got[1].argmax().item() == 5
    assert torch.equal(got[2], logits[2])  # past the list


def test_a_slot_that_is_used_again_forgets_its_list() -> None:
    processor = make([1, 0, 0, 0])
    processor.add_request(0, params([4, 5, 6]))
    logits = torch.zeros(1, VOCAB_SIZE)
    step(processor, [0], [0], logits)
    processor.add_request(0, params(None))
    assert step(processor, [0], [0], logits) is logits
    processor.add_request(0, params([3]))
    assert step(processor, [0], [0], logits).argmax().item() == 3
    assert torch.equal(step(processor, [0], [1], logits), logits)


def test_a_batch_without_forced_requests_is_not_touched() -> None:
    processor = make([1, 1, 0, 0])
    processor.add_request(0, params([4]))
    processor.add_request(1, params(None))
    logits = torch.zeros(1, VOCAB_SIZE)
    assert step(processor, [1], [0], logits) is logits
