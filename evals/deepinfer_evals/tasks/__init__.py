"""The benchmarks by name."""

from deepinfer_evals.benchmark import Benchmark
from deepinfer_evals.tasks.aime2026 import AIME2026
from deepinfer_evals.tasks.gpqa_diamond import GPQA_DIAMOND
from deepinfer_evals.tasks.hle import HLE
from deepinfer_plugin.errors import InputError

BENCHMARKS: dict[str, Benchmark] = {task.name: task for task in (AIME2026, GPQA_DIAMOND, HLE)}


def benchmark_named(name: str) -> Benchmark:
    """The benchmark of a manifest.

    Raises:
        InputError: this version has none of that name.
    """
    if name not in BENCHMARKS:
        raise InputError(f"manifest: benchmark is {name!r}, expected {', '.join(BENCHMARKS)}; run one of them")
    return BENCHMARKS[name]
