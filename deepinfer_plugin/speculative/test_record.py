"""Counts of drafts against counting by hand, and the way of facts to the request that asks; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from deepinfer_plugin.speculative import record as record_module
from deepinfer_plugin.speculative.counters import Figures, Verification
from deepinfer_plugin.speculative.facts import facts_of, take_columns, with_columns
from deepinfer_plugin.speculative.record import DraftRecord

pytestmark = pytest.mark.usefixtures("vllm_variables")

NUM_DRAFTS = 3
ASKS = SamplingParams(extra_args={"draft_facts": True})


def _starts(verified: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum([count + 1 for count in verified])], dtype=torch.int32)


def test_counts_are_those_of_counting_one_by_one() -> None:
    generator = np.random.default_rng(0)
    counts = Verification()
    verified, accepted, reached, error = (np.zeros(NUM_DRAFTS) for _ in range(4))
    for _ in range(20):
        lengths = generator.integers(0, NUM_DRAFTS + 1, 6)
        kept = [int(generator.integers(0, length + 1)) for length in lengths]
        confidence = generator.random((6, NUM_DRAFTS), dtype=np.float32)
        counts.add_drafted(lengths, NUM_DRAFTS)
        num_sampled = torch.tensor([count + 1 for count in kept], dtype=torch.int32)
        counts.add_step(_starts(lengths.tolist()), num_sampled, NUM_DRAFTS, torch.from_numpy(confidence))
        for row, (length, count) in enumerate(zip(lengths, kept, strict=True)):
            for place in range(length):
                verified[place] += 1
                accepted[place] += place < count
                if place <= count:
                    reached[place] += 1
                    error[place] += abs(float(confidence[row, place]) - (place < count))
    figures = counts.figures()
    assert (figures.drafted, figures.verified) == (tuple(map(int, verified)), tuple(map(int, verified)))
    assert (figures.accepted, figures.reached) == (tuple(map(int, accepted)), tuple(map(int, reached)))
    assert figures.confidence_error == pytest.approx(error, abs=1e-5)
    assert figures.acceptance == {place: accepted[place] / verified[place] for place in range(NUM_DRAFTS)}
    assert figures.mean_confidence_error == pytest.approx(dict(enumerate(error / reached)), abs=1e-6)
    assert figures.verified_length == pytest.approx(1 + verified.sum() / figures.steps)
    assert figures.accepted_length == pytest.approx(1 + accepted.sum() / figures.steps)


def test_a_prompt_that_goes_on_counts_nothing_and_a_nan_counts_as_no_confidence() -> None:
    counts = Verification()
    counts.add_drafted(np.array([0, 2]), NUM_DRAFTS)
    confidence = torch.tensor([[0.5, 0.5, 0.5], [torch.nan, 0.25, 0.0]])
    counts.add_step(_starts([0, 2]), torch.tensor([0, 2], dtype=torch.int32), NUM_DRAFTS, confidence)
    figures = counts.figures()
    assert (figures.steps, figures.verified, figures.accepted) == (1, (1, 1, 0), (1, 0, 0))
    assert figures.confidence_error == (1.0, 0.25, 0.0)
    assert figures.since(figures) == Figures(
        drafted=(0,) * 3, verified=(0,) * 3, accepted=(0,) * 3, reached=(0,) * 3, confidence_error=(0.0,) * 3
    )
    assert figures.since(Figures()) == figures


def test_nothing_is_known_of_steps_that_did_not_happen() -> None:
    none = Verification().figures()
    assert none.by_kind == {"drafted": (0,), "verified": (0,), "accepted": (0,)}
    assert (none.verified_length, none.accepted_length, none.acceptance) == (None, None, {})
    cut = Verification()
    cut.add_drafted(np.array([2, 1]), NUM_DRAFTS)  # a schedule let none of them pass
    assert cut.figures().by_kind == {"drafted": (2, 1, 0), "verified": (0, 0, 0), "accepted": (0, 0, 0)}
    assert cut.figures().verified_length == 1.0


def test_a_later_engine_with_other_drafts_is_counted_by_itself() -> None:
    counts = Verification()
    for num_drafts in (3, 2):
        counts.add_drafted(np.array([num_drafts]), num_drafts)
        counts.add_step(_starts([num_drafts]), torch.tensor([2], dtype=torch.int32), num_drafts)
    assert counts.figures().by_kind == {"drafted": (1, 1), "verified": (1, 1), "accepted": (1, 0)}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Verification:
    own = Verification()
    monkeypatch.setattr(record_module, "VERIFICATION", own)
    return own


def _batch(slots: list[int], verified: list[int]) -> Any:
    return SimpleNamespace(
        num_reqs=len(slots),
        req_ids=[f"r{slot}" for slot in slots],
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        cu_num_logits=_starts(verified),
        num_draft_tokens=sum(verified),
        num_draft_tokens_per_req=np.array(verified, dtype=np.int32) if sum(verified) else None,
    )


def test_drafts_that_a_schedule_cut_are_drafted_and_not_verified(counted: Verification) -> None:
    record = DraftRecord(4, NUM_DRAFTS, torch.device("cpu"))
    record.add_request(2, ASKS)
    record.begin()
    said = torch.tensor([[0.875, 0.5, 0.25], [0.125, 0.0, 1.0]])
    record.store_confidence(torch.tensor([2, 0]), said)
    record.note_drafted({"r2": 3, "r0": 2})
    facts = record.add_step(_batch([0, 2], [2, 1]), torch.tensor([1, 2], dtype=torch.int32))
    assert facts is not None
    assert facts.tolist() == [[2, 2, 0, *said[1].tolist()], [3, 1, 1, *said[0].tolist()]]
    facts = record.add_step(_batch([0, 2], [1, 0]), torch.tensor([2, 1], dtype=torch.int32))
    assert facts is not None
    assert facts[:, :3].tolist() == [[1, 1, 1], [0, 0, 0]], "what was noted holds for one step"
    record.note_drafted({"r2": 3})
    record.add_step(_batch([2], [0]), torch.tensor([1], dtype=torch.int32))  # all of a step was cut
    figures = counted.figures()
    assert figures.by_kind == {"drafted": (4, 3, 2), "verified": (3, 1, 0), "accepted": (2, 0, 0)}
    assert (figures.steps, figures.verified_length) == (4, 2.0)


def test_warm_up_and_requests_that_do_not_ask_leave_nothing(counted: Verification) -> None:
    record = DraftRecord(4, NUM_DRAFTS, torch.device("cpu"))
    record.add_request(1, ASKS)
    step = _batch([1], [2]), torch.tensor([2], dtype=torch.int32)
    assert record.add_step(*step) is None
    assert counted.figures() == Figures()
    record.begin()
    facts = record.add_step(*step)
    assert facts is not None
    assert facts.tolist() == [[2, 2, 1]], "a drafter that says nothing"
    record.add_request(1, SamplingParams())
    assert record.add_step(*step) is None
    assert counted.figures().steps == 2


def test_a_padded_row_of_a_graph_takes_the_confidences_of_no_request() -> None:
    record = DraftRecord(2, NUM_DRAFTS, torch.device("cpu"))
    record.store_confidence(torch.tensor([1, -1]), torch.ones(2, NUM_DRAFTS))
    assert record.confidence.sum(dim=1).tolist() == [0, NUM_DRAFTS, NUM_DRAFTS]


def test_facts_travel_behind_the_scores_of_each_row() -> None:
    scores = LogprobsTensors(
        logprob_token_ids=torch.tensor([[4], [5], [6]]),
        logprobs=torch.tensor([[-1.0], [-2.0], [-3.0]]),
        selected_token_ranks=torch.tensor([1, 1, 1]),
    )
    facts = torch.tensor([[1.0, 1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.75, 0.75]])
    wide = with_columns(scores, facts, torch.tensor([0, 2, 3], dtype=torch.int32))
    assert wide.logprobs.tolist() == [[-1.0, *facts[0]], [-2.0, *facts[0]], [-3.0, *facts[1]]]
    ids, values = wide.logprob_token_ids.numpy(), wide.logprobs.numpy()
    asking, other = SimpleNamespace(deepinfer_draft_facts=[]), SimpleNamespace()
    for processor in (asking, other):
        lists = LogprobsLists(ids[:2], values[:2], np.array([1, 1]), None)
        left = take_columns(processor, lists)
        assert left.logprob_token_ids.tolist() == [[4], [5]]
        assert left.logprobs.tolist() == [[-1.0], [-2.0]]
        assert take_columns(processor, left) is left
    assert facts_of(SimpleNamespace(logprobs_processor=asking)) == [
        {"drafted": 1, "verified": 1, "accepted": 0, "confidence_score": [0.5]}
    ]
    assert facts_of(SimpleNamespace(logprobs_processor=other)) is None
