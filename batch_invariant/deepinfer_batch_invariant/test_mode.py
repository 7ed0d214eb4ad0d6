"""Entering the mode sets its pins, and refuses a switch that somebody set otherwise."""

from collections.abc import Iterator

import pytest
import torch

from deepinfer_batch_invariant import mode
from deepinfer_batch_invariant.pins import ENVIRONMENT_PINS, PinError


@pytest.fixture(autouse=True)
def _mode_is_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mode, "_pinned_device", None)
    yield
    mode.leave()


def test_entering_sets_every_pin_and_a_second_time_changes_nothing() -> None:
    torch.set_float32_matmul_precision("high")
    environment: dict[str, str] = {}
    mode.enter("cpu", environment)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_num_threads() == 1
    assert environment == {}
    mode.enter("cpu", environment)
    assert mode.active_device() == "cpu"


def test_a_second_engine_puts_back_a_pin_that_vllm_wrote_over() -> None:
    environment: dict[str, str] = {}
    mode.enter("npu", environment)
    mode.leave()
    environment["HCCL_DETERMINISTIC"] = "false"
    mode.enter("npu", environment)
    assert environment["HCCL_DETERMINISTIC"] == "strict"


def test_leaving_forgets_the_device() -> None:
    mode.enter("cpu", {})
    mode.leave()
    assert mode.active_device() is None


def test_one_process_has_one_device() -> None:
    mode.enter("cpu", {})
    with pytest.raises(PinError, match="device is 'npu', expected 'cpu'"):
        mode.enter("npu", {})


def test_cuda_gets_the_variables_that_cublas_and_nccl_read() -> None:
    added = mode.environment_for("cuda", {})
    assert added == {pin.name: pin.value for pin in ENVIRONMENT_PINS if "cuda" in pin.devices}
    assert added["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_variable_set_to_the_pinned_value_is_left_alone() -> None:
    assert "NCCL_PROTO" not in mode.environment_for("cuda", {"NCCL_PROTO": "Simple"})


def test_a_variable_set_to_another_value_is_refused_with_both_values() -> None:
    rule = r"NCCL_ALGO is 'ring', expected 'ring,tree;allreduce:tree'.*DEEPINFER_BATCH_INVARIANT=0"
    with pytest.raises(PinError, match=rule):
        mode.environment_for("cuda", {"NCCL_ALGO": "ring"})
