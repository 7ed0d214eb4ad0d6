"""The CUDA worker refuses to sleep so deeply that state is lost which no weight file holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.errors import ConfigError

pytestmark = pytest.mark.usefixtures("vllm_variables")


@pytest.mark.parametrize(
    ("model_type", "level", "is_refused"),
    [
        ("deepseek_v41", 1, False),
        ("deepseek_v41", 2, True),
        ("llama", 2, False),
    ],
)
def test_the_level_that_discards_weights_is_refused_for_our_model(
    model_type: str, level: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from deepinfer_plugin.worker import cuda_worker

    slept: list[int] = []
    monkeypatch.setattr(Worker, "sleep", lambda self, level: slept.append(level))
    monkeypatch.setattr(cuda_worker, "serves_our_model", lambda config: config.model_type == "deepseek_v41")
    worker: Any = cuda_worker.DeepInferCudaWorker.__new__(cuda_worker.DeepInferCudaWorker)
    worker.vllm_config = SimpleNamespace(model_type=model_type)
    if is_refused:
        with pytest.raises(ConfigError, match="sleep: level is 2, expected 1"):
            worker.sleep(level)
    else:
        worker.sleep(level)
    assert slept == ([] if is_refused else [level])
