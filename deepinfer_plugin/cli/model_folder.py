"""Arguments that ``offline`` and ``bench`` share: the checkpoint's folder and the parallel sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepinfer_plugin import envs, variables
from deepinfer_plugin.errors import SettingError


def add_model(parser: Any) -> None:
    """``--model``, for which DEEPINFER_HF_MODEL_DIR may stand."""
    parser.add_argument(
        "--model", type=Path, default=None, metavar="DIR", help=f"checkpoint (default {variables.HF_MODEL_DIR.name})"
    )


def add_sizes(parser: Any) -> None:
    """``--tp``, ``--dp`` and ``--ep``, in DeepInfer's words."""
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    parser.add_argument("--dp", type=int, default=1, help="data parallel size (default 1)")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts: tp x dp, alone it sets dp")


def model_folder(program: str, given: Path | None) -> Path:
    """The folder of the checkpoint.

    Args:
        program: for the error.
        given: ``--model``.

    Raises:
        SettingError: flag and variable disagree, neither is there, or the folder holds no config.json.
    """
    variable = envs.load()[variables.HF_MODEL_DIR]
    if given is not None and variable is not None and given.resolve() != variable.resolve():
        raise SettingError(
            f"{program}: --model is {given}, but {variables.HF_MODEL_DIR.name} is {str(variable)!r}, expected the same "
            "folder; leave one of the two out"
        )
    found = given or variable
    if found is None:
        raise SettingError(f"{program}: --model is missing; name a folder, or set {variables.HF_MODEL_DIR.name}")
    if not (found / "config.json").is_file():
        raise SettingError(f"{program}: the checkpoint is {found}, which has no config.json; name its folder")
    return found


def size_flags(program: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    """vLLM's flags for the parallel sizes; none for a single rank.

    Raises:
        SettingError: a size is below 1, or ``--ep`` is not the product of the others.
    """
    for name in ("tp", "dp", "ep"):
        if getattr(arguments, name) < 1:
            raise SettingError(f"{program}: --{name} is {getattr(arguments, name)}, expected 1 or more")
    tp, ep = arguments.tp, arguments.ep
    dp = ep if tp == arguments.dp == 1 else arguments.dp
    if ep not in (1, tp * dp):
        raise SettingError(f"{program}: --ep is {ep}, expected {tp * dp}, the product of --tp {tp} and --dp {dp}")
    flags = {"tensor-parallel-size": tp, "data-parallel-size": dp}
    found = [f"--{name}={size}" for name, size in flags.items() if size > 1]
    return (*found, *(["--enable-expert-parallel"] if ep > 1 else []))
