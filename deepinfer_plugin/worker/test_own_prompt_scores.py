"""Workers of every device score prompts of our model with our class, and those of other models with vLLM's."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("vllm_variables")


class StockWorker:
    """Stands in for a worker of vLLM: loading builds the runner's scorer."""

    def __init__(self, model_state: object, *, is_last_stage: bool) -> None:
        self.model_runner = SimpleNamespace(model_state=model_state, prompt_logprobs_worker=None)
        self.is_last_stage = is_last_stage

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

        if self.is_last_stage:
            self.model_runner.prompt_logprobs_worker = PromptLogprobsWorker(4, "cpu", "raw_logits")


def loaded(model_state: object, *, is_last_stage: bool = True) -> Any:
    from deepinfer_plugin.worker.own_prompt_scores import OwnPromptScores

    class Worker(OwnPromptScores, StockWorker):
        pass

    worker = Worker(model_state, is_last_stage=is_last_stage)
    worker.load_model(load_dummy_weights=True)
    return worker.model_runner.prompt_logprobs_worker


def test_prompts_of_our_model_are_scored_by_our_class() -> None:
    from deepinfer_plugin.sampling.prompt_logprobs import PromptLogprobs
    from deepinfer_plugin.worker.model_state import DeepInferModelState

    scorer = loaded(DeepInferModelState.__new__(DeepInferModelState))
    assert type(scorer) is PromptLogprobs
    assert (scorer.max_num_reqs, scorer.logprobs_mode) == (4, "raw_logits")


def test_prompts_of_other_models_are_left_to_vllm() -> None:
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    assert type(loaded(object())) is PromptLogprobsWorker


def test_a_stage_that_scores_nothing_has_no_scorer() -> None:
    from deepinfer_plugin.worker.model_state import DeepInferModelState

    assert loaded(DeepInferModelState.__new__(DeepInferModelState), is_last_stage=False) is None


def test_the_workers_of_both_devices_load_this_way() -> None:
    from deepinfer_plugin.worker.cpu_worker import DeepInferCpuWorker
    from deepinfer_plugin.worker.cuda_worker import DeepInferCudaWorker
    from deepinfer_plugin.worker.own_prompt_scores import OwnPromptScores

    for worker in (DeepInferCpuWorker, DeepInferCudaWorker):
        bases = [base.__module__.partition(".")[0] for base in worker.__mro__]
        assert worker.__mro__.index(OwnPromptScores) < bases.index("vllm"), "vLLM's own loading comes first"


@pytest.fixture
def cuda_platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our CUDA platform above a stand-in of vLLM's, whose module needs a driver."""

    class CudaPlatform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            if vllm_config.parallel_config.worker_cls == "auto":
                vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"

    stock = ModuleType("vllm.platforms.cuda")
    stock.CudaPlatform = CudaPlatform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", stock)
    monkeypatch.delitem(sys.modules, "deepinfer_plugin.platforms.cuda", raising=False)
    module = importlib.import_module("deepinfer_plugin.platforms.cuda")
    monkeypatch.setattr(module.DeepInferCudaPlatform, "_check_devices", lambda vllm_config: None)  # there are none here
    yield module
    monkeypatch.delitem(sys.modules, "deepinfer_plugin.platforms.cuda")


def vllm_config(model_type: str, worker_cls: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)),
        parallel_config=SimpleNamespace(worker_cls=worker_cls, disable_custom_all_reduce=False),
        load_config=SimpleNamespace(load_format="auto"),
        additional_config={},
    )


@pytest.mark.parametrize(
    ("model_type", "worker_cls", "expected"),
    [
        ("deepseek_v41", "auto", "deepinfer_plugin.worker.cuda_worker.DeepInferCudaWorker"),
        ("llama", "auto", "vllm.v1.worker.gpu_worker.Worker"),
        ("deepseek_v41", "theirs.Worker", "theirs.Worker"),
    ],
)
def test_cuda_serves_our_model_with_our_worker(
    cuda_platform: Any, model_type: str, worker_cls: str, expected: str
) -> None:
    config = vllm_config(model_type, worker_cls)
    for _ in range(2):  # vLLM asks several times
        cuda_platform.DeepInferCudaPlatform.check_and_update_config(config)
        assert config.parallel_config.worker_cls == expected
        assert config.parallel_config.disable_custom_all_reduce == (model_type == "deepseek_v41")
        assert (config.load_config.load_format == "deepinfer") == expected.startswith("deepinfer_plugin.")
    module, _, name = expected.rpartition(".")
    assert worker_cls != "auto" or hasattr(importlib.import_module(module), name)
