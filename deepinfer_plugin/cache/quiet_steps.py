"""Decode steps that need no block of the cache: vLLM's manager is asked at borders of blocks only.

The scheduler asks it for every running request in every step, and it looks through the blocks of every group each time:
two thirds of the time that planning a decode step takes. Between two borders nothing can come of it: no block is
missing, and none is full that could be kept for other prompts. Pages that a window has left behind are freed at the
next border instead, up to a block of tokens later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, iter_layer_specs
from vllm.v1.request import RequestStatus

from deepinfer_plugin.replay.hits import rule_of
from deepinfer_plugin.wrapping import wrap

_BORDER, _STRETCH = "_deepinfer_border", "_deepinfer_stretch"


def install() -> None:
    """Wrap vLLM's allocation in this process, once; engines without a rule of bounded replay see no difference.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    wrap(KVCacheManager, "allocate_slots", ("self", "request", "num_new_tokens"), _allocate)


def border_of(config: KVCacheConfig, hash_block_size: int) -> int | None:
    """Tokens from one border to the next, of all groups and of what prompts share; None: the model is not ours."""
    if rule_of(config) is None:
        return None
    specs = [spec for group in config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    # a ring is one block for the life of a request
    sizes = [spec.block_size for spec in specs if not isinstance(spec, CircularBufferSpec)]
    return math.gcd(hash_block_size, *sizes)


def _allocate(
    original: Callable[..., Any], manager: Any, request: Any, num_new_tokens: int, *args: Any, **options: Any
) -> Any:
    if not hasattr(manager, _BORDER):
        setattr(manager, _BORDER, border_of(manager.kv_cache_config, manager.block_pool.hash_block_size))
    border = getattr(manager, _BORDER)
    is_plain = not args and options.keys() <= {"num_lookahead_tokens"}
    if border is None or not is_plain or request.status != RequestStatus.RUNNING:
        request.__dict__.pop(_STRETCH, None)
        return original(manager, request, num_new_tokens, *args, **options)
    end = request.num_computed_tokens + num_new_tokens
    needed = min(end + options.get("num_lookahead_tokens", 0), manager.max_model_len)
    stretch = (needed // border, (needed - 1) // border, min(end, request.num_tokens) // border)
    if request.__dict__.get(_STRETCH) == stretch:
        return manager.empty_kv_cache_blocks
    found = original(manager, request, num_new_tokens, **options)
    request.__dict__[_STRETCH] = None if found is None else stretch
    return found
