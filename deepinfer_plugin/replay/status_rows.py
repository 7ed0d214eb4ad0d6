"""Rows F5 to F7 of the status, and what a cached prefix costs at the released size."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_plugin.features import OFF, ON, Row
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.replay.memory import prefix_cost
from deepinfer_plugin.replay.settings import EncoderPolicy, ReplaySettings, TruncationMode

POLICIES = (EncoderPolicy(), EncoderPolicy(kind="segment", segment=4096), EncoderPolicy(kind="bounded"))


def with_replay(row: Row, replay: ReplaySettings) -> Row:
    """The row as the settings make it; other rows are returned as they are."""
    if row.key == "F5":
        return replace(row, state=ON if replay.is_on else OFF, why=_decoder(replay))
    if row.key == "F6":
        why = f"K = {replay.keep_tokens}; another K is another function" if replay.is_on else "needs F5"
        return replace(row, state=ON if replay.is_on else OFF, why=why)
    if row.key == "F7":
        return replace(row, state=OFF if replay.encoder.kind == "exact" else ON, why=_encoder(replay))
    return row


def cost_lines() -> list[str]:
    """One line per policy."""
    config = ModelConfig.from_dict(released_config_dict())
    return [f"{policy!s:<20} {prefix_cost(config, policy).to_text()}" for policy in POLICIES]


def _decoder(replay: ReplaySettings) -> str:
    if not replay.is_on:
        return "every prompt row passes every layer"
    if replay.mode is TruncationMode.MASK:
        return "every row is computed, windows begin at the kept ones: the oracle of compact"
    return f"decoder layers compute the last {replay.keep_tokens} rows of a prompt, whatever its chunks and hits"


def _encoder(replay: ReplaySettings) -> str:
    if replay.encoder.kind == "segment":
        return f"encoder windows are computed again at every multiple of {replay.encoder.segment}, hit or not"
    if replay.is_approximate:
        return "APPROXIMATE: a prefix hit changes the bits of an answer, by the length of the hit"
    return "encoder windows are cached with their prefix: a hit gives the bits of a full prefill"
