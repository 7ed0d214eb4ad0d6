"""The driver of compute-sanitizer: how it reads the tool's output, and what it does without the tool or in time."""

import os
import stat
from pathlib import Path

import pytest

from deepinfer_kernels import sanitize as driver
from deepinfer_kernels.dispatch import TILELANG_OPERATIONS, KernelSet
from deepinfer_kernels.sanitize import Verdict, main, read_verdicts, sanitize

_MEMCHECK = """========= COMPUTE-SANITIZER
operation begins: rope
operation ends: rope
operation begins: linear
========= Invalid __global__ read of size 2 bytes
=========     at _plain_narrow_kernel+0x3b0 in plain_kernel.py:47
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f00 is out of bounds
========= Invalid __global__ read of size 2 bytes
=========     at _plain_narrow_kernel+0x3b0 in plain_kernel.py:47
operation ends: linear
operation begins: hc_mix
RuntimeError: CUDA error
========= ERROR SUMMARY: 2 errors
"""
_RACECHECK = """operation begins: hc_mix
========= Error: Race reported between Write access at _hc_mix_parts_kernel+0x10 in triton_kernel.py:3
=========     and Read access at _hc_mix_parts_kernel+0x30 in triton_kernel.py:9 [16 hazards]
operation ends: hc_mix
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_findings_belong_to_the_operation_that_ran() -> None:
    verdicts = read_verdicts(["rope", "linear", "hc_mix", "hc_post"], _MEMCHECK.splitlines())
    finding = "Invalid __global__ read of size 2 bytes in _plain_narrow_kernel"
    assert verdicts == [
        Verdict(op="rope", verdict="clean", findings=()),
        Verdict(op="linear", verdict="findings", findings=(finding,)),
        Verdict(op="hc_mix", verdict="failed", findings=()),
        Verdict(op="hc_post", verdict="not run", findings=()),
    ]


def test_a_race_is_a_finding() -> None:
    (verdict,) = read_verdicts(["hc_mix"], _RACECHECK.splitlines())
    assert verdict.verdict == "findings"
    assert "Race reported between Write access" in verdict.findings[0]


def _tool(folder: Path, script: str) -> str:
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_child_runs_without_cached_memory_and_its_output_is_read(tmp_path: Path) -> None:
    tool = _tool(
        tmp_path,
        'echo "operation begins: rope"; echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*"; echo "operation ends: rope"',
    )
    (verdict,) = sanitize("racecheck", ["rope"], 60.0, tmp_path / "log", tool)
    assert verdict.verdict == "clean"
    log = (tmp_path / "log").read_text()
    assert "1 --tool=racecheck" in log
    assert log.count("--kernel-set=triton --child rope") == 1


def test_a_child_beyond_its_budget_is_ended_and_the_rest_counts_as_not_run(tmp_path: Path) -> None:
    tool = _tool(tmp_path, 'echo "operation begins: rope"; echo "operation ends: rope"; sleep 600')
    verdicts = sanitize("memcheck", ["rope", "linear"], 1.0, tmp_path / "log", tool)
    assert [verdict.verdict for verdict in verdicts] == ["clean", "not run"]


def test_without_the_tool_the_exit_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "_CUDA_BIN", os.devnull)
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert "compute-sanitizer is not on PATH" in capsys.readouterr().err


def test_the_other_kernel_set_has_its_own_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = _tool(tmp_path, 'echo "operation begins: hc_mix"; echo "$*"; echo "operation ends: hc_mix"')
    (verdict,) = sanitize("memcheck", ["hc_mix"], 60.0, tmp_path / "log", tool, KernelSet.TILELANG)
    assert verdict.verdict == "clean"
    assert "--kernel-set=tilelang --child hc_mix" in (tmp_path / "log").read_text()
    assert tuple(driver._parse(["--kernel-set", "tilelang"]).only) == TILELANG_OPERATIONS
    with pytest.raises(SystemExit):
        main(["--kernel-set", "tilelang", "--only", "rope"])
    assert "--only is 'rope', expected operations among: engram_gate" in capsys.readouterr().err
