"""What a step of greedy requests leaves out: processing, restriction and noise.

The sampler's kernels need Triton's interpreter from the first import on, so everything runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.platforms.detect import platform_class

VOCABULARY = 90
TIMEOUT_S = 300
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}
DRAWN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.5, "seed": 1}
FREE: dict[str, Any] = {"temperature": 0.7, "seed": 1}
STEPS = {"greedy": [GREEDY, GREEDY], "mixed": [GREEDY, DRAWN], "free": [FREE, FREE], "beside": [FREE, DRAWN]}
OTHER: dict[str, Any] = {"temperature": 1.3, "top_k": 4, "min_p": 0.05, "seed": 9}
FOREIGN = ("LogitsProcessor", "BadWordsState")
# Steps in a row: the slots of each, and the requests that take a slot before it.
FLIPS: list[tuple[list[int], dict[int, dict[str, Any]]]] = [
    ([0, 1], {0: GREEDY, 1: GREEDY}),
    ([0, 1], {}),
    ([0, 1, 2], {2: DRAWN}),  # a request with top-p joins
    ([0, 1, 2], {}),
    ([2, 0, 1], {}),
    ([2, 0, 1], {0: OTHER}),  # another request takes a slot
    ([1], {}),
    ([1, 3], {3: FREE}),
    ([1, 3], {3: GREEDY}),
]


def _sampler(num_slots: int, base: str = "") -> Any:
    """Our sampler; with ``base`` it has a processor that extends this class of vLLM's and counts its calls."""
    import torch
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from deepinfer_plugin.sampling.sampler import DeepInferSampler

    device = torch.device("cpu")
    config: Any = SimpleNamespace(reasoning_config=None, speculative_config=None)
    with mock.patch.object(buffer_utils, "UvaBuffer", UvaBuffer):  # as vLLM's CPU worker does
        states = RequestState(num_slots, 64, 64, 0, VOCABULARY, device)
        others = [_counting(base)(config, LogitsProcRequestState.from_request_state(states))] if base else []
        return DeepInferSampler.adopt(
            Sampler(config, num_slots, VOCABULARY, device, states, custom_logits_processors=others)
        )


def _counting(base: str) -> Any:
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class Plain(LogitsProcessor):
        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            del vllm_config, req_states

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            return False

        def apply(self, logits: Any, ctx: Any) -> Any:
            return logits

    kind: Any = {"LogitsProcessor": Plain, "BadWordsState": BadWordsState}[base]

    class Counting(kind):
        """Stages something in every step, whether a request has come or not."""

        num_calls = 0

        def apply_staged_writes(self) -> None:
            self.num_calls += 1

    return Counting


def _take(sampler: Any, requests: dict[int, dict[str, Any]]) -> None:
    from vllm.sampling_params import SamplingParams

    for slot, values in requests.items():
        sampler.set_prompt(slot, (slot, len(values)))
        sampler.add_request(slot, SamplingParams(**values))
    sampler.apply_staged_writes()  # in every step, as the runner does


def _flip() -> dict[str, Any]:
    """Steps of one sampler: their tokens, those of a new sampler for each, the positions drawn for, and the copies."""
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from deepinfer_kernels.sample_tokens import sample_tokens
    from deepinfer_plugin.sampling import sampler as module

    held: dict[int, dict[str, Any]] = {}
    found: list[list[int]] = []
    wanted: list[list[int]] = []
    ours, copies, positions = _sampler(4), [], []
    for number, (slots, joined) in enumerate(FLIPS):
        held.update(joined)
        fresh = _sampler(4)
        with mock.patch.object(
            SamplingStates, "apply_staged_writes", autospec=True, side_effect=SamplingStates.apply_staged_writes
        ) as copy:
            _take(ours, joined)
            copies.append(copy.call_count)
        _take(fresh, held)
        for sampler, tokens in ((ours, found), (fresh, wanted)):
            step = InputBatch.make_dummy(len(slots), len(slots), InputBuffers(4, 4, torch.device("cpu")))
            step.idx_mapping = step.expanded_idx_mapping = torch.tensor(slots)
            step.idx_mapping_np[:] = slots
            step.positions[:] = torch.arange(len(slots)) + 10 * number
            logits = torch.randn(len(slots), VOCABULARY, generator=torch.Generator().manual_seed(number))
            with torch.inference_mode(), mock.patch.object(module, "sample_tokens", wraps=sample_tokens) as draw:
                tokens.append(sampler(logits, step).sampled_token_ids.flatten().tolist())
        is_drawn, drawn_for = draw.call_args.args[1].tolist(), draw.call_args.args[4].tolist()
        positions.append([place for place, drawn in zip(drawn_for, is_drawn, strict=True) if drawn])
    return {"found": found, "wanted": wanted, "copies": copies, "positions": positions}


def _calls_of(base: str) -> int:
    """How often a processor of somebody else may make what it staged visible in three steps."""
    sampler = _sampler(2, base)
    for joined in ({0: GREEDY}, {}, {}):
        _take(sampler, joined)
    return int(sampler.logits_processors[3].num_calls)


