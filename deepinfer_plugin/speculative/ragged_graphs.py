"""CUDA graphs for steps whose requests verify different numbers of drafts.

vLLM captures a model's decode graphs for requests of ``1 + drafts`` rows each. Its dispatcher finds no graph for a step
in which one request has fewer, nor for one in which all have equally fewer, and runs it eagerly: whatever is saved by
verifying less is lost many times over between launches. It can also capture graphs for any mix of 1 to ``1 + drafts``
rows, but only beside its own adaptive verification. Our caches' metadata refer to the runner's buffers and plan nothing
from lengths on the host, so such a graph computes any mix: rows find their request by ``query_start_loc``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_plugin.wrapping import wrap

MODEL_TYPE = "deepseek_v41"


def install() -> None:
    """Let our model's graphs be captured for ragged steps, see ``compat.PATCHES``.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    wrap(
        ModelCudaGraphManager,
        "__init__",
        (
            "self",
            "vllm_config",
            "device",
            "cudagraph_mode",
            "decode_query_len",
            "lora_capture_cases",
            "varlen_decode",
        ),
        _init,
    )


def _init(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    from deepinfer_plugin import variables
    from deepinfer_plugin.settings import Settings

    hf_config = vllm_config.model_config.hf_config
    if hf_config.model_type == MODEL_TYPE and Settings.from_envs()[variables.ENABLE_MTP_VARLEN]:
        kwargs["varlen_decode"] = True
    original(self, vllm_config, *args, **kwargs)
