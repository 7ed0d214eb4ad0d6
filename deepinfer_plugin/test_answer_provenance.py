"""Facts of an answer: hashes follow what they cover and nothing else; a certificate holds or stops the start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin import answer_provenance, provenance
from deepinfer_plugin.answer_provenance import certificate_id, content_hash, settings_hash, weights_identity
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.variables import VARIABLES

MACHINE = Capabilities(
    accelerator="cpu", device_name="x", num_devices=1, compute_capability=None, memory_mib=1, kernel_set="reference"
)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    answer_provenance.forget()


def test_the_settings_hash_follows_what_answers_depend_on() -> None:
    plain = settings_hash(Settings())
    assert settings_hash(Settings.from_envs({"DEEPINFER_ARITHMETIC": "s32"})) != plain
    assert settings_hash(Settings.from_envs({"DEEPINFER_ARITHMETIC": "ref"})) == plain
    assert settings_hash(Settings.from_envs({"DEEPINFER_LOGGING_INTERVAL_STEP": "7"})) == plain


@pytest.mark.parametrize(("limit", "covers"), [(1 << 30, "content"), (0, "headers and sizes")])
def test_the_weights_hash_follows_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, covers: str
) -> None:
    monkeypatch.setattr(answer_provenance, "WHOLE_HASH_BYTES", limit)
    model = tmp_path / "model"
    shutil.copytree(checkpoint("nano", 0), model)
    first = weights_identity(model)
    (model / "README.md").write_text("not part of the checkpoint")
    assert weights_identity(model) == first
    assert first["covers"] == covers
    shard = next(model.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    assert (weights_identity(model)["hash"] == first["hash"]) is (covers != "content")
    data[20] ^= 1
    shard.write_bytes(bytes(data))
    assert weights_identity(model)["hash"] != first["hash"]


def write(path: Path, **changed: Any) -> Path:
    body: dict[str, Any] = {
        "kind": "deepinfer determinism certificate",
        "environment": json.loads(json.dumps(provenance.collect(Settings(), MACHINE))),
        "summary": {"is_passed": True},
    } | changed
    path.write_text(json.dumps({**body, "content_hash": content_hash(body)}), encoding="utf-8")
    return path


def ask(path: Path) -> str | None:
    return certificate_id(Settings.from_envs({"DEEPINFER_CERTIFICATE": str(path)}), MACHINE)


def test_a_certificate_of_this_environment_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json")
    assert ask(path) == json.loads(path.read_text())["content_hash"]
    assert certificate_id(Settings(), MACHINE) is None


def test_a_certificate_that_does_not_hold_here_stops_the_start(tmp_path: Path) -> None:
    environment = json.loads(write(tmp_path / "a.json").read_text())["environment"]
    for section, name in (("versions", "torch"), ("machine", "device_name"), ("settings", "arithmetic")):
        other = {**environment, section: {**environment[section], name: "other"}}
        with pytest.raises(SettingError, match=rf"DEEPINFER_CERTIFICATE is .*holds for {section} {name} 'other', but"):
            ask(write(tmp_path / "b.json", environment=other))
    with pytest.raises(SettingError, match="was changed or did not pass"):
        ask(write(tmp_path / "c.json", summary={"is_passed": False}))
    changed = write(tmp_path / "d.json").read_text().replace('"cpu"', '"cPu"')
    (tmp_path / "d.json").write_text(changed)
    with pytest.raises(SettingError, match="was changed or did not pass"):
        ask(tmp_path / "d.json")
    for text in ("no json", "[]", "{}"):
        (tmp_path / "e.json").write_text(text)
        with pytest.raises(SettingError, match="cannot be read"):
            ask(tmp_path / "e.json")
    with pytest.raises(SettingError, match=r"cannot be read \(FileNotFoundError"):
        ask(tmp_path / "none.json")


def test_facts_are_noted_with_the_configuration(checkpoint: Callable[..., Path]) -> None:
    assert "error" in answer_provenance.of_answer(None)
    model = checkpoint("nano", 0)
    answer_provenance.note(Settings(), str(model))
    found = answer_provenance.of_answer(3)
    assert found["seed"] == 3
    assert found["weights"] == weights_identity(model)
    assert (found["kernel_set"], found["arithmetic"]) == ("reference", "ref")
    assert found["replay"] == {"decoder": "compact:140", "encoder": "exact"}
    segments = {"DEEPINFER_ENCODER_REPLAY": "segment:256", "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask"}
    for environ, replay in (
        (segments, {"decoder": "mask:140", "encoder": "segment:256"}),
        ({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "off"}, {"decoder": "off", "encoder": "exact"}),
    ):
        answer_provenance.note(Settings.from_envs(environ), str(model))
        assert answer_provenance.facts()["replay"] == replay
    answer_provenance.note(Settings(), str(model), num_drafts=3)
    assert (found["drafts_used"], answer_provenance.facts()["drafts_used"]) == (0, 3)
    assert found["settings_hash"] == settings_hash(Settings())
    json.dumps(found)


def test_a_checkpoint_of_the_hub_is_found_in_its_cache(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    answer_provenance.note(Settings(), "some/model", "main")
    assert answer_provenance.of_answer(0)["weights"] == {
        "hash": "",
        "covers": "nothing: some/model is not on this host",
    }
    commit = "0" * 40
    repository = tmp_path / "models--some--model"
    shutil.copytree(checkpoint("nano", 0), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    answer_provenance.note(Settings(), "some/model", "main")
    assert "weights" not in answer_provenance.facts()
    assert answer_provenance.of_answer(0)["weights"] == weights_identity(checkpoint("nano", 0))
