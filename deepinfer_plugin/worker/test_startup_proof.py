"""The start-up proof covers the sampler: an operation without a proof in it stops the start and is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_batch_invariant.gaps import InvarianceGapError
from deepinfer_plugin import envs

VOCABULARY = 90


@pytest.fixture(autouse=True)
def _cpu_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM picks our platform on its first import, and that sets these variables: they are restored afterwards."""
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, envs.child_environment().get(name, "1" if name != "CUDA_VISIBLE_DEVICES" else ""))
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils

    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)  # as vLLM's CPU worker does


def sampler(num_slots: int) -> Any:
    """Ours, in the place of the stock one that a model runner would have built."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from deepinfer_plugin.sampling.sampler import DeepInferSampler

    device = torch.device("cpu")
    states = RequestState(num_slots, 64, 64, 0, VOCABULARY, device)
    config: Any = SimpleNamespace(reasoning_config=None, speculative_config=None)
    return DeepInferSampler.adopt(Sampler(config, num_slots, VOCABULARY, device, states))


def prove(num_slots: int = 8) -> int:
    from deepinfer_plugin.worker.startup_proof import prove_sampler

    return prove_sampler(sampler(num_slots), VOCABULARY, torch.device("cpu"))


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_every_operation_of_the_sampler_has_a_proof(num_slots: int) -> None:
    assert prove(num_slots) > 300


def _softmax_then(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda logits, *rest: original(torch.softmax(logits, dim=1).log(), *rest)


def _float_cumsum_then(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def changed(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits.double().cumsum(dim=1)
        return original(logits, *rest)

    return changed


def _exponential_race(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda logits, *rest: (logits.exp() / torch.empty_like(logits).exponential_()).argmax(dim=1)


@pytest.mark.parametrize(
    ("module", "name", "plant", "message"),
    [
        ("sampler", "restrict_logits", _softmax_then, "the sampler calls .* softmax is not in the table"),
        ("sampler", "restrict_logits", _float_cumsum_then, "cumsum adds up torch.float64, expected integers"),
        ("sampler", "sample_tokens", _exponential_race, "exponential_ is not in the table"),
        ("logprobs", "token_log_softmax", _softmax_then, "softmax is not in the table"),
    ],
)
def test_an_unproven_operation_in_the_sampler_is_refused(
    module: str, name: str, plant: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = importlib.import_module(f"deepinfer_plugin.sampling.{module}")
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    with pytest.raises(InvarianceGapError, match=message):
        prove()
