"""Switches that batch-invariant mode needs, as data: what is set, to which value, and why."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepinfer_kernels.errors import DeepInferError


class PinError(DeepInferError):
    """A switch that the mode needs has another value, and somebody chose that value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPin:
    """A variable of the process environment."""

    name: str
    value: str
    devices: frozenset[str]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPin:
    """A switch of PyTorch."""

    name: str
    read: Callable[[], object]
    write: Callable[[], None]
    value: object
    devices: frozenset[str]
    why: str


_CUDA = frozenset({"cuda"})
_NPU = frozenset({"npu"})
_ANY = frozenset({"cpu", "cuda", "npu"})

ENVIRONMENT_PINS: tuple[EnvironmentPin, ...] = (
    EnvironmentPin(
        name="CUBLAS_WORKSPACE_CONFIG",
        value=":16:8",
        devices=_CUDA,
        why="without a workspace cuBLAS cannot split the depth of a product by its number of rows",
    ),
    EnvironmentPin(
        name="CUBLASLT_WORKSPACE_SIZE",
        value="1",
        devices=_CUDA,
        why="the same for cuBLASLt",
    ),
    EnvironmentPin(
        name="NCCL_ALGO",
        value="ring,tree;allreduce:tree",
        devices=_CUDA,
        why="NCCL otherwise picks ring or tree, two orders of a sum, by message size",
    ),
    EnvironmentPin(
        name="NCCL_PROTO",
        value="Simple",
        devices=_CUDA,
        why="the protocol is otherwise chosen by message size",
    ),
    EnvironmentPin(
        name="NCCL_MAX_NCHANNELS",
        value="1",
        devices=_CUDA,
        why="the number of channels, which cuts the message, otherwise follows its size",
    ),
    EnvironmentPin(
        name="NCCL_NVLS_ENABLE",
        value="0",
        devices=_CUDA,
        why="sums in the switch have no documented order",
    ),
    EnvironmentPin(
        name="HCCL_DETERMINISTIC",
        value="strict",
        devices=_NPU,
        why="fixes the order of HCCL's sums",
    ),
)


def _set_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def _set_bf16_reduction() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _set_one_thread() -> None:
    torch.set_num_threads(1)


TORCH_PINS: tuple[TorchPin, ...] = (
    TorchPin(
        name="torch.float32_matmul_precision",
        read=torch.get_float32_matmul_precision,
        write=_set_precision,
        value="highest",
        devices=_ANY,
        why="TF32 and bf16 passes round the operands of fp32 products",
    ),
    TorchPin(
        name="torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        read=lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        write=_set_bf16_reduction,
        value=False,
        devices=_CUDA,
        why="partial sums of a split product would be rounded to bf16",
    ),
    TorchPin(
        name="torch.num_threads",
        read=torch.get_num_threads,
        write=_set_one_thread,
        value=1,
        devices=frozenset({"cpu"}),
        why="threads cut a product and a sum by their number and the size of the work",
    ),
)
