"""``replay``: run a stored pair of schedules again and say whether it still parts; a single schedule runs twice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer_determinism.choices import check_device
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.engine import ScheduleResult, run_schedules
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import base_name
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import InputError, SettingError

KIND, FORMAT = "deepinfer_determinism pair", 1
NO_DIFFERENCE, DIFFERENCE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two schedules whose shared requests should give the same rows, and what was found of them before."""

    a: Schedule
    b: Schedule
    found: Mapping[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> tuple[tuple[str, str], ...]:
        """Names of a request in ``a`` and of its repetition in ``b``: the same, or with ``@`` and a word behind it."""
        found = ((base_name(name) if name not in self.a.requests else name, name) for name in self.b.requests)
        return tuple((a_name, b_name) for a_name, b_name in found if a_name in self.a.requests)

    def compare(self, a: ScheduleResult, b: ScheduleResult) -> Comparison:
        """Rows of the shared requests; one that was aborted in ``b`` may end early, one aborted in ``a`` is left out.

        Raises:
            InputError: nothing is shared.
        """
        aborted_a, aborted_b = _aborted(self.a), _aborted(self.b)
        pairs = [(want, got) for want, got in self.shared if want not in aborted_a]
        if not pairs:
            raise InputError("pair: the schedules share no whole request, expected one; give it one name in both")
        total = Comparison()
        for want, got in pairs:
            total += compare_request(
                got,
                Given(request=self.a.requests[want], result=a.requests[want]),
                Given(request=self.b.requests[got], result=b.requests[got]),
                may_be_short=got in aborted_b,
            )
        return total

    @property
    def size(self) -> str:
        """How much is left, in words."""
        requests = {**self.a.requests, **self.b.requests}
        num_requests = len({base_name(name) for name in requests})
        longest = max((len(request.tokens) for request in requests.values()), default=0)
        actions = max(len(schedule.run.actions) for schedule in (self.a, self.b))
        return f"{num_requests} requests, longest prompt {longest}, {actions} actions"


def named(schedule: Schedule, name: str) -> Schedule:
    """The schedule under another name."""
    return replace(schedule, run=replace(schedule.run, name=name))


def _aborted(schedule: Schedule) -> frozenset[str]:
    return frozenset(name for action in schedule.run.actions for name in action.abort)


def save_pair(pair: Pair, path: Path) -> None:
    """Write the pair whole or not at all."""
    value = {"kind": KIND, "format": FORMAT, "a": pair.a.to_json(), "b": pair.b.to_json(), "found": dict(pair.found)}
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SettingError(f"locate: --out is {path}, which cannot be written ({error}); choose another") from None


def load_pair(path: Path) -> Pair:
    """Read what ``save_pair`` wrote; a file of one schedule becomes a pair of it with itself.

    Raises:
        InputError: the file is missing, half-written, or holds something else; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"replay: {path} cannot be read ({error}), expected a stored pair or schedule") from None
    try:
        if isinstance(value, dict) and value.get("kind") == KIND:
            if value.get("format") != FORMAT or set(value) != {"kind", "format", "a", "b", "found"}:
                raise InputError(f"pair: format is {value.get('format')!r}, expected {FORMAT}; locate again")
            return Pair(a=Schedule.from_json(value["a"]), b=Schedule.from_json(value["b"]), found=dict(value["found"]))
        schedule = Schedule.from_json(value)
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"replay: {path}: {error}") from None
    return Pair(a=schedule, b=schedule)


def say_first(found: Comparison) -> None:
    """The first difference, both sides."""
    assert found.first is not None
    say(f"{found.differences} of {found.rows} rows differ")
    say(f"first: request {found.first.request!r}, position {found.first.position}")
    say(f"  A {found.first.want}")
    say(f"  B {found.first.got}")


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("replay", help="run a stored pair again, or a stored schedule twice")
    parser.add_argument("file", type=Path, metavar="FILE", help="what locate stored, or one schedule")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run both schedules; 0 where every shared row agrees, 1 where one differs."""
    check_device(arguments.device)
    pair = load_pair(arguments.file)
    results = run_schedules([named(pair.a, "A"), named(pair.b, "B")], arguments.device)
    found = pair.compare(results["A"], results["B"])
    for name, value in sorted(pair.found.items()):
        say(f"found before: {name} {value}")
    for path, calls in results["B"].facts.fault_calls.items():
        say(f"planted fault {path} ran {calls} times")
    if found.first is None:
        say(f"no difference in {found.rows} rows of {len(pair.shared)} requests")
        return NO_DIFFERENCE
    say_first(found)
    return DIFFERENCE
