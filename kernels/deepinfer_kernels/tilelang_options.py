"""How TileLang compiles our kernels: the same options for every one."""

from typing import Any

import torch

# Products and sums are rounded one by one, as in the references.
DEVICE_FLAGS = ["--fmad=false"]

# A kernel reads nothing behind its inputs, so bounds are not checked again at every load. Copies and products stay in
# one group of threads: splitting them is left to kernels that are written for it. Rows of a tile are different pairs,
# which the compiler cannot know when it looks for two threads that write one place.
PASSES: dict[str, Any] = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_data_race_check": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_vectorize_256": True,
    "tl.device_compile_flags": DEVICE_FLAGS,
}

_TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def type_of(dtype: torch.dtype) -> str:
    """TileLang's name of bf16 or fp32."""
    return _TYPES[dtype]
