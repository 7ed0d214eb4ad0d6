"""The start-up proof covers the sampler: an operation without a proof in it stops the start and is named.

The sampler's kernels need Triton's interpreter from the first import on, so everything runs in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.platforms.detect import platform_class

VOCABULARY = 90
SLOTS = (1, 2, 8)
TIMEOUT_S = 300
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def _softmax_then(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits, *rest: original(logits.softmax(dim=1).log(), *rest)


def _float_cumsum_then(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(logits: Any, *rest: Any) -> Any:
        logits.double().cumsum(dim=1)
        return original(logits, *rest)

    return changed


def _exponential_race(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits, *rest: (logits.exp() / logits.clone().exponential_()).argmax(dim=1)


# Name: module and function that the fault changes, the change, and what the refusal says.
PLANTED: dict[str, tuple[str, str, Change, str]] = {
    "softmax": ("sampler", "restrict_logits", _softmax_then, "the sampler calls .* softmax is not in the table"),
    "float sum": ("sampler", "restrict_logits", _float_cumsum_then, "cumsum adds up torch.float64, expected integers"),
    "shared noise": ("sampler", "sample_tokens", _exponential_race, "exponential_ is not in the table"),
    "library scores": ("logprobs", "token_log_softmax", _softmax_then, "softmax is not in the table"),
}


def _prove(num_slots: int) -> int:
    """Ours, in the place of the stock sampler that a model runner would have built."""
    import torch
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from deepinfer_plugin.sampling.sampler import DeepInferSampler
    from deepinfer_plugin.worker.startup_proof import prove_sampler

    device = torch.device("cpu")
    config: Any = SimpleNamespace(reasoning_config=None, speculative_config=None)
    with mock.patch.object(buffer_utils, "UvaBuffer", UvaBuffer):  # as vLLM's CPU worker does
        states = RequestState(num_slots, 64, 64, 0, VOCABULARY, device)
        sampler = DeepInferSampler.adopt(Sampler(config, num_slots, VOCABULARY, device, states))
    return prove_sampler(sampler, VOCABULARY, device)


def _prove_all() -> dict[str, Any]:
    """Operations that were looked up by number of slots, and the refusal of every planted operation, "" for none."""
    from deepinfer_batch_invariant.gaps import InvarianceGapError

    found: dict[str, Any] = {str(num_slots): _prove(num_slots) for num_slots in SLOTS}
    for name, (module, function, change, _) in PLANTED.items():
        owner = importlib.import_module(f"deepinfer_plugin.sampling.{module}")
        with mock.patch.object(owner, function, change(getattr(owner, function))):
            try:
                _prove(8)
                found[name] = ""
            except InvarianceGapError as error:
                found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def proofs() -> dict[str, Any]:
    code = "from deepinfer_plugin.worker.test_startup_proof import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=envs.child_environment({"DEEPINFER_ACCELERATOR": "cpu"}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The process of its own."""
    platform_class()  # before torch, Triton and vLLM are imported
    sys.stdout.write(json.dumps(_prove_all()) + "\n")


@pytest.mark.parametrize("num_slots", SLOTS)
def test_every_operation_of_the_sampler_has_a_proof(num_slots: int, proofs: dict[str, Any]) -> None:
    assert proofs[str(num_slots)] > 300


@pytest.mark.parametrize("name", PLANTED)
def test_an_unproven_operation_in_the_sampler_is_refused(name: str, proofs: dict[str, Any]) -> None:
    assert re.search(PLANTED[name][3], proofs[name])
