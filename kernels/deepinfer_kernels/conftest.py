"""Fixtures of the kernel tests: the devices, and memory from torch.empty that is never zero by luck."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU: torch.cuda.is_available() is False")
    return name


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.numel() > 0 and tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(0xAA)
    return tensor


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        return _poison(allocate(*args, **kwargs))

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and its relatives return: NaN for floats, 0xAA bytes otherwise."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
