"""``locate``: the first operation at which two schedules that should agree part, and the smallest pair that parts."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_determinism import row_hashes
from deepinfer_determinism.choices import check_device, check_result
from deepinfer_determinism.compare import Comparison
from deepinfer_determinism.engine import Children, ScheduleResult
from deepinfer_determinism.replay import Pair, named, save_pair, say_first
from deepinfer_determinism.row_hashes import PROBE, RowHashes, Target
from deepinfer_determinism.schedule import Schedule, load
from deepinfer_determinism.shrink import Budget, chained, shrink
from deepinfer_determinism.workload import base_name
from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError

NO_DIFFERENCE, DIFFERENCE = 0, 1
PROBED_A, PROBED_B = "A probed", "B probed"
SHOWN = 6  # differing elements of a row that are printed


class ProbeError(DeepInferError):
    """The probes change bits here, so that what they show would not be what happens without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first row and operation that differ.

    Attributes:
        request, position: the row, under its name in B.
        a_request: its name in A.
        operation: ``module/operation``, with ``#2`` where a module calls it twice.
        a_hash, b_hash: of the row, 16 hex digits.
        agreeing: operations of that row that agree and ran before it.
        values: differing elements, one line each; empty until they were captured.
    """

    request: str
    a_request: str
    position: int
    operation: str
    a_hash: str
    b_hash: str
    agreeing: int
    values: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        yield f"first operation that differs: {self.operation}, request {self.request!r}, position {self.position}"
        yield f"  hash A {self.a_hash}, hash B {self.b_hash}; {self.agreeing} operations of this row before it agree"
        yield from (f"  {line}" for line in self.values)


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("locate", help="find the first operation at which two schedules part")
    parser.add_argument("schedule_a", type=Path, metavar="SCHEDULE_A", help="stored schedule")
    parser.add_argument("schedule_b", type=Path, metavar="SCHEDULE_B", help="stored schedule with the same requests")
    parser.add_argument("--out", type=Path, default=Path("located.json"), help="for replay (default located.json)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--engines", type=int, default=40, help="most engines started to shrink (default 40)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prove the probes harmless, find where the schedules part, shrink them, store the pair."""
    if arguments.engines < 0:
        raise SettingError(f"locate: --engines is {arguments.engines}, expected 0 or more")
    check_device(arguments.device)
    check_result("--out", arguments.out)
    pair = Pair(a=load(arguments.schedule_a), b=load(arguments.schedule_b))
    with Children(arguments.device) as children:
        return _locate(pair, children, arguments.out, arguments.engines)


def _locate(pair: Pair, children: Children, out: Path, engines: int) -> int:
    comparison, parting = examine(pair, children)
    if comparison.differences == 0:
        say(f"no difference in {comparison.rows} rows")
        return NO_DIFFERENCE
    say_first(comparison)
    _say_parting(parting)
    save_pair(replace(pair, found=_found(comparison, parting)), out)
    say(f"the pair is stored; python -m deepinfer_determinism replay {out}")
    if engines > 0:
        _shrink(_Found(pair, comparison, parting), children, out, engines)
    return DIFFERENCE


@dataclass(frozen=True, slots=True)
class _Found:
    """A pair that parts, and where."""

    pair: Pair
    comparison: Comparison
    parting: Parting | None


def examine(pair: Pair, children: Children) -> tuple[Comparison, Parting | None]:
    """Compare the pair, after proof that the probes change no bit, and find the first operation that differs.

    Raises:
        InputError: the schedules share no request.
        ProbeError: with probes A gives other bits than without.
    """
    plain = [named(pair.a, "A"), named(pair.a, "A again"), named(pair.b, "B")]
    results, parting, replayed = _look(pair, plain, children)
    _prove(pair.a, results)
    if replayed > 0:
        say(f"{replayed} rows were hashed inside captured graphs")
    comparison = pair.compare(results["A"], results["B"])
    if comparison.differences == 0 or parting is None:
        return comparison, None
    return comparison, _with_values(pair, parting, children)


