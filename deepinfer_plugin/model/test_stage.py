"""Stages of a pipeline hold every tensor once, and are cut where no layer reads entries of a stage before its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.shares import Shares
from deepinfer_plugin.model.stage import PARTITION, Stage, stages_of
from deepinfer_plugin.model.tensors import expected_tensors
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.reference.tiny_config import config_dict
from deepinfer_plugin.sizing.memory import rank_weights

pytestmark = pytest.mark.usefixtures("vllm_variables")


@pytest.fixture
def tiny() -> ModelConfig:
    return ModelConfig.from_dict(config_dict("tiny"))


def test_without_a_pipeline_everything_is_here(tiny: ModelConfig) -> None:
    stage = Stage()
    assert stage.is_first
    assert stage.is_last
    assert all(stage.has_tensor(name) for name in expected_tensors(tiny))


@pytest.mark.parametrize(("partition", "count"), [(None, 2), ("4,6", 2), ("4,1,5", 3)])
def test_every_tensor_is_on_one_stage(
    tiny: ModelConfig, partition: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if partition is not None:
        monkeypatch.setenv(PARTITION, partition)
    stages, specs = stages_of(tiny, count), expected_tensors(tiny)
    for name, spec in specs.items():
        holders = [stage for stage in stages if Shares(tiny, Parallel(stage=stage)).rows(name, spec) is not None]
        assert len(holders) == 1, name
    assert "embed.weight" in specs
    assert stages[0].has_tensor("embed.weight")
    assert stages[0].has_tensor("vision.norm.weight")
    assert stages[-1].has_tensor("norm.weight")
    assert stages[-1].has_tensor("mtp.0.main_norm.weight")
    assert [stage.is_first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.is_last for stage in stages] == [False] * (count - 1) + [True]

    def num_bytes(**stage: Stage) -> int:
        return sum(rank_weights(tiny, 1, 1, has_drafts=True, has_images=True, **stage).values())

    assert sum(num_bytes(stage=stage) for stage in stages) == num_bytes()


@pytest.mark.parametrize(
    ("partition", "count", "ends"), [("3,7", 2, r"\[3\]"), ("2,8", 2, r"\[2\]"), ("4,2,4", 3, r"\[4, 6\]")]
)
def test_a_cut_between_a_layer_and_its_entries_is_refused(
    tiny: ModelConfig, partition: str, count: int, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARTITION, partition)
    with pytest.raises(ConfigError, match=rf"layers {ends}, expected each in front of another one of \[4, 5\]"):
        stages_of(tiny, count)


@pytest.mark.parametrize("partition", ["a,b", "5,6", "10", "5,0,5"])
def test_numbers_of_layers_that_are_none_are_refused(
    tiny: ModelConfig, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARTITION, partition)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is|VLLM_PP_LAYER_PARTITION: "):
        stages_of(tiny, partition.count(",") + 1 if partition == "5,0,5" else 2)


def test_the_released_model_is_cut_into_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder and decoder; further stages want numbers of layers."""
    released = ModelConfig.from_dict(released_config_dict())
    assert [(stage.first, stage.end) for stage in stages_of(released, 2)] == [(0, 20), (20, 40)]
    with pytest.raises(ConfigError, match=r"as 20,20 for two stages"):
        stages_of(released, 4)
    monkeypatch.setenv(PARTITION, "8,6,6,20")
    assert [stage.first for stage in stages_of(released, 4)] == [0, 8, 14, 20]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"drafts": object()}, "exact", "speculative_config"),
    ({"eplb": True}, "exact", "enable_eplb"),
    ({"kept_eplb": True}, "exact", "enable_eplb"),
    ({"replicas": 2}, "exact", "data_parallel_size"),
    ({}, "segment:32", "DEEPINFER_ENCODER_REPLAY=segment:32"),
]


@pytest.mark.parametrize(("options", "encoder", "named"), REFUSED)
def test_what_needs_all_layers_in_one_process_is_refused(
    options: dict[str, Any], encoder: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.parallel import EPLBConfig
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    from deepinfer_plugin.eplb.options import keep_where_vllm_has_no_balancer
    from deepinfer_plugin.model.checks import check_stages

    hf_config = DeepseekV41Config(**config_dict("tiny"))

    def engine(
        stages: int, drafts: object = None, *, eplb: bool = False, kept_eplb: bool = False, replicas: int = 1
    ) -> Any:
        sizes = {"pipeline_parallel_size": stages, "data_parallel_size": replicas}
        args = SimpleNamespace(enable_eplb=eplb or kept_eplb, eplb_config=EPLBConfig(), additional_config={})
        if kept_eplb:
            keep_where_vllm_has_no_balancer(args)
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**sizes, enable_eplb=args.enable_eplb, eplb_config=args.eplb_config),
            additional_config=args.additional_config,
            speculative_config=drafts,
            model_config=SimpleNamespace(hf_config=hf_config),
        )

    monkeypatch.setenv("DEEPINFER_ENCODER_REPLAY", encoder)
    check_stages(engine(1, **options))
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size is 2 with {named}, which"):
        check_stages(engine(2, **options))
    monkeypatch.delenv("DEEPINFER_ENCODER_REPLAY")
    check_stages(engine(2))
