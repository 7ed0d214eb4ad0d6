"""What ran, as JSON: versions, device, kernel set, settings, patches, and the weights where their hash is known."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from deepinfer_plugin import __version__, compat
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.settings import Settings

PACKAGES = ("vllm", "torch", "triton", "tilelang", "transformers", "tokenizers", "safetensors", "xgrammar", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of what the results depend on; ``absent`` where a package is not installed."""
    found = {"deepinfer-plugin": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def collect(settings: Settings, capabilities: Capabilities, weights_hash: str | None = None) -> dict[str, object]:
    """Everything that a result depends on besides the request.

    Args:
        settings: those of this process.
        capabilities: the machine.
        weights_hash: content hash of the checkpoint; None leaves it out.
    """
    record: dict[str, object] = {
        "versions": versions(),
        "machine": {"system": platform.system(), "architecture": platform.machine(), **capabilities.to_json()},
        "settings": settings.answer_settings(),
        "patches": [patch.what for patch in compat.PATCHES],
    }
    if weights_hash is not None:
        record["weights_hash"] = weights_hash
    return record
