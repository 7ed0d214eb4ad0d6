"""Communicators for exchanges are made without the pins that sums need, and the pins are back afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_batch_invariant.pins import ENVIRONMENT_PINS, PinError
from deepinfer_plugin import envs

pytestmark = pytest.mark.usefixtures("vllm_variables")

PINS = {pin.name: pin.value for pin in ENVIRONMENT_PINS if pin.name.startswith("NCCL_")}


def pins_now() -> dict[str, str | None]:
    environment = envs.child_environment()
    return {name: environment.get(name) for name in PINS}


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's variables as vLLM pins them; ``NCCL_PROTO`` had another value before, the user's."""
    from vllm.utils import nccl

    for name in (*PINS, "NCCL_NO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    nccl.pin_nccl_env(PINS)
    for name in (*PINS, "NCCL_NO_CACHE"):  # for pytest to take back
        monkeypatch.setenv(name, envs.child_environment()[name])
    assert pins_now() == PINS


def coordinator(seen: dict[str, Any]) -> Any:
    def make_sibling_device_group(name: str) -> str:
        seen[name] = pins_now()
        return "the group"

    device = torch.device("cpu")
    return SimpleNamespace(
        world_size=2,
        rank_in_group=1,
        device=device,
        device_group="vLLM's group",
        make_sibling_device_group=make_sibling_device_group,
    )


@pytest.mark.usefixtures("pinned")
def test_a_communicator_is_made_and_first_used_without_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_plugin.model import groups

    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        return lambda ranks, x: seen.setdefault(name, (pins_now(), ranks.group, ranks.rank, tuple(x.shape)))

    monkeypatch.setattr(Ranks, "gather", note("gather"))
    monkeypatch.setattr(Ranks, "exchange", note("exchange"))
    monkeypatch.setattr(envs, "check_batch_invariant_pins", lambda device: seen.setdefault("check", pins_now()))
    made: Any = groups._make_group(coordinator(seen))
    assert made == "the group"
    free = {name: "LL" if name == "NCCL_PROTO" else None for name in PINS}
    assert list(seen) == ["deepinfer exchanges", "gather", "exchange", "check"]
    assert seen["deepinfer exchanges"] == free
    assert seen["gather"] == seen["exchange"] == (free, "the group", 1, (2, 1))
    assert seen["check"] == pins_now() == PINS


@pytest.mark.usefixtures("pinned")
def test_pins_are_back_after_an_error_and_a_lost_one_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_plugin.model import groups

    broken = coordinator({})
    broken.make_sibling_device_group = lambda name: 1 / 0
    with pytest.raises(ZeroDivisionError):
        groups._make_group(broken)
    assert pins_now() == PINS
    for pin in ENVIRONMENT_PINS:
        if "cuda" in pin.devices:
            monkeypatch.setenv(pin.name, pin.value)
    envs.check_batch_invariant_pins("cuda")
    monkeypatch.delenv("NCCL_ALGO")
    with pytest.raises(PinError, match="NCCL_ALGO is not set, expected 'ring,tree;allreduce:tree'"):
        envs.check_batch_invariant_pins("cuda")


def test_gloo_has_no_pins_and_needs_no_group_of_its_own() -> None:
    from deepinfer_plugin.model.groups import ranks_of

    seen: dict[str, Any] = {}
    assert ranks_of(coordinator(seen)) == Ranks(rank=1, size=2, group="vLLM's group")  # type: ignore[arg-type]
    assert seen == {}


def test_vllm_can_take_back_each_of_our_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.determinism import batch_invariant

    taken: dict[str, str] = {}
    for name in (
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_CUSTOM_ALLREDUCE_ALGO",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_LAUNCH_MODE",
        "VLLM_USE_AOT_COMPILE",
    ):
        monkeypatch.setenv(name, "")  # for pytest to take back
    monkeypatch.setattr(batch_invariant, "pin_nccl_env", taken.update)
    batch_invariant.override_envs_for_invariance()
    assert PINS.items() <= taken.items()
