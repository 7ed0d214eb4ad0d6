"""Options of ``pytest determinism_tests``, registered in pyproject.toml: a conftest below a folder that holds no module
of its own is read too late to add them. Loads nothing else.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import NoReturn

import pytest

# Where all of these stand as they are, as in tests of other packages, nothing is loaded to check them.
_DEFAULTS: dict[str, object] = {"device": "cpu", "checkpoint": "nano:0", "relation": [], "result": None, "jobs": 0}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ctrl-C ends the session also where code that it meets drops the exception or raises another in its place.

    A shell that starts us in the background has us deaf to it; tests interrupt children, so it is taken again.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        del number, frame
        session.shouldstop = "interrupted"
        raise KeyboardInterrupt

    ours = (signal.SIG_IGN, signal.default_int_handler)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in ours:
        signal.signal(signal.SIGINT, interrupt)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("determinism", "determinism_tests")
    group.addoption("--checkpoint", default="nano:0", help="nano:SEED, tiny:SEED or a model folder (default nano:0)")
    group.addoption("--device", default="cpu", help="cpu, or cuda for the accelerator (default cpu)")
    group.addoption("--relation", action="append", default=[], help="only this relation; may be repeated")
    group.addoption("--depth", choices=("quick", "full"), default="quick", help="how much is compared (default quick)")
    group.addoption("--jobs", type=int, default=0, help="engines at once; 0, the default: 2 on the cpu, 5 on cuda")
    group.addoption("--workload-seed", type=int, default=0, help="of the random tokens of the workload (default 0)")
    group.addoption("--result", type=Path, default=None, help="write everything found to this JSON file")
    group.addoption("--schedules", type=Path, default=None, help="store every schedule in this folder, for replay")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a bad choice before anything is collected."""
    if not any(config.getoption(f"--{name}") != default for name, default in _DEFAULTS.items()):
        return
    from deepinfer_determinism import choices
    from deepinfer_plugin.errors import SettingError

    try:
        choices.check_device(config.getoption("--device"))
        choices.check_checkpoint(config.getoption("--checkpoint"))
        choices.check_relations(config.getoption("--relation"))
        choices.check_jobs(config.getoption("--jobs"))
        if config.getoption("--result") is not None:
            choices.check_result("--result", config.getoption("--result"))
    except SettingError as error:
        raise pytest.UsageError(str(error)) from None
