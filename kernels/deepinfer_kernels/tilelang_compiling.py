"""Compile the TileLang kernels of a call without a GPU: the launchers run on CPU tensors, nothing is launched.

For tests. A launch is checked against the signature of its kernel, lowered to CUDA source for any target, and that
source is compiled to machine code by NVRTC, the compiler library that PyTorch brings; it needs no CUDA toolkit.
"""

# mypy: allow-untyped-calls
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tilelang
import torch
from tilelang.contrib import nvrtc
from tilelang.engine.lower import lower
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
from tilelang.jit import JITImpl
from tvm.arith import Analyzer
from tvm.target import Target
from tvm.tirx import Var

from deepinfer_kernels.compiling import launches_of
from deepinfer_kernels.tilelang_options import DEVICE_FLAGS, PASSES


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """One launch of a TileLang kernel: the function that builds it, and the constants it was built with."""

    builder: Any  # JITImpl
    constants: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.builder.func.__name__)


def tile_launches_of(call: Callable[[], object]) -> list[TileLaunch]:
    """Run ``call`` with launching replaced by recording; every argument must fit the kernel it is for."""
    launches: list[TileLaunch] = []

    def record(builder: Any, *constants: Any) -> Callable[..., None]:
        launch = TileLaunch(builder, constants)
        launches.append(launch)
        return lambda *arguments: _check_arguments(launch, arguments)

    with patch.object(JITImpl, "__call__", record):
        launches_of(call)
    return launches


def _check_arguments(launch: TileLaunch, arguments: tuple[Any, ...]) -> None:
    """Fail unless tensors have the dtype, the fixed extents and the order in memory that the kernel reads."""
    function = launch.builder.get_tir(*launch.constants)
    assert len(arguments) == len(function.params), launch.name
    dynamic: dict[Any, int] = {}
    for parameter, argument in zip(function.params, arguments, strict=True):
        label = f"{launch.name}: {parameter.name}"
        if parameter not in function.buffer_map:
            assert isinstance(argument, int | float), label
            continue
        buffer = function.buffer_map[parameter]
        assert isinstance(argument, torch.Tensor), label
        assert argument.is_contiguous(), label
        assert str(argument.dtype).removeprefix("torch.") == str(buffer.dtype), label
        assert argument.dim() == len(buffer.shape), label
        for extent, expected in zip(argument.shape, buffer.shape, strict=True):
            wanted = dynamic.setdefault(expected, extent) if isinstance(expected, Var) else int(expected)
            assert extent == wanted, f"{label} is {list(argument.shape)}, expected {list(buffer.shape)}"


def to_cuda(launch: TileLaunch, capability: int) -> str:
    """CUDA source of the kernel for compute capability ``capability`` (90, 100)."""
    target = Target({"kind": "cuda", "arch": f"sm_{capability}a"})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=PASSES), target:
        return str(lower(launch.builder.get_tir(*launch.constants), target=target).kernel_source)


def to_machine_code(source: str, capability: int) -> bytes:
    """Compile CUDA source of ``to_cuda`` for the same capability."""
    headers = importlib.metadata.files("nvidia-cuda-runtime") or []
    folder = next(Path(str(file.locate())).parent for file in headers if file.name == "cuda_fp16.h")
    includes = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, folder, folder / "cccl")]
    options = ["-std=c++20", *includes, *DEVICE_FLAGS]
    return bytes(nvrtc.compile_cuda(source, "cubin", capability, options, verbose=True))


def value_of(expression: Any) -> int:
    """The integer that an index of a kernel is, where all that it is made of is known."""
    return int(Analyzer().simplify(expression))
