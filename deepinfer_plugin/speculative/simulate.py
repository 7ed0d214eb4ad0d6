"""What the budget rule gains over fixed verification, by load: ``python -m deepinfer_plugin.speculative.simulate``.

Every request of a step has drafts of its own chances; fixed verification takes them all, scheduled verification what
``budget.verified_lengths`` says of the same chances. Chances are drawn, tokens are expected ones, the time of a step is
a curve. Nothing is measured on a machine: the simulator asks whether the rule has the gains of DeepInfer's table under
assumptions that are written beside the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin.bench.curves import Assumption, parse_sizes
from deepinfer_plugin.bench.plot import line_chart
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import InputError
from deepinfer_plugin.speculative.budget import survival, verified_lengths
from deepinfer_plugin.speculative.step_time import StepTimeCurve

TABLE: Mapping[int, float] = {16: -0.015, 96: 0.11}
"""DeepInfer's gain by requests per rank, on its makers' machine."""
GAINS_FROM = 32  # requests from about which it gains
LARGEST_LOSS_OF_LENGTH = 0.05  # of tokens a step, about
LOADS = (8, 16, 32, 48, 64, 96, 128)
_MAX_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is assumed. The defaults of the last four were chosen so that gain and length come near the table.

    Attributes:
        num_drafts: of a request in a step.
        length: mean tokens of a request in a step when all drafts are verified, as DeepInfer's chart assumes.
        spread: how much chances differ: alpha + beta of their beta distribution; small: drafts are either sure or
            hopeless, large: all are alike.
        fixed_s: seconds of a step that its rows do not change.
        row_s: seconds that a row adds.
        schedule_s: seconds that a schedule adds to a step: the host waits for the confidences.
    """

    num_drafts: int = 5
    length: float = field(default_factory=lambda: Assumption().factor)
    spread: float = 0.7
    fixed_s: float = 10e-3
    row_s: float = 13.3e-6
    schedule_s: float = 0.35e-3

    def __post_init__(self) -> None:
        if not (self.num_drafts >= 1 and 1.0 < self.length < self.num_drafts + 1):
            raise InputError(
                f"simulate: {self.num_drafts} drafts with {self.length} tokens a step, expected at least one draft and "
                "a length between 1 and drafts + 1"
            )
        if min(self.spread, self.fixed_s, self.row_s) <= 0 or self.schedule_s < 0:
            raise InputError(f"simulate: {self} has a time or spread that is not positive; correct it")

    @property
    def curve(self) -> StepTimeCurve:
        """Time of a step by its rows."""
        times_s = tuple(self.fixed_s + self.row_s * rows for rows in (1, _MAX_ROWS))
        return StepTimeCurve(rows=(1, _MAX_ROWS), times_s=times_s)

    @property
    def mean_chance(self) -> float:
        """Chance of a draft to be accepted if all before it are, of which ``length`` follows: found by halving."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            is_short = sum(middle**place for place in range(self.num_drafts + 1)) < self.length
            low, high = (middle, high) if is_short else (low, middle)
        return low

    def draw(self, generator: np.random.Generator, num_reqs: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[num_reqs, num_drafts], chances of one step's drafts."""
        mean = self.mean_chance
        return generator.beta(mean * self.spread, (1 - mean) * self.spread, (num_reqs, self.num_drafts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to verify at one load, means over all steps."""

    verified: float
    length: float
    step_s: float

    @property
    def rate(self) -> float:
        """Tokens a second of one request."""
        return self.length / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Both ways at one load."""

    num_reqs: int
    fixed: Side
    scheduled: Side

    @property
    def gain(self) -> float:
        """Of scheduled over fixed verification, in tokens a second: 0.1 is a tenth more."""
        return self.scheduled.rate / self.fixed.rate - 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the gain."""
        return {**asdict(self), "gain": self.gain}


def simulate(model: Model, num_reqs: int, num_steps: int, seed: int, curve: StepTimeCurve | None = None) -> Load:
    """Steps of ``num_reqs`` requests, verified in both ways.

    Args:
        model: what is assumed.
        num_reqs: 1 or more.
        num_steps: 1 or more.
        seed: of the chances; with ``num_reqs`` it gives the same result again.
        curve: times of steps in the place of the model's.
    """
    generator = np.random.default_rng((seed, num_reqs))
    num_drafts = np.full(num_reqs, model.num_drafts)
    most = num_reqs * (model.num_drafts + 1)
    times = (curve or model.curve).times(most)
    all_tokens = kept_tokens = kept_s = 0.0
    num_kept = 0
    for _ in range(num_steps):
        chances = model.draw(generator, num_reqs)
        lengths = verified_lengths(chances, num_drafts, num_reqs, num_reqs, times)
        worth = survival(chances, num_drafts)
        kept = int(lengths.sum())
        all_tokens += num_reqs + float(worth.sum())
        kept_tokens += num_reqs + float(worth[np.arange(model.num_drafts) < lengths[:, None]].sum())
        kept_s += float(times[num_reqs + kept]) + model.schedule_s
        num_kept += kept
    count = num_steps * num_reqs
    return Load(
        num_reqs=num_reqs,
        fixed=Side(verified=model.num_drafts, length=all_tokens / count, step_s=float(times[most])),
        scheduled=Side(verified=num_kept / count, length=kept_tokens / count, step_s=kept_s / num_steps),
    )


def disagreements(loads: Sequence[Load]) -> list[str]:
    """What in the gains contradicts DeepInfer's table, in sign or in order; none: they agree.

    Args:
        loads: by ascending requests, with those of ``TABLE`` and ``GAINS_FROM`` among them.
    """
    gains = {load.num_reqs: load.gain for load in loads}
    signs = {**TABLE, GAINS_FROM: 1.0}
    found = [
        f"{num_reqs} requests: gain {gains[num_reqs]:+.1%}, expected {'a gain' if sign > 0 else 'a loss'}"
        for num_reqs, sign in sorted(signs.items())
        if gains[num_reqs] * sign <= 0
    ]
    ordered = [gains[num_reqs] for num_reqs in sorted(signs)]
    if ordered != sorted(ordered):
        found.append(f"gains are {ordered}, expected more at a higher load")
    for load in loads:
        loss = 1.0 - load.scheduled.length / load.fixed.length
        if load.num_reqs in TABLE and loss > LARGEST_LOSS_OF_LENGTH:
            found.append(f"{load.num_reqs} requests: {loss:.1%} fewer tokens a step, expected about 5 % at most")
    return found


def chart(loads: Sequence[Load]) -> str:
    """Scheduled over fixed verification by load as SVG; 1: no difference."""
    simulated = [(float(load.num_reqs), 1.0 + load.gain) for load in loads]
    table = [(float(num_reqs), 1.0 + gain) for num_reqs, gain in sorted(TABLE.items())]
    series = [("simulated", simulated), ("DeepInfer's table", table)]
    return line_chart("Scheduled / fixed verification", "requests per rank", "tokens/s, ratio", series, low_y=0.9)


def read_curve(path: Path) -> StepTimeCurve:
    """A curve that an engine has stored (DEEPINFER_DECODE_PERF_CACHE_DIR), or one of the same fields.

    Raises:
        InputError: the file is no such curve.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return StepTimeCurve(
            rows=tuple(value["rows"]),
            times_s=tuple(value["times_s"]),
            largest_graph=int(value.get("largest_graph", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"simulate: --curve {path} cannot be used ({type(error).__name__}: {error}), expected JSON with rows and "
            "times_s; name a file of DEEPINFER_DECODE_PERF_CACHE_DIR"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepinfer_plugin.speculative.simulate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets simulation.json and .svg")
    parser.add_argument("--requests", default=",".join(map(str, LOADS)), help="loads, ascending (default %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of each load (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the chances (default 0)")
    parser.add_argument("--curve", type=Path, metavar="FILE.json", help="times of steps (default: a straight line)")
    for name, text in (
        ("spread", "how much chances differ: small much, large little"),
        ("fixed-s", "seconds of a step without its rows"),
        ("row-s", "seconds of a row"),
        ("schedule-s", "seconds that a schedule adds to a step"),
    ):
        default = getattr(Model(), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{text} (default {default:g})")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Simulate, write, compare: 0 where sign and order are those of the table, 1 where not, 2 for a bad argument."""
    given = _parser().parse_args(arguments)
    try:
        model = Model(spread=given.spread, fixed_s=given.fixed_s, row_s=given.row_s, schedule_s=given.schedule_s)
        curve = None if given.curve is None else read_curve(given.curve)
        asked = parse_sizes("--requests", given.requests)
        if given.steps < 1 or given.seed < 0:
            raise InputError(f"simulate: --steps {given.steps} --seed {given.seed}, expected 1 and 0 or more")
    except DeepInferError as error:
        say(str(error))
        return 2
    loads = [
        simulate(model, num_reqs, given.steps, given.seed, curve) for num_reqs in sorted({*asked, *TABLE, GAINS_FROM})
    ]
    wrong = disagreements(loads)
    report = {
        "model": {**asdict(model), "mean_chance": model.mean_chance},
        "curve": None if curve is None else asdict(curve),
        "steps": given.steps,
        "seed": given.seed,
        "table": {str(num_reqs): gain for num_reqs, gain in TABLE.items()},
        "loads": [load.to_json() for load in loads],
        "disagreements": wrong,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "simulation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (given.out / "simulation.svg").write_text(chart(loads), encoding="utf-8")
    say(f"{'requests':>8} {'verified':>9} {'tokens/step':>12} {'of fixed':>9} {'gain':>8} {'table':>8}")
    for load in loads:
        expected = f"{TABLE[load.num_reqs]:+.1%}" if load.num_reqs in TABLE else "-"
        of_fixed = load.scheduled.length / load.fixed.length
        say(
            f"{load.num_reqs:>8} {load.scheduled.verified:>9.2f} {load.scheduled.length:>12.2f} {of_fixed:>9.1%} "
            f"{load.gain:>+8.1%} {expected:>8}"
        )
    say("\n".join(wrong) if wrong else "sign and order are those of DeepInfer's table")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
