"""Both sides of every refusal of the replay settings."""

from __future__ import annotations

import pytest

from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.replay.settings import EncoderPolicy, ReplaySettings, TruncationMode
from deepinfer_plugin.settings import Settings


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("exact", EncoderPolicy()),
        ("bounded", EncoderPolicy(kind="bounded")),
        ("segment:4096", EncoderPolicy(kind="segment", segment=4096)),
    ],
)
def test_every_policy_is_read_and_written_back(text: str, policy: EncoderPolicy) -> None:
    assert EncoderPolicy.parse(text) == policy
    assert str(policy) == text


def test_every_mode_word_has_its_member() -> None:
    for word in ("off", "mask", "compact"):
        assert Settings.from_envs({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": word}).replay.mode.value == word


def test_the_default_is_compact_with_the_advised_number_of_rows() -> None:
    assert Settings.from_envs({}).replay == ReplaySettings(mode=TruncationMode.COMPACT, keep_tokens=140)


def test_variables_that_contradict_each_other_are_refused_when_they_are_read() -> None:
    with pytest.raises(SettingError, match="DEEPINFER_ENCODER_REPLAY is 'bounded'"):
        Settings.from_envs({"DEEPINFER_ENCODER_REPLAY": "bounded"})
    allowed = {"DEEPINFER_ENCODER_REPLAY": "bounded", "DEEPINFER_ALLOW_APPROXIMATE_REPLAY": "1"}
    assert Settings.from_envs(allowed).to_json()["encoder_replay"] == "bounded"


def test_bounded_is_refused_unless_it_is_allowed() -> None:
    bounded = EncoderPolicy(kind="bounded")
    with pytest.raises(SettingError, match="DEEPINFER_ALLOW_APPROXIMATE_REPLAY=1"):
        ReplaySettings(encoder=bounded)
    settings = ReplaySettings(encoder=bounded, allow_approximate=True)
    assert settings.is_approximate
    assert not ReplaySettings(allow_approximate=True).is_approximate


def test_an_encoder_policy_needs_a_mode() -> None:
    with pytest.raises(SettingError, match=r"segment:64.*DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE is 'off'"):
        ReplaySettings(mode=TruncationMode.OFF, encoder=EncoderPolicy.parse("segment:64"))


@pytest.mark.parametrize(("backtracking", "drafts", "smallest"), [(0, 0, 129), (0, 5, 134), (9, 5, 137)])
def test_fewer_rows_than_window_and_backtracking_are_refused(backtracking: int, drafts: int, smallest: int) -> None:
    enough = ReplaySettings(keep_tokens=smallest, max_backtracking_tokens=backtracking)
    enough.check_model(128, drafts, 128)
    too_few = ReplaySettings(keep_tokens=smallest - 1, max_backtracking_tokens=backtracking)
    with pytest.raises(SettingError, match=rf"is {smallest - 1}, expected at least {smallest}: window 128"):
        too_few.check_model(128, drafts, 128)
    off = ReplaySettings(mode=TruncationMode.OFF, keep_tokens=smallest - 1, max_backtracking_tokens=backtracking)
    off.check_model(128, drafts, 128)


def test_a_segment_is_a_multiple_of_the_block() -> None:
    settings = ReplaySettings(encoder=EncoderPolicy.parse("segment:192"))
    settings.check_model(128, 0, 64)
    with pytest.raises(SettingError, match="expected a multiple of the block size 128"):
        settings.check_model(128, 0, 128)
