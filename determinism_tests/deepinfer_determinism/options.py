"""Options of ``pytest determinism_tests``, registered in pyproject.toml: a conftest below a folder that holds no module
of its own is read too late to add them. Loads nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("determinism", "determinism_tests")
    group.addoption("--checkpoint", default="nano:0", help="nano:SEED, tiny:SEED or a model folder (default nano:0)")
    group.addoption("--device", default="cpu", help="cpu, or cuda for the accelerator (default cpu)")
    group.addoption("--relation", action="append", default=[], help="only this relation; may be repeated")
    group.addoption("--depth", choices=("quick", "full"), default="quick", help="how much is compared (default quick)")
    group.addoption("--workload-seed", type=int, default=0, help="of the random tokens of the workload (default 0)")
    group.addoption("--result", type=Path, default=None, help="write everything found to this JSON file")
    group.addoption("--schedules", type=Path, default=None, help="store every schedule in this folder, for replay")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a relation or checkpoint that does not exist before anything is collected."""
    names, checkpoint = config.getoption("--relation"), config.getoption("--checkpoint")
    if names:
        from deepinfer_determinism.relations import BY_NAME

        unknown = sorted(set(names) - BY_NAME.keys())
        if unknown:
            raise pytest.UsageError(f"--relation: value is {unknown[0]!r}, expected one of: {', '.join(BY_NAME)}")
    is_small = checkpoint.partition(":")[0] in ("nano", "tiny")
    if not is_small and not (Path(checkpoint) / "config.json").is_file():
        raise pytest.UsageError(
            f"--checkpoint: {checkpoint} holds no config.json, expected nano:SEED, tiny:SEED or a model folder"
        )
