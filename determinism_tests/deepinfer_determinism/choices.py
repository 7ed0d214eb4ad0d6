"""What a run may be asked for: devices, checkpoints and relations; a bad choice is one line, before anything starts.

Loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepinfer_determinism.schedule import SMALL_CHECKPOINTS
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.platforms.detect import find_machine

DEVICES = ("cpu", "cuda")


def check_device(device: str) -> None:
    """Refuse a device that there is not.

    Raises:
        SettingError: it is no known type, or this machine has none of it.
    """
    if device not in DEVICES:
        raise SettingError(f"--device is {device!r}, expected {' or '.join(DEVICES)}")
    if device == "cuda" and find_machine().num_nvidia == 0:
        raise SettingError("--device is 'cuda', but this machine has no NVIDIA GPU that this process may use; use cpu")


def check_jobs(jobs: int) -> None:
    """Refuse a number of engines at once that there cannot be.

    Raises:
        SettingError: it is negative.
    """
    if jobs < 0:
        raise SettingError(f"--jobs is {jobs}, expected a number of engines at once, or 0 for that of the device")


def check_checkpoint(checkpoint: str) -> None:
    """Refuse what is neither a small checkpoint nor a folder of one.

    Raises:
        SettingError: names what was expected.
    """
    name, _, seed = checkpoint.partition(":")
    is_small = name in SMALL_CHECKPOINTS and (seed or "0").isdigit()
    if not is_small and not (Path(checkpoint) / "config.json").is_file():
        raise SettingError(
            f"--checkpoint is {checkpoint!r}, without config.json, expected nano:SEED, tiny:SEED or a model folder"
        )


def check_relations(names: Sequence[str]) -> None:
    """Refuse a relation that does not exist.

    Raises:
        SettingError: lists those that do.
    """
    from deepinfer_determinism.configurations import ALL_RELATIONS

    known = [relation.name for relation in ALL_RELATIONS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SettingError(f"--relation is {unknown[0]!r}, expected one of: {', '.join(known)}")


def check_result(option: str, path: Path) -> None:
    """Refuse a file that could not be written when the run is over.

    Raises:
        SettingError: it is a folder, or its folder cannot be made.
    """
    if path.is_dir():
        raise SettingError(f"{option} is {path}, a folder, expected a file; name one in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".partial").touch()
        path.with_name(path.name + ".partial").unlink()
    except OSError as error:
        raise SettingError(f"{option} is {path}, which cannot be written ({error}); choose another") from None
