"""NVIDIA's compute-sanitizer over every kernel: ``python -m deepinfer_kernels.sanitize [--tool memcheck|racecheck]``.

``--kernel-set tilelang`` takes the operations that have a TileLang kernel, with it.
One child process runs each operation's small bench cases once, with PyTorch's caching of memory off: every tensor then
has bounds of its own. Exit codes: 0 clean, 1 findings or operations not reached, 2 no sanitizer or no GPU.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepinfer_kernels.bench_all import bench_ops, cases_of
from deepinfer_kernels.bench_sizes import TINY
from deepinfer_kernels.dispatch import TILELANG_OPERATIONS, KernelSet, choose_kernel_set

_TOOLS = ("memcheck", "racecheck")
_BUDGET_S = 240.0
_CUDA_BIN = "/usr/local/cuda/bin"
_NAME = "compute-sanitizer"
# "========= Invalid __global__ read of size 2 bytes", "========= Error: Race reported between …", and the like; other
# lines of the tool say where, or repeat the numbers.
_FINDING = re.compile(
    r"^=========\s+(?:Error: |Warning: )?(Invalid|Race|Potential|Misaligned|Out-of-range|Program hit)"
)
_KERNEL = re.compile(r"^=========\s+at (?:0x[0-9a-f]+ in )?(?P<name>[A-Za-z_]\w*)")
_BEGIN, _END = "operation begins: ", "operation ends: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tool said about one operation: ``clean``, ``findings``, ``failed`` or ``not run``."""

    op: str
    verdict: str
    findings: tuple[str, ...]


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, on PATH or in the usual CUDA folder."""
    return shutil.which(_NAME) or shutil.which(_NAME, path=_CUDA_BIN)


def run_ops(ops: Sequence[str]) -> None:
    """The child: run every small case once, between lines that name the operation."""
    for op in ops:
        print(_BEGIN + op, flush=True)  # noqa: T201
        for case in cases_of(op, TINY):
            case.make("cuda")()
            torch.cuda.synchronize()
        print(_END + op, flush=True)  # noqa: T201


def read_verdicts(ops: Sequence[str], lines: Sequence[str]) -> list[Verdict]:
    """Sort the tool's findings by the operation that ran when they were printed; each with the kernel it names."""
    current, ended = "", set[str]()
    findings: dict[str, list[str]] = {op: [] for op in ops}
    for index, line in enumerate(lines):
        if line.startswith(_BEGIN):
            current = line.removeprefix(_BEGIN).strip()
        elif line.startswith(_END):
            ended.add(line.removeprefix(_END).strip())
        elif _FINDING.match(line) and current:
            named = (_KERNEL.match(later) for later in lines[index + 1 : index + 4])
            where = next((match["name"] for match in named if match), "unknown kernel")
            findings[current].append(f"{line.lstrip('= ').strip()} in {where}")
    begun = [line.removeprefix(_BEGIN).strip() for line in lines if line.startswith(_BEGIN)]
    return [_verdict(op, findings[op], op in begun, op in ended) for op in ops]


def _verdict(op: str, findings: Sequence[str], has_begun: bool, has_ended: bool) -> Verdict:
    if findings:
        word = "findings"
    elif has_ended:
        word = "clean"
    else:
        word = "failed" if has_begun else "not run"
    return Verdict(op=op, verdict=word, findings=tuple(dict.fromkeys(findings)))


def sanitize(
    tool: str,
    ops: Sequence[str],
    budget_s: float,
    log: Path,
    sanitizer: str,
    kernel_set: KernelSet = KernelSet.TRITON,
) -> list[Verdict]:
    """Run the child under the tool; its whole output goes to ``log``.

    Args:
        tool: ``memcheck`` or ``racecheck``.
        ops: operations, in order.
        budget_s: after so many seconds the child is ended; operations not reached are ``not run``.
        log: file.
        sanitizer: path of the program.
        kernel_set: kernels of the operations.
    """
    command = [
        "env",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
        sanitizer,
        f"--tool={tool}",
        "--target-processes=all",
        sys.executable,
        "-m",
        "deepinfer_kernels.sanitize",
        f"--kernel-set={kernel_set.value}",
        "--child",
        ",".join(ops),
    ]
    with log.open("w", encoding="utf-8") as stream:
        # A session of its own: the tool starts the Python process that it watches, and both must end.
        child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        timer = threading.Timer(budget_s, _end, (child,))
        timer.start()
        try:
            child.wait()
        finally:
            timer.cancel()
            _end(child)
            child.wait()
    return read_verdicts(ops, log.read_text(encoding="utf-8", errors="replace").splitlines())


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    ops = bench_ops()
    parser = argparse.ArgumentParser(prog="python -m deepinfer_kernels.sanitize")
    parser.add_argument("--tool", choices=_TOOLS, default=_TOOLS[0])
    parser.add_argument("--only", metavar="OP,…", help="these operations only")
    sets = [kernel_set.value for kernel_set in KernelSet]
    parser.add_argument("--kernel-set", choices=sets, default=sets[0], help=f"kernels to run, default {sets[0]}")
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help=f"seconds, default {_BUDGET_S:.0f}")
    parser.add_argument("--json", type=Path, help="file for the verdicts; the log lies beside it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    parsed.kernel_set = KernelSet(parsed.kernel_set)
    known = TILELANG_OPERATIONS if parsed.kernel_set is KernelSet.TILELANG else ops
    parsed.only = list(known) if parsed.only is None else parsed.only.split(",")
    for op in parsed.only:
        if op not in known:
            parser.error(f"--only is {op!r}, expected operations among: {' '.join(known)}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code, see the module."""
    parsed = _parse(arguments)
    if parsed.child is not None:
        choose_kernel_set(parsed.kernel_set)
        run_ops(parsed.child.split(","))
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(f"sanitize: {_NAME} is not on PATH nor in {_CUDA_BIN}; install the CUDA toolkit", file=sys.stderr)  # noqa: T201
        return 2
    if not torch.cuda.is_available():
        print("sanitize: no NVIDIA GPU: torch.cuda.is_available() is False; run it on a GPU host", file=sys.stderr)  # noqa: T201
        return 2
    log = parsed.json.with_suffix(".log") if parsed.json else Path(tempfile.mkdtemp(), f"{parsed.tool}.log")
    verdicts = sanitize(parsed.tool, parsed.only, parsed.budget_s, log, sanitizer, parsed.kernel_set)
    if parsed.json is not None:
        content: Mapping[str, object] = {"tool": parsed.tool, "ops": [asdict(verdict) for verdict in verdicts]}
        parsed.json.write_text(json.dumps(content, indent=1))
    for verdict in verdicts:
        print(f"{verdict.op:16} {verdict.verdict}")  # noqa: T201
        for finding in verdict.findings:
            print(f"  {finding}")  # noqa: T201
    num_clean = sum(verdict.verdict == "clean" for verdict in verdicts)
    print(f"{parsed.tool}: {num_clean} of {len(verdicts)} operations clean; log: {log}")  # noqa: T201
    return int(num_clean < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
