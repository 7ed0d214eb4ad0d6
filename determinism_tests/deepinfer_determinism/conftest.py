"""Fixtures of the harness: one session object that knows which engines the selected tests need."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from deepinfer_determinism.engine import Children
from deepinfer_determinism.harness import NUM_CHILDREN, Harness, Options
from deepinfer_determinism.results import write_result
from deepinfer_determinism.session import Plan, make_plan
from deepinfer_plugin.platforms.detect import rank_places

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
        num_places=rank_places(),
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
    if "threshold_here" in metafunc.fixturenames:
        from deepinfer_determinism.coverage import thresholds_on

        here = thresholds_on(metafunc.config.getoption("--device"))
        metafunc.parametrize("threshold_here", here, ids=[threshold.name for threshold in here])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The operations start the children; what only waits for these comes last, and coverage, a sum, behind it."""
    waiting = ("test_engine_mutants", "test_relations", "test_thresholds.py")

    def order(item: pytest.Item) -> int:
        if "test_operations.py" in item.nodeid:
            return 0
        return 1 + next((2 + place for place, name in enumerate(waiting) if name in item.nodeid), 0)

    items.sort(key=order)


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
def plan(request: pytest.FixtureRequest) -> Plan:
    return _plan(request.config)


@pytest.fixture(scope="session")
def has_whole_set(request: pytest.FixtureRequest) -> bool:
    """Every relation of the plan and every operation is among the selected tests, and --relation left none out."""
    from deepinfer_determinism.operation_cases_cache import OPERATIONS

    cases = {item.callspec.params["case"].name for item in _with_parameters(request.session, "case")}
    operations = {item.callspec.params["operation"].name for item in _with_parameters(request.session, "operation")}
    return (
        not request.config.getoption("--relation")
        and cases == {case.name for case in _plan(request.config).cases}
        and operations == {operation.name for operation in OPERATIONS}
    )


def _with_parameters(session: pytest.Session, name: str) -> list[Any]:
    items: list[Any] = [item for item in session.items if hasattr(item, "callspec")]
    return [item for item in items if name in item.callspec.params]


@pytest.fixture(scope="session")
def harness(request: pytest.FixtureRequest, has_whole_set: bool) -> Iterator[Harness]:
    """Children start when the first test asks for the harness, with what the selected tests will need."""
    config = request.config
    plan = _plan(config)
    wanted = [item.callspec.params["case"] for item in _with_parameters(request.session, "case")]
    device = config.getoption("--device")
    has_mutants = device == "cpu" and bool(_with_parameters(request.session, "mutant"))
    with Children(device, config.getoption("--jobs") or NUM_CHILDREN[device]) as children:
        session = config.stash[HARNESS] = Harness(_options(config), children, has_whole_set)
        session.start(plan.schedules(wanted, has_mutants=has_mutants))
        yield session


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: object) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the last line of every failure for the result; what an interruption made fail is none."""
    del call
    report = yield
    if report.failed and not item.session.shouldstop:
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