def _look(
    pair: Pair, plain: Sequence[Schedule], children: Children
) -> tuple[dict[str, ScheduleResult], Parting | None, int]:
    """Run both schedules with probes, after others without, in one child; also the rows hashed inside graphs."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-locate-") as folder:
        probed_a, a_file = probed(pair.a, PROBED_A, Path(folder))
        probed_b, b_file = probed(pair.b, PROBED_B, Path(folder))
        results = children.run([*plain, probed_a, probed_b])
        a, b = row_hashes.read(a_file), row_hashes.read(b_file)
        return results, first_parting(a, b, pair.shared), a.replayed + b.replayed


def probed(schedule: Schedule, name: str, folder: Path, target: Target | None = None) -> tuple[Schedule, Path]:
    """The schedule with probes, and the file that the probes will write."""
    stem = name.replace(" ", "_")
    config, out = folder / f"{stem}.json", folder / f"{stem}.npz"
    fields = None if target is None else {n: getattr(target, n) for n in ("request", "position", "operation")}
    config.write_text(json.dumps({"out": str(out), "target": fields}), encoding="utf-8")
    run = replace(schedule.run, name=name, faults=(*schedule.run.faults, f"{PROBE}({config})"))
    return replace(schedule, run=run), out


def first_parting(a: RowHashes, b: RowHashes, shared: Iterable[tuple[str, str]]) -> Parting | None:
    """The differing row of lowest position, at it the operation that ran first; None where all hashes agree.

    A row that a run computed several times, after a preemption, is taken as it was first computed.
    """
    columns = [(index, b.operations.index(key)) for index, key in enumerate(a.operations) if key in b.operations]
    left, right = [pair[0] for pair in columns], [pair[1] for pair in columns]
    a_rows, b_rows = _first_rows(a), _first_rows(b)
    found: dict[tuple[int, int, str], Parting] = {}
    aligned = (
        (a_name, b_name, position, row, b_rows[b_name, position])
        for a_name, b_name in shared
        for (request, position), row in a_rows.items()
        if request == a_name and (b_name, position) in b_rows
    )
    for a_name, b_name, position, row, other in aligned:
        both = a.present[row, left] & b.present[other, right]
        differs = both & (a.hashes[row, left] != b.hashes[other, right])
        if not differs.any():
            continue
        first = int(np.argmax(differs))
        found[position, first, b_name] = Parting(
            a_request=a_name,
            request=b_name,
            position=position,
            operation=a.operations[left[first]],
            a_hash=_hex(a.hashes[row, left[first]]),
            b_hash=_hex(b.hashes[other, right[first]]),
            agreeing=int(both[:first].sum()),
        )
    return found[min(found)] if found else None


def _first_rows(hashes: RowHashes) -> dict[tuple[str, int], int]:
    rows: dict[tuple[str, int], int] = {}
    for index, name in enumerate(hashes.rows):
        rows.setdefault((name.request, name.position), index)
    return rows


def _hex(value: Any) -> str:
    return f"{int(value) & 0xFFFFFFFFFFFFFFFF:016x}"


def _with_values(pair: Pair, parting: Parting, children: Children) -> Parting:
    """Run both schedules again and keep the row itself."""
    a_target = Target(parting.a_request, parting.position, parting.operation)
    b_target = replace(a_target, request=parting.request)
    with tempfile.TemporaryDirectory(prefix="deepinfer-locate-") as folder:
        probed_a, a_file = probed(pair.a, "A", Path(folder), a_target)
        probed_b, b_file = probed(pair.b, "B", Path(folder), b_target)
        children.run([probed_a, probed_b])
        a, b = row_hashes.read(a_file).captured, row_hashes.read(b_file).captured
    return replace(parting, values=tuple(value_lines(a, b)))


def value_lines(a: np.ndarray[Any, Any] | None, b: np.ndarray[Any, Any] | None) -> Iterator[str]:
    """The elements of two rows that differ."""
    if a is None or b is None:
        yield "values: the row was not computed again"
        return
    width = min(len(a), len(b))
    if len(a) != len(b):
        yield f"widths: A {len(a)}, B {len(b)}"
    differs = np.flatnonzero(a[:width].view(np.int64) != b[:width].view(np.int64))
    yield f"{len(differs)} of {width} elements differ"
    for column in differs[:SHOWN]:
        yield f"element {column}: A {_value(a[column])}, B {_value(b[column])}"


def _value(value: Any) -> str:
    return repr(value.item()) if isinstance(value, np.integer) else f"{value.item()!r} ({value.item().hex()})"


def _prove(a: Schedule, results: dict[str, ScheduleResult]) -> None:
    """A twice without probes and once with them, bit by bit."""
    itself = Pair(a=a, b=a)
    again = itself.compare(results["A"], results["A again"])
    if again.differences > 0:
        say(f"A does not even repeat: {again.differences} of {again.rows} rows differ between two runs of it")
        return
    seen = itself.compare(results["A"], results[PROBED_A])
    if seen.first is not None:
        raise ProbeError(
            f"locate: the probes change {seen.differences} of {seen.rows} rows of A, first request "
            f"{seen.first.request!r} position {seen.first.position}, expected none; what they show cannot be trusted"
        )
    calls = sum(count for path, count in results[PROBED_A].facts.fault_calls.items() if path.startswith(PROBE))
    say(f"probes: A run twice without and once with them gives the same bits ({again.rows} rows, {calls} hashes)")


def _shrink(start: _Found, children: Children, out: Path, engines: int) -> None:
    """Store every smaller pair that still parts; Ctrl-C leaves the smallest so far in the file.

    Candidates are tried one after another in two engines; the smallest is run again in engines of its own, and where it
    parts no more the one before it is taken.
    """
    pair, comparison, parting = start.pair, start.comparison, start.parting
    assert comparison.first is not None
    target = base_name(comparison.first.request.partition("[")[0])
    found = _found(comparison, parting)
    budget, path = Budget(engines), [pair]
    try:
        for smaller in shrink(pair, target, lambda pairs: parting_pairs(pairs, children), budget):
            path.append(smaller)
            save_pair(replace(smaller, found=found), out)
            say(f"still differs: {smaller.size}")
        while len(path) > 1:
            results, parting, _ = _look(path[-1], (), children)
            comparison = path[-1].compare(results[PROBED_A], results[PROBED_B])
            if comparison.differences > 0:
                parting = parting and _with_values(path[-1], parting, children)
                break
            say(f"differs no more in engines of its own: {path.pop().size}")
    except KeyboardInterrupt:
        say(f"interrupted: the smallest pair so far ({path[-1].size}) is kept in {out}")
        raise
    if len(path) > 1:
        found = _found(comparison, parting)
        _say_parting(parting)
    save_pair(replace(path[-1], found=found), out)
    say(f"smallest pair that still differs: {path[-1].size} ({budget.spent} engines started)")
    say(f"python -m deepinfer_determinism replay {out}")


def parting_pairs(candidates: Sequence[Pair], children: Children) -> list[bool]:
    """Whether each pair differs; all of them run one after another in two engines of one child."""
    a, a_names = chained([candidate.a for candidate in candidates], "A")
    b, b_names = chained([candidate.b for candidate in candidates], "B")
    results = children.run([a, b])
    return [
        candidate.compare(_part(results["A"], a_names[number]), _part(results["B"], b_names[number])).differences > 0
        for number, candidate in enumerate(candidates)
    ]


def _part(result: ScheduleResult, names: Mapping[str, str]) -> ScheduleResult:
    """Results of one of the chained schedules under its own names."""
    return replace(result, requests={name: result.requests[chained_name] for name, chained_name in names.items()})


def _found(comparison: Comparison, parting: Parting | None) -> dict[str, str]:
    first = comparison.first
    found = {} if first is None else {"request": first.request, "position": str(first.position)}
    return found if parting is None else {**found, "operation": parting.operation}


def _say_parting(parting: Parting | None) -> None:
    if parting is None:
        say("no operation of a row that both runs computed differs: the difference lies outside model and sampler")
        return
    for line in parting.lines():
        say(line)
