"""Compile the Triton kernels of a call without a GPU: the launchers run on CPU tensors, nothing is launched.

For tests. The launches are recorded with their arguments and compiled for any target with the specialisation a GPU
would see: constants, pointers and strides that are multiples of 16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_WARP_SIZE = 32
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: the kernel and its arguments by name."""

    kernel: Any  # JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Run ``call`` with launching replaced by recording; the tensors it makes hold nothing."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        names = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        assert sorted(arguments) == sorted(names), (kernel.__name__, sorted(set(names) ^ set(arguments)))
        launches.append(Launch(kernel, arguments, options))

    with patch.object(JITFunction, "run", record):
        call()
    return launches


def _divisibility() -> list[list[object]]:
    return [["tt.divisibility", 16]]


def compile_launch(launch: Launch, capability: int) -> Any:
    """Compile for compute capability ``capability`` (90, 100); returns Triton's CompiledKernel."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr"
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            kind, attributes[(index,)] = _POINTERS[value.dtype], _divisibility()
        elif isinstance(value, TensorDescriptor):
            kind = f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, int):
            kind = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = _divisibility()
        elif isinstance(value, float):
            kind = "fp32"
        else:
            raise AssertionError(f"{launch.name}: {parameter.name} is {type(value)}")
        signature[parameter.name] = kind
    make_source = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    source = make_source(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton_compile(source, target=GPUTarget("cuda", capability, _WARP_SIZE), options=launch.options)
