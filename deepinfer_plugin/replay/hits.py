"""Limits prefix hits, so that every decoder row is computed and encoder windows are where the policy wants them.

vLLM's manager takes a limit, but no extension point passes one for a model: its lookup is wrapped (``compat.PATCHES``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, iter_layer_specs

from deepinfer_plugin.replay.requests import needs_every_row
from deepinfer_plugin.replay.window import ReplayRule
from deepinfer_plugin.wrapping import wrap


def rule_of(config: KVCacheConfig) -> ReplayRule | None:
    """The rule that the caches of an engine carry; None where none is computed again after a hit."""
    for group in config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            rule = getattr(spec, "rule", None)
            if isinstance(rule, ReplayRule):
                return rule
    return None


def install() -> None:
    """Wrap vLLM's lookup in this process, once; engines without a rule see no difference.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    parameters = ("self", "request", "max_cache_hit_length")
    wrap(KVCacheManager, "get_computed_blocks", parameters, _limited, has_no_other=True)


def _limited(original: Callable[..., Any], manager: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
    look_up = functools.partial(original, manager)
    rule = rule_of(manager.kv_cache_config)
    limit = None
    if rule is not None:
        # the prompt's own length: a request that resumes after preemption keeps the floor of its prompt
        limit = rule.hit_limit(request.num_prompt_tokens, needs_every_row=needs_every_row(request.sampling_params))
    if rule is None or limit is None:
        return look_up(request, max_cache_hit_length)
    if max_cache_hit_length is not None:
        limit = min(limit, max_cache_hit_length)
    limit = min(limit, request.num_tokens - 1)
    while True:
        blocks, length, boundary = look_up(request, limit)
        if rule.segment and length % rule.segment:
            blocks, length, boundary = look_up(request, length - length % rule.segment)
        assert length <= limit, (length, limit)
        end = replayed_image_end(request.mm_features, length, rule)
        if end is None:
            return blocks, length, boundary
        limit = end - 1


def replayed_image_end(features: Sequence[Any], hit: int, rule: ReplayRule) -> int | None:
    """End of an image that a hit covers and whose rows are replayed behind it; None for none.

    vLLM sends a worker no patches of an image that a hit covers. A shorter hit leaves the end of the image to be
    computed, and its patches come.

    Args:
        features: of the request, as vLLM knows images.
        hit: length of the hit.
        rule: says whether windows are replayed before the end of a hit.
    """
    if hit == 0 or rule.caches_encoder_windows:
        return None
    ends = [feature.mm_position.offset + feature.mm_position.length for feature in features]
    return next((end for end in ends if hit - rule.window < end <= hit), None)
