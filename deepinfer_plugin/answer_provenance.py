"""What an answer can say of itself on request: certificate, seed, kernel set, replay, drafts, weights, settings.

The facts are the same for every answer of a process but for the seed. They are noted where the process makes its
engine's configuration (``translate``), since only there the checkpoint is known. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_plugin import provenance, variables
from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.settings import Settings

CERTIFICATE_KIND = "deepinfer determinism certificate"
WHOLE_HASH_BYTES = 1 << 30  # larger checkpoints would hold up the first answer for minutes
_MAX_HEADER_BYTES = 1 << 27


@dataclass(slots=True)
class _Noted:
    """The facts of this process, None until its engine's configuration is made, or where another model serves."""

    facts: dict[str, Any] | None = None
    model: str = ""
    revision: str | None = None


_NOTED = _Noted()


def content_hash(certificate: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the field ``content_hash``, as JSON with sorted keys, no blanks, UTF-8."""
    body = {name: value for name, value in certificate.items() if name != "content_hash"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def settings_hash(settings: Settings) -> str:
    """SHA-256 of the settings that answers may depend on."""
    return hashlib.sha256(json.dumps(settings.answer_settings(), sort_keys=True).encode()).hexdigest()


def weights_identity(model: Path) -> dict[str, str]:
    """A hash of the checkpoint, and what it covers.

    Args:
        model: folder of the checkpoint.

    Returns:
        ``hash``: SHA-256 over name and SHA-256 of each .json and .safetensors file; ``covers``: ``content``, or
        ``headers and sizes`` where the tensors are too large to be read at start.
    """
    paths = [path for path in sorted(model.iterdir()) if path.suffix in (".json", ".safetensors")]
    is_whole = sum(path.stat().st_size for path in paths) <= WHOLE_HASH_BYTES
    whole = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            if is_whole or path.suffix == ".json":
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                length = file.read(8)
                head = length + file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))
                digest = f"{hashlib.sha256(head).hexdigest()} {path.stat().st_size}"
        whole.update(f"{path.name} {digest}\n".encode())
    return {"hash": whole.hexdigest(), "covers": "content" if is_whole else "headers and sizes"}


def certificate_id(settings: Settings, capabilities: Capabilities) -> str | None:
    """Content hash of the certificate that DEEPINFER_CERTIFICATE names; None where none is named.

    Raises:
        SettingError: the file is no certificate, it was changed or failed, or it holds for another environment.
    """
    path = settings[variables.CERTIFICATE]
    if path is None:
        return None
    advice = "name one that was made here, or unset it"
    where = f"certificate: {settings.environment.describe(variables.CERTIFICATE)}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found, environment = value["content_hash"], value["environment"]
        is_sound = value["kind"] == CERTIFICATE_KIND and found == content_hash(value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{where}, which cannot be read ({type(error).__name__}: {error}); {advice}") from None
    if not is_sound or not value["summary"]["is_passed"]:
        raise SettingError(f"{where}, which was changed or did not pass, expected a passed certificate; {advice}")
    here = json.loads(json.dumps(provenance.collect(settings, capabilities)))
    pairs = [("versions", name) for name in here["versions"]]
    pairs += [("machine", name) for name in ("accelerator", "device_name", "kernel_set")]
    pairs += [("settings", name) for name in settings.answer_settings()]
    for section, name in pairs:
        theirs, ours = environment[section].get(name), here[section].get(name)
        if theirs != ours:
            raise SettingError(
                f"{where}, which holds for {section} {name} {theirs!r}, but here it is {ours!r}; {advice}"
            )
    return str(found)


def note(settings: Settings, model: str, revision: str | None = None, *, num_drafts: int = 0) -> None:
    """Note the facts of this process.

    Args:
        settings: those of the process.
        model: folder of the checkpoint that is served, or its name on the Hub.
        revision: of a name on the Hub.
        num_drafts: tokens drafted in a step.

    Raises:
        SettingError: the certificate does not hold here.
        PlatformError: the machine is refused.
    """
    decision = current_decision()
    if decision is None:
        raise PlatformError("answer_provenance: DEEPINFER_DISABLE is 1, expected 0; unset it")
    capabilities = Capabilities.from_decision(decision)
    versions = provenance.versions()
    replay = settings.replay
    _NOTED.model, _NOTED.revision = model, revision
    _NOTED.facts = {
        "certificate": certificate_id(settings, capabilities),
        "kernel_set": capabilities.kernel_set,
        "arithmetic": settings.arithmetic.value,
        "replay": {
            "decoder": f"{replay.mode.value}:{replay.keep_tokens}" if replay.is_on else replay.mode.value,
            "encoder": str(replay.encoder),
        },
        "drafts_used": num_drafts,
        "settings_hash": settings_hash(settings),
        "versions": {name: versions[name] for name in ("deepinfer-plugin", "vllm", "torch", "triton")},
    }


def forget() -> None:
    """As before any configuration was made."""
    _NOTED.facts = None


def facts() -> dict[str, Any]:
    """What is the same for every answer of this process, without the weights; empty where another model serves."""
    return dict(_NOTED.facts or {})


def of_answer(seed: int | None) -> dict[str, Any]:
    """Provenance of one answer. The first call reads the checkpoint, see ``weights_identity``.

    Args:
        seed: what its tokens were drawn with; None where they were not drawn.
    """
    if _NOTED.facts is None:
        return {"error": "provenance: the model that serves is not the plugin's, expected ours; see the status command"}
    if "weights" not in _NOTED.facts:
        folder = _checkpoint_folder(_NOTED.model, _NOTED.revision)
        nothing = {"hash": "", "covers": f"nothing: {_NOTED.model} is not on this host"}
        _NOTED.facts["weights"] = nothing if folder is None else weights_identity(folder)
    return {"seed": seed, **_NOTED.facts}


def _checkpoint_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a checkpoint, or of its snapshot in the Hub's cache; None where neither is there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
