"""Fixtures of the harness: one session object that knows which engines the selected tests need."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Coverage is a sum over all engines, so its tests come last."""
    items.sort(key=lambda item: "reaches_both_sides" in item.name)


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
def has_all_relations(request: pytest.FixtureRequest) -> bool:
    """Every relation of the plan is among the selected tests, and none was left out with --relation."""
    names = {item.callspec.params["case"].name for item in _with_parameters(request.session, "case")}
    plan = _plan(request.config)
    return not request.config.getoption("--relation") and names == {case.name for case in plan.cases}


def _with_parameters(session: pytest.Session, name: str) -> list[Any]:
    items: list[Any] = [item for item in session.items if hasattr(item, "callspec")]
    return [item for item in items if name in item.callspec.params]


@pytest.fixture(scope="session")
def harness(request: pytest.FixtureRequest, has_all_relations: bool) -> Iterator[Harness]:
    """Children start when the first test asks for the harness, with what the selected tests will need."""
    config = request.config
    plan = _plan(config)
    wanted = [item.callspec.params["case"] for item in _with_parameters(request.session, "case")]
    has_mutants = bool(_with_parameters(request.session, "mutant"))
    with Children(config.getoption("--device")) as children:
        session = config.stash[HARNESS] = Harness(_options(config), children, has_all_relations)
        session.start(plan.groups(wanted, has_mutants=has_mutants))
        yield session


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: object) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the last line of every failure for the result."""
    del call
    report = yield
    if report.failed:
        _plan(item.config)
        line = str(report.longrepr).splitlines()[-1] if report.longrepr else ""
        item.config.stash[FAILURES].append(f"{report.nodeid}: {line}")
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was found, also after Ctrl-C."""
    path = session.config.getoption("--result")
    found = session.config.stash.get(HARNESS, None)
    if path is None or found is None:
        return
    is_complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    failures: list[str] = session.config.stash[FAILURES]
    write_result(
        found.run_result(
            is_complete=is_complete,
            failures=failures,
            seconds=time.monotonic() - session.config.stash[BEGIN_S],
        ),
        path,
    )
