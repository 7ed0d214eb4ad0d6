"""Programmatic dependent launch: a kernel is launched while the one before it ends, and waits for its results.

Every program of such a kernel calls ``wait_for_inputs`` before it reads or writes anything but weights. So each kernel
ends after the one before it has ended, and memory that one kernel reads may be reused by any later one. SM90 and later.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

_FIRST_CAPABILITY = 9


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on ``device`` are launched before their predecessor has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _FIRST_CAPABILITY


@triton.jit
def wait_for_inputs(IS_EARLY: tl.constexpr):
    """Return once the kernels before have ended and what they wrote is visible."""
    if IS_EARLY:
        gdc_wait()
