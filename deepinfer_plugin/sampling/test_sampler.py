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


def _sample(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Calls of the restriction, what tells the draw which rows take noise, and the tokens beside the largest logits."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from deepinfer_kernels.restrict_logits import restrict_logits
    from deepinfer_kernels.sample_tokens import sample_tokens
    from deepinfer_plugin.sampling import sampler as module

    device, num_rows = torch.device("cpu"), len(requests)
    config: Any = SimpleNamespace(reasoning_config=None, speculative_config=None)
    with mock.patch.object(buffer_utils, "UvaBuffer", UvaBuffer):  # as vLLM's CPU worker does
        states = RequestState(num_rows, 64, 64, 0, VOCABULARY, device)
        ours = module.DeepInferSampler.adopt(Sampler(config, num_rows, VOCABULARY, device, states))
    for slot, values in enumerate(requests):
        ours.set_prompt(slot, (slot,))
        ours.add_request(slot, SamplingParams(**values))
    ours.apply_staged_writes()
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
    sys.stdout.write(json.dumps({name: _sample(requests) for name, requests in STEPS.items()}) + "\n")


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
