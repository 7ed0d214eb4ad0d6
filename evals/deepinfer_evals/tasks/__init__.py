"""The benchmarks by name."""

from deepinfer_evals.benchmark import Benchmark
from deepinfer_evals.tasks.aime2026 import AIME2026
from deepinfer_evals.tasks.gpqa_diamond import GPQA_DIAMOND
from deepinfer_evals.tasks.hle import HLE

BENCHMARKS: dict[str, Benchmark] = {task.name: task for task in (AIME2026, GPQA_DIAMOND, HLE)}
