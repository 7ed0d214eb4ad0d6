"""Decode steps that need no block of the cache: vLLM's manager is asked at borders of blocks only.

The scheduler asks it for every running request in every step, and it looks through the blocks of every group each time:
two thirds of the time that planning a decode step takes. Between two borders nothing can come of it: no block is
missing, none is full that could be kept for other prompts, and no window has left one behind. So blocks are given, kept
and freed in the steps in which vLLM alone would do it.
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

_BORDERS, _STRETCH = "_deepinfer_borders", "_deepinfer_stretch"
_FAR = 1 << 40  # tokens; so far in, a window has left behind all but its width


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


def window_ends(manager: Any) -> tuple[int, ...]:
    """Where windows end that a request leaves behind, in tokens from its last processed one, each once."""
    left_behind = (group.get_num_skipped_tokens(_FAR) for group in manager.coordinator.single_type_managers)
    return tuple(sorted({skipped - _FAR for skipped in left_behind if skipped > 0}))


def _allocate(
    original: Callable[..., Any], manager: Any, request: Any, num_new_tokens: int, *args: Any, **options: Any
) -> Any:
    if not hasattr(manager, _BORDERS):
        border = border_of(manager.kv_cache_config, manager.block_pool.hash_block_size)
        setattr(manager, _BORDERS, (border, window_ends(manager)))
    border, ends = getattr(manager, _BORDERS)
    is_plain = not args and options.keys() <= {"num_lookahead_tokens"}
    if border is None or not is_plain or request.status != RequestStatus.RUNNING:
        request.__dict__.pop(_STRETCH, None)
        return original(manager, request, num_new_tokens, *args, **options)
    end = request.num_computed_tokens + num_new_tokens
    needed = min(end + options.get("num_lookahead_tokens", 0), manager.max_model_len)
    processed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
    borders = (needed // border, (needed - 1) // border, min(end, request.num_tokens) // border)
    stretch = (*borders, *(max(processed + end_of_window, 0) // border for end_of_window in ends))
    if request.__dict__.get(_STRETCH) == stretch:
        return manager.empty_kv_cache_blocks
    found = original(manager, request, num_new_tokens, **options)
    request.__dict__[_STRETCH] = None if found is None else stretch
    return found
