"""Timing of operations against the floors of the card, measured in the same run.

A bench module ``<op>/bench_<op>.py`` lists its cases as data; nothing is allocated until one is made, so that tests run
the same cases at small sizes without a GPU. ``python -m deepinfer_kernels.bench_all`` runs all modules in one process.

A case is timed as a replay of a CUDA graph that holds it several times, on inputs that together exceed the L2 cache, so
that launch gaps are those of serving and weights come from memory. Bytes and operations are those the operation must
move and do; the floors are a device-to-device copy (bytes read + written) and a bf16 product of 8192^3 through cuBLAS.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch

from deepinfer_kernels.bench_sizes import REAL, Sizes

_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192
_MIN_CALLS_PER_GRAPH = 8
_RUNS = 9
_WARMUP_RUNS = 2
# Inputs of one case together; several times the 60 MB of L2.
_ROTATION_BYTES = 256 << 20
_MAX_ROTATION = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call to time.

    Attributes:
        op: operation.
        name: what tells the case from others of the operation.
        num_bytes: what it must move: every input it needs and every result, once.
        flops: what it must compute; additions and products each count one, an integer operation too.
        make: builds fresh inputs on a device and returns the call.
        is_gather: the call may hold more bytes than it must read, as a cache of which a list is read.
        in_graph: whether serving replays it from a CUDA graph; the sampler runs outside.
    """

    op: str
    name: str
    num_bytes: int
    flops: int
    make: Callable[[str], Callable[[], object]]
    is_gather: bool = False
    in_graph: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of the card in this run."""

    device: str
    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One timed case; ``copy_ratio`` and ``matmul_ratio`` are fractions of the ceilings."""

    op: str
    case: str
    time_us: float
    spread_us: float  # slowest minus fastest replay
    bytes: int
    flops: int
    copy_ratio: float
    matmul_ratio: float


def _times_s(run: Callable[[], object]) -> list[float]:
    for _ in range(_WARMUP_RUNS):
        run()
    make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    events = [make_event(enable_timing=True) for _ in range(_RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _eager_time_s(run: Callable[[], object]) -> float:
    """Median seconds of one call that runs for milliseconds: a copy inside a graph was seen at 0.63 of this rate."""
    return statistics.median(_times_s(run))


def time_calls_s(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Median seconds of one call, and the spread between replays; the calls take turns inside one CUDA graph."""
    for call in calls:
        call()  # compiles, and fills the allocator
    torch.cuda.synchronize()
    num_calls = max(_MIN_CALLS_PER_GRAPH, len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_calls):
            calls[index % len(calls)]()
    times = [time / num_calls for time in _times_s(graph.replay)]
    return statistics.median(times), max(times) - min(times)


def time_eager_calls_s(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """The same for calls that serving launches one by one; host time counts where it is the longer."""
    num_calls = max(_MIN_CALLS_PER_GRAPH, len(calls))

    def run() -> None:
        for index in range(num_calls):
            calls[index % len(calls)]()

    times = [time / num_calls for time in _times_s(run)]
    return statistics.median(times), max(times) - min(times)


def measure_ceilings() -> Ceilings:
    """Copy bandwidth and bf16 matmul rate of the current device, on random data."""
    source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _eager_time_s(partial(target.copy_, source))
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_s = _eager_time_s(partial(torch.mm, a, b.t()))
    return Ceilings(
        device=torch.cuda.get_device_name(),
        copy_bytes_per_s=2 * _COPY_BYTES / copy_s,
        matmul_flops_per_s=2 * _MATMUL_SIZE**3 / matmul_s,
    )


def rotation(num_bytes: int) -> int:
    """Copies of an input of ``num_bytes`` that keep it out of L2."""
    return max(1, min(_MAX_ROTATION, -(-_ROTATION_BYTES // max(num_bytes, 1))))


def measure(case: Case, ceilings: Ceilings) -> Record:
    """Time one case on inputs that take turns, and print one line."""
    calls = [case.make("cuda") for _ in range(rotation(case.num_bytes))]
    seconds, spread = time_calls_s(calls) if case.in_graph else time_eager_calls_s(calls)
    record = Record(
        op=case.op,
        case=case.name,
        time_us=seconds * 1e6,
        spread_us=spread * 1e6,
        bytes=case.num_bytes,
        flops=case.flops,
        copy_ratio=case.num_bytes / seconds / ceilings.copy_bytes_per_s,
        matmul_ratio=case.flops / seconds / ceilings.matmul_flops_per_s,
    )
    print(  # noqa: T201
        f"{case.op:16} {case.name:44} {record.time_us:9.1f} us  copy {record.copy_ratio:5.2f}  "
        f"matmul {record.matmul_ratio:5.2f}",
        flush=True,
    )
    return record


def _revision() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def report(ceilings: Ceilings, records: Sequence[Record], **more: object) -> dict[str, object]:
    """The JSON record of a run."""
    return {
        "revision": _revision(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "ceilings": asdict(ceilings),
        "records": [asdict(record) for record in records],
        **more,
    }


def print_ceilings(ceilings: Ceilings) -> None:
    print(  # noqa: T201
        f"{ceilings.device}: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )


def run_bench(op: str, cases: Callable[[Sizes], list[Case]]) -> None:
    """Entry point of a bench module: measure the floors, time the cases, write JSON where ``--json`` says."""
    parser = argparse.ArgumentParser(prog=f"python -m deepinfer_kernels.{op}.bench_{op}")
    parser.add_argument("--json", type=Path, help="file for the records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU: torch.cuda.is_available() is False; run it on a GPU host")
    ceilings = measure_ceilings()
    print_ceilings(ceilings)
    records = [measure(case, ceilings) for case in cases(REAL)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report(ceilings, records), indent=1))
