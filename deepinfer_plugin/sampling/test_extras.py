"""The extra parameters of a request: each rule on both sides of each bound, and what the sampler makes of them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.sampling.extras import Extras, capped_max_tokens, settle_extras, worker_args

pytestmark = pytest.mark.usefixtures("vllm_variables")

VOCABULARY = 16
SLOTS = 4


GOOD: list[tuple[dict[str, Any], Extras]] = [
    ({}, Extras()),
    ({"other": 3}, Extras()),
    ({"force_top_k": 1}, Extras(force_top_k=1)),
    ({"force_top_k": VOCABULARY}, Extras(force_top_k=VOCABULARY)),
    ({"token_blacklist": "0"}, Extras(token_blacklist=((0, 0),))),
    ({"token_blacklist": " 3, 5-7 ,15"}, Extras(token_blacklist=((3, 3), (5, 7), (15, 15)))),
    ({"token_blacklist": [3, "5-7", "15", [1, 2]]}, Extras(token_blacklist=((3, 3), (5, 7), (15, 15), (1, 2)))),
    ({"golden_token_ids": [0, 15]}, Extras(golden_token_ids=(0, 15))),
    ({"context_cap": 1}, Extras(context_cap=1)),
    ({"sum_smaller_probs": True}, Extras(sum_smaller_probs=True)),
    ({"sum_smaller_probs": 0}, Extras()),
    ({"draft_facts": True}, Extras(draft_facts=True)),
    ({"draft_facts": 0}, Extras()),
]


@pytest.mark.parametrize(("extra", "expected"), GOOD)
def test_values_inside_the_rule_are_read(extra: dict[str, Any], expected: Extras) -> None:
    found = Extras.from_extra_args(extra, VOCABULARY)
    assert found == expected
    assert Extras.from_extra_args(worker_args(found), VOCABULARY) == Extras.from_extra_args(
        {key: value for key, value in extra.items() if key != "context_cap"}, VOCABULARY
    ), "the worker's form means the same"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"force_top_k": 0}, "force_top_k is 0, expected an integer from 1 to 16"),
    ({"force_top_k": VOCABULARY + 1}, "force_top_k is 17"),
    ({"force_top_k": True}, "force_top_k is True"),
    ({"force_top_k": 2.0}, "force_top_k is 2.0"),
    ({"force_top_k": "2"}, "force_top_k is '2'"),
    ({"token_blacklist": ""}, "token_blacklist is ''"),
    ({"token_blacklist": []}, "token_blacklist is []"),
    ({"token_blacklist": 3}, "token_blacklist is 3"),
    ({"token_blacklist": [-1]}, "token_blacklist is with -1"),
    ({"token_blacklist": [VOCABULARY]}, "token_blacklist is with 16, expected an id, or first-last, from 0 to 15"),
    ({"token_blacklist": "7-5"}, "token_blacklist is with '7-5'"),
    ({"token_blacklist": "5-16"}, "token_blacklist is with '5-16'"),
    ({"token_blacklist": "5-"}, "token_blacklist is with '5-'"),
    ({"token_blacklist": "5,,6"}, "token_blacklist is with ''"),
    ({"token_blacklist": "٣"}, "token_blacklist is with"),
    ({"token_blacklist": [True]}, "token_blacklist is with True"),
    ({"token_blacklist": [[1, 2, 3]]}, "token_blacklist is with [1, 2, 3]"),
    ({"golden_token_ids": []}, "golden_token_ids is []"),
    ({"golden_token_ids": "1"}, "golden_token_ids is '1'"),
    ({"golden_token_ids": [-1]}, "golden_token_ids is [-1]"),
    ({"golden_token_ids": [VOCABULARY]}, "golden_token_ids is [16]"),
    ({"golden_token_ids": [1.0]}, "golden_token_ids is [1.0]"),
    ({"golden_token_ids": [True]}, "golden_token_ids is [True]"),
    ({"context_cap": 0}, "context_cap is 0, expected an integer 1 or more"),
    ({"context_cap": "9"}, "context_cap is '9'"),
    ({"sum_smaller_probs": 2}, "sum_smaller_probs is 2"),
    ({"sum_smaller_probs": "yes"}, "sum_smaller_probs is 'yes'"),
    ({"draft_facts": 2}, "draft_facts is 2, expected true or false (1 or 0)"),
]


@pytest.mark.parametrize(("extra", "expected"), BAD)
def test_a_value_outside_the_rule_is_named(extra: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        Extras.from_extra_args(extra, VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"extra_args": {"token_blacklist": "0-15"}}, "the whole vocabulary"),
        ({"extra_args": {"token_blacklist": "0-3"}, "allowed_token_ids": [1, 2]}, "all of allowed_token_ids"),
        ({"extra_args": {"token_blacklist": "0-3", "golden_token_ids": [5, 2]}}, "with 2, which is in token_blacklist"),
        ({"extra_args": {"golden_token_ids": [5]}, "structured_outputs": {"regex": "a"}}, "with structured output"),
        ({"extra_args": {"sum_smaller_probs": 1}, "n": 2, "seed": 1}, "sum_smaller_probs is set with n 2"),
        ({"extra_args": {"draft_facts": 1}, "n": 2, "seed": 1}, "draft_facts is set with n 2"),
    ],
)
def test_parameters_that_contradict_each_other_end_in_the_servers_error(fields: dict[str, Any], expected: str) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    if "structured_outputs" in fields:
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**fields["structured_outputs"])}
    with pytest.raises(VLLMValidationError, match=expected):
        settle_extras(SamplingParams(**fields), VOCABULARY)


def test_the_callers_object_stays_and_other_arguments_pass() -> None:
    from vllm.sampling_params import SamplingParams

    extra = {"token_blacklist": "3-4", "context_cap": 9, "other": 1}
    params = SamplingParams(extra_args=dict(extra))
    settled, extras = settle_extras(params, VOCABULARY)
    assert params.extra_args == extra
    assert settled.extra_args == {"other": 1, "token_blacklist": [[3, 4]]}
    assert extras.context_cap == 9
    plain = SamplingParams(extra_args={"other": 1})
    assert settle_extras(plain, VOCABULARY)[0] is plain


@pytest.mark.parametrize(("prompt", "asked", "expected"), [(1, 5, 5), (5, 5, 5), (6, 5, 4), (9, 5, 1)])
def test_the_cap_shortens_the_answer(prompt: int, asked: int, expected: int) -> None:
    assert capped_max_tokens(Extras(context_cap=10), prompt, asked) == expected
    assert capped_max_tokens(Extras(), prompt, asked) == asked


def test_a_prompt_that_fills_the_cap_is_refused() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="context_cap is 10 with a prompt of 10 tokens"):
        capped_max_tokens(Extras(context_cap=10), 10, 5)


def params(**extra: object) -> Any:
    return SimpleNamespace(extra_args=extra or None)


def context(slots: list[int]) -> Any:
    return SimpleNamespace(
        expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array(slots),
        pos=torch.zeros(len(slots), dtype=torch.int64),
    )


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))


def test_a_blacklist_masks_its_own_rows_only_and_a_slot_forgets_it() -> None:
    from deepinfer_plugin.sampling.extra_states import Blacklist

    state: Any = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=SLOTS, vocab_size=VOCABULARY)
    tested = Blacklist(state)
    rows = logits(3)
    assert tested.add_request(0, params()) is False
    tested.apply_staged_writes()
    assert tested.apply(rows, context([0, 0, 0])) is rows
    assert tested.add_request(2, params(token_blacklist=[[3, 4], [15, 15]])) is True
    tested.apply_staged_writes()
    got = tested.apply(rows, context([0, 2, 1]))
    assert_bitwise_equal(got[[0, 2]], rows[[0, 2]], label="rows without a blacklist")
    assert torch.isinf(got[1]).nonzero().flatten().tolist() == [3, 4, 15]
    kept = [token for token in range(VOCABULARY) if token not in (3, 4, 15)]
    assert_bitwise_equal(got[1, kept], rows[1, kept], label="tokens outside")
    tested.add_request(2, params())
    tested.add_request(1, params(token_blacklist=[[0, 0]]))
    tested.apply_staged_writes()
    again = tested.apply(rows, context([0, 2, 1]))
    assert torch.isinf(again).nonzero().tolist() == [[2, 0]]


def test_forced_top_k_keeps_the_largest_with_ties_to_the_lower_id() -> None:
    from deepinfer_plugin.sampling.extra_states import ForcedTopK

    tested = ForcedTopK(SLOTS, torch.device("cpu"))
    rows = torch.tensor([[1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert tested.add_request(1, params(force_top_k=2)) is True
    assert tested.add_request(0, params()) is False
    tested.apply_staged_writes()
    got = tested.apply(rows, torch.tensor([0, 1, 1]), np.array([0, 1]))
    assert_bitwise_equal(got[0], rows[0], label="a row without it")
    assert torch.isfinite(got[1]).tolist() == [False, True, True, False]
    assert torch.isfinite(got[2]).tolist() == [True, True, False, False]
    assert tested.apply(rows, torch.tensor([0, 0, 0]), np.array([0])) is rows


def run_mixed(rows: torch.Tensor, slots: list[int], whole_batch: bool = False) -> torch.Tensor:
    """Rows through both stages, four requests with different wishes; ``whole_batch`` plants a mask of all for each."""
    from deepinfer_plugin.sampling.extra_states import Blacklist, ForcedTopK

    state: Any = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=SLOTS, vocab_size=VOCABULARY)
    banned, top = Blacklist(state), ForcedTopK(SLOTS, torch.device("cpu"))
    wishes: list[dict[str, Any]] = [{}, {"token_blacklist": [[2, 9]]}, {"force_top_k": 3}, {"force_top_k": 1}]
    for slot, extra in enumerate(wishes):
        banned.add_request(slot, params(**extra))
        top.add_request(slot, params(**extra))
    banned.apply_staged_writes()
    top.apply_staged_writes()
    if whole_batch:
        assert banned._banned is not None
        banned._banned[:] = banned._banned[sorted(set(slots))].any(dim=0)
    return top.apply(banned.apply(rows, context(slots)), torch.tensor(slots), np.array(slots))


@pytest.mark.parametrize("is_planted", [False, True])
def test_every_row_keeps_its_bits_in_any_batch(is_planted: bool) -> None:
    rows, slots = logits(32), [i % SLOTS for i in range(32)]
    alone = torch.cat([run_mixed(rows[i : i + 1], slots[i : i + 1], is_planted) for i in range(32)])
    batch = run_mixed(rows, slots, is_planted)
    if is_planted:
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(batch, alone, label="32 rows in one batch")
    else:
        assert_bitwise_equal(batch, alone, label="32 rows in one batch")
