"""Sampling parameters that vLLM refuses beside drafts, and that exact-match verification takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_plugin.wrapping import wrap

MODEL_TYPE = "deepseek_v41"


def install() -> None:
    """Let requests of our model have ``min_p`` and ``logit_bias`` beside drafts, see ``compat.PATCHES``.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    from vllm.sampling_params import SamplingParams

    wrap(SamplingParams, "_validate_spec_decode", ("self", "speculative_config"), _validate)


def _validate(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    """vLLM's rule, for other models: its rejection sampler leaves these parameters out."""
    target = getattr(speculative_config, "target_model_config", None)
    if getattr(getattr(target, "hf_config", None), "model_type", None) != MODEL_TYPE:
        original(self, speculative_config)
