"""Fixtures of the harness: one session object that knows which engines the selected tests need."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from deepinfer_determinism.engine import Children
from deepinfer_determinism.harness import Harness, Options
from deepinfer_determinism.results import write_result
from deepinfer_determinism.session import Plan, make_plan

PLAN = pytest.StashKey[Plan]()
HARNESS = pytest.StashKey[Harness]()
FAILURES = pytest.StashKey[list[str]]()
BEGIN_S = pytest.StashKey[float]()


def _options(config: pytest.Config) -> Options:
    return Options(
        checkpoint=config.getoption("--checkpoint"),
        device=config.getoption("--device"),
        depth=config.getoption("--depth"),
        workload_seed=config.getoption("--workload-seed"),
        schedules=config.getoption("--schedules"),
    )


def _plan(config: pytest.Config) -> Plan:
    if PLAN not in config.stash:
        config.stash[PLAN] = make_plan(_options(config), config.getoption("--relation"))
        config.stash[BEGIN_S] = time.monotonic()
        config.stash[FAILURES] = []
    return config.stash[PLAN]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = _plan(metafunc.config).cases
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.fixture(scope="session")
def depth(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--depth"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def workload_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--workload-seed"))


@pytest.fixture(scope="session")
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """Children start when the first test asks for the harness, with what the selected tests will need."""
    config = request.config
    plan = _plan(config)
    wanted = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    with Children(config.getoption("--device")) as children:
        session = config.stash[HARNESS] = Harness(_options(config), children)
        session.start(
            plan.groups(
                [params["case"] for params in wanted if "case" in params],
                has_mutants=any("mutant" in params for params in wanted),
            )
        )
        yield session


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _CONFIG:
        line = str(report.longrepr).splitlines()[-1] if report.longrepr else ""
        _CONFIG[0].stash[FAILURES].append(f"{report.nodeid}: {line}")


_CONFIG: list[pytest.Config] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    _plan(session.config)
    _CONFIG[:] = [session.config]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was found, also after Ctrl-C."""
    path = session.config.getoption("--result")
    found = session.config.stash.get(HARNESS, None)
    if path is None or found is None:
        return
    is_complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    write_result(
        found.run_result(
            is_complete=is_complete,
            failures=session.config.stash[FAILURES],
            seconds=time.monotonic() - session.config.stash[BEGIN_S],
        ),
        path,
    )