def _count_samples(has_prefill: bool) -> list[list[int]]:
    """Sampled and rejected tokens of two requests, the second one in the middle of its prompt where there is one."""
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    sampler = _sampler(2)
    _take(sampler, {0: GREEDY, 1: GREEDY})
    sampler.req_states.prefill_len.np[:] = (1, 9 if has_prefill else 1)
    sampler.req_states.prefill_len.copy_to_uva()
    step = InputBatch.make_dummy(2, 2, InputBuffers(2, 2, torch.device("cpu")))
    step.has_prefill = has_prefill
    with torch.inference_mode():
        output = sampler(torch.zeros(2, VOCABULARY), step)
    return [output.num_sampled.tolist(), output.num_rejected.tolist()]


def _sample(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Calls of the restriction, what tells the draw which rows take noise, and the tokens beside the largest logits."""
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    from deepinfer_kernels.restrict_logits import restrict_logits
    from deepinfer_kernels.sample_tokens import sample_tokens
    from deepinfer_plugin.sampling import sampler as module

    device, num_rows = torch.device("cpu"), len(requests)
    ours = _sampler(num_rows)
    _take(ours, dict(enumerate(requests)))
    logits = torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
    step = InputBatch.make_dummy(num_rows, num_rows, InputBuffers(num_rows, num_rows, device))
    with (
        mock.patch.object(module, "restrict_logits", wraps=restrict_logits) as restrict,
        mock.patch.object(module, "sample_tokens", wraps=sample_tokens) as draw,
        torch.inference_mode(),
    ):
        tokens = ours(logits, step).sampled_token_ids.flatten()
    return {
        "restrictions": restrict.call_count,
        "temperatures": [call.args[1].tolist() for call in draw.call_args_list],
        "is_copy": draw.call_args.args[0].data_ptr() != logits.data_ptr(),
        "tokens": tokens.tolist(),
        "largest": logits.argmax(dim=1).tolist(),
    }


def main() -> None:
    """The process of its own."""
    platform_class()  # before torch, Triton and vLLM are imported
    found: dict[str, Any] = {name: _sample(requests) for name, requests in STEPS.items()}
    found["flips"] = _flip()
    found["calls"] = {base: _calls_of(base) for base in FOREIGN}
    found["counts"] = [_count_samples(has_prefill) for has_prefill in (False, True)]
    sys.stdout.write(json.dumps(found) + "\n")


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-c", "from deepinfer_plugin.sampling.test_sampler import main; main()"],
        env=envs.child_environment({"DEEPINFER_ACCELERATOR": "cpu"}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_greedy_requests_are_neither_copied_nor_restricted_and_take_no_noise(steps: dict[str, Any]) -> None:
    greedy = steps["greedy"]
    assert greedy["temperatures"] == [[0.0, 0.0]]
    assert (greedy["restrictions"], greedy["is_copy"]) == (0, False)
    assert greedy["tokens"] == greedy["largest"]


def test_a_drawn_request_beside_a_greedy_one_is_restricted_and_takes_noise(steps: dict[str, Any]) -> None:
    mixed = steps["mixed"]
    assert mixed["temperatures"] == [[0.0, 1.0]]
    assert (mixed["restrictions"], mixed["is_copy"]) == (1, True)
    assert mixed["tokens"][0] == mixed["largest"][0]


def test_a_step_without_restrictions_skips_them_and_draws_the_same(steps: dict[str, Any]) -> None:
    free, beside = steps["free"], steps["beside"]
    assert (free["restrictions"], free["is_copy"]) == (0, True)
    assert beside["restrictions"] == 1
    assert free["tokens"][0] == beside["tokens"][0]


def test_steps_in_a_row_draw_what_a_new_sampler_draws(steps: dict[str, Any]) -> None:
    """Requests join, leave, change places and take over slots; what a sampler keeps of the step before is never old."""
    flips = steps["flips"]
    assert flips["found"] == flips["wanted"]


def test_noise_is_that_of_the_position_behind_the_one_read(steps: dict[str, Any]) -> None:
    drawn = [[], [], [23], [33], [41], [51, 52], [], [72], []]
    assert steps["flips"]["positions"] == drawn


def test_parameters_are_copied_only_in_steps_that_bring_a_request(steps: dict[str, Any]) -> None:
    assert steps["flips"]["copies"] == [int(bool(joined)) for _, joined in FLIPS]


@pytest.mark.parametrize("base", FOREIGN)
def test_a_processor_of_somebody_else_is_asked_in_every_step(base: str, steps: dict[str, Any]) -> None:
    """Also one that extends a processor of vLLM's: what it stages, and when, only its author knows."""
    assert steps["calls"][base] == 3


def test_a_request_in_the_middle_of_its_prompt_samples_nothing(steps: dict[str, Any]) -> None:
    without, with_prefill = steps["counts"]
    assert without == [[1, 1], [0, 0]]
    assert with_prefill == [[1, 0], [0, 0]]
