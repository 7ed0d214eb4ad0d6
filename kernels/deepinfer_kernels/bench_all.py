"""All benches in one process.

``python -m deepinfer_kernels.bench_all --out DIR [--only OP,…] [--quick] [--budget-s S]`` writes ``kernels.json`` after
every operation, and ``roofline.svg``. The budget is shared out: an operation that would take more than its share loses
its last cases, which the JSON lists as not run, with the reason. Ctrl-C keeps what there is.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from deepinfer_kernels.bench import Case, Ceilings, Record, measure, measure_ceilings, print_ceilings, report
from deepinfer_kernels.bench_plot import roofline
from deepinfer_kernels.bench_sizes import REAL, Sizes

_BUDGET_S = 200.0
_QUICK_CASES = 2  # of every operation
_SHARE = 2.0  # an operation may take so many times the part of what is left that its cases are of those left


def bench_ops() -> tuple[str, ...]:
    """Operations with a bench, those with the longest lists and the most telling figures first."""
    root = Path(__file__).parent
    found = sorted(path.parent.name for path in root.glob("*/bench_*.py") if path.stem == f"bench_{path.parent.name}")
    first = ("linear", "moe_experts", "sparse_attention", "indexer_logits", "indexer_topk", "hc_mix", "rms_norm")
    return (*first, *(op for op in found if op not in first))


def cases_of(op: str, sizes: Sizes) -> list[Case]:
    """Cases of one operation's bench module."""
    module = importlib.import_module(f"deepinfer_kernels.{op}.bench_{op}")
    make_cases: Callable[[Sizes], list[Case]] = module.cases
    return make_cases(sizes)


class Run:
    """Measured cases of a run and those that were not, with the reason."""

    def __init__(self, ceilings: Ceilings, out: Path, budget_s: float) -> None:
        self.ceilings, self.out = ceilings, out
        self.records: list[Record] = []
        self.not_run: list[dict[str, str]] = []
        self.num_failed = 0
        self._end_s = time.monotonic() + budget_s

    def measure_op(self, cases: Sequence[Case], num_cases_left: int) -> None:
        """Time the cases of one operation within its share of what is left; its own cases are among those left."""
        now_s = time.monotonic()
        share_s = (self._end_s - now_s) * len(cases) / num_cases_left * _SHARE
        stop_s = min(now_s + share_s, self._end_s)
        for case in cases:
            if time.monotonic() > stop_s:
                self.not_run.append({"op": case.op, "case": case.name, "why": "the operation's time was used up"})
                continue
            try:
                self.records.append(measure(case, self.ceilings))
            except Exception as error:
                self.num_failed += 1
                self.not_run.append({"op": case.op, "case": case.name, "why": f"{type(error).__name__}: {error}"})
                print(f"{case.op:16} {case.name:44} failed: {error}", flush=True)
        torch.cuda.empty_cache()

    def write(self) -> None:
        """The JSON, and the plot once there is a point."""
        content = report(self.ceilings, self.records, not_run=self.not_run)
        (self.out / "kernels.json").write_text(json.dumps(content, indent=1))
        if self.records:
            (self.out / "roofline.svg").write_text(roofline(self.records, self.ceilings), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    ops = bench_ops()
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer_kernels.bench_all", epilog=f"operations: {' '.join(ops)}"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for kernels.json, roofline.svg")
    parser.add_argument("--only", default=",".join(ops), metavar="OP,…", help="these operations only")
    parser.add_argument("--quick", action="store_true", help=f"the first {_QUICK_CASES} cases of every operation")
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help=f"seconds, default {_BUDGET_S:.0f}")
    parsed = parser.parse_args(arguments)
    parsed.only = parsed.only.split(",")
    for op in parsed.only:
        if op not in ops:
            parser.error(f"--only is {op!r}, expected operations among: {' '.join(ops)}")
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU: torch.cuda.is_available() is False; run it on a GPU host")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if every case that was tried was measured, 1 if one failed, 130 after Ctrl-C, 2 for a wrong argument."""
    parsed = _parse(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    ceilings = measure_ceilings()
    print_ceilings(ceilings)
    run = Run(ceilings, parsed.out, parsed.budget_s - (time.monotonic() - begin_s))
    code = 0
    try:
        limit = _QUICK_CASES if parsed.quick else None
        lists = [cases_of(op, REAL)[:limit] for op in parsed.only]
        for index, cases in enumerate(lists):
            run.measure_op(cases, sum(map(len, lists[index:])))
            run.write()
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept")
        code = 130
    run.write()
    seconds = time.monotonic() - begin_s
    print(f"{len(run.records)} cases in {seconds:.0f} s, {len(run.not_run)} not run; {parsed.out / 'kernels.json'}")
    return code or int(run.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
