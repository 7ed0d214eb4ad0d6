"""Which kernels are launched before their predecessor has ended. Devices are stand-ins."""

from collections.abc import Iterator

import pytest
import torch

from deepinfer_kernels import dependent_launch
from deepinfer_kernels.dependent_launch import launch_in_turn, starts_early

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dependent_launch, "_in_turn", False)
    starts_early.cache_clear()
    yield
    starts_early.cache_clear()


def give(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_start_early_where_the_device_can(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, capability)
    assert starts_early(GPU) is expected
    assert starts_early(torch.device("cpu")) is False


def test_they_start_in_turn_once_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, (9, 0))
    assert starts_early(GPU)
    launch_in_turn()
    assert not starts_early(GPU)
