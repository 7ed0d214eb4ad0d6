"""Comparisons for tests, and the way to the golden data. Needs pytest only to skip."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from deepinfer_kernels.tiling import REFERENCE_ROW_TILE

# Numbers of rows at the edges of a row tile.
EDGE_SIZES = (0, 1, REFERENCE_ROW_TILE - 1, REFERENCE_ROW_TILE, REFERENCE_ROW_TILE + 1)

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    contiguous = tensor.detach().cpu().contiguous()
    return contiguous.view(_INTEGER_OF_SIZE[contiguous.element_size()])


def _check_same_form(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{label}: got {list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}")


def _first_difference(differs: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    index = tuple(int(i) for i in differs.nonzero()[0])
    shown_got, shown_want = (
        t.detach().cpu()[index].to(torch.float64 if t.is_floating_point() else t.dtype).item() for t in (got, want)
    )
    return (
        f"{int(differs.sum())} of {differs.numel()} elements differ; first at {index}: "
        f"got {shown_got}, expected {shown_want}"
    )


def assert_bitwise_equal(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    """Fail unless shape, dtype and every bit agree; two NaN with the same bits are equal, 0 and -0 are not."""
    _check_same_form(got, want, label)
    differs = _bits(got) != _bits(want)
    if bool(differs.any()):
        raise AssertionError(f"{label}: {_first_difference(differs, got, want)}")


def assert_close(got: torch.Tensor, want: torch.Tensor, atol: float, label: str) -> None:
    """Fail unless ``|got - want| <= atol`` everywhere; NaN and infinities must stand at the same places."""
    _check_same_form(got, want, label)
    left, right = got.detach().cpu().double(), want.detach().cpu().double()
    near = (left - right).abs() <= atol
    differs = ~(near | (left == right) | (left.isnan() & right.isnan()))
    if bool(differs.any()):
        worst = float((left - right).abs().nan_to_num(nan=float("inf")).max())
        raise AssertionError(f"{label}: {_first_difference(differs, got, want)}; largest {worst}, allowed {atol}")


def ulp_distance_bf16(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Count, per element, the bf16 numbers between two bf16 tensors (int32); 0 and -0 are the same number."""
    assert got.dtype == want.dtype == torch.bfloat16, (got.dtype, want.dtype)
    ordered = []
    for tensor in (got, want):
        bits = _bits(tensor).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (ordered[0] - ordered[1]).abs()


def assert_within_ulps_bf16(got: torch.Tensor, want: torch.Tensor, ulps: int, label: str) -> None:
    """Fail unless every element lies at most ``ulps`` bf16 numbers away."""
    _check_same_form(got, want, label)
    differs = ulp_distance_bf16(got, want) > ulps
    if bool(differs.any()):
        raise AssertionError(f"{label}: {_first_difference(differs, got, want)}; allowed {ulps} bf16 ulp")


def assert_rows_keep_their_bits(run: Callable[[slice], torch.Tensor], num_rows: int, label: str) -> None:
    """Fail unless every row computed alone has the bits it has in batches that begin and end elsewhere.

    Args:
        run: computes the rows of one slice of the inputs; its result has one row per input row.
        num_rows: rows of the whole input, more than twice REFERENCE_ROW_TILE.
        label: begins the message.
    """
    assert num_rows > 2 * REFERENCE_ROW_TILE, num_rows
    alone = torch.cat([run(slice(t, t + 1)) for t in range(num_rows)])
    for low, high in [(0, num_rows), (0, REFERENCE_ROW_TILE), (1, 4), (3, REFERENCE_ROW_TILE + 3), (5, num_rows)]:
        assert_bitwise_equal(run(slice(low, high)), alone[low:high], f"{label}: rows {low}:{high} in one batch")


def golden_dir() -> Path | None:
    """Folder ``shared/golden`` beside or above the repository, or None where there is none."""
    for parent in Path(__file__).resolve().parents:
        candidate = parent / "shared" / "golden"
        if (candidate / "manifest.json").is_file():
            return candidate
    return None


def packaged_golden_dir() -> Path | None:
    """The subset of the golden data that is packed into the wheel, or None."""
    for parent in Path(__file__).resolve().parents:
        candidate = parent / "deepinfer_plugin" / "golden"
        if candidate.is_dir():
            return candidate
    return None


def require_golden(relative: str) -> Path:
    """Return the path of one golden file; skip the running test where the file is missing."""
    for root in (golden_dir(), packaged_golden_dir()):
        if root is not None and (root / relative).is_file():
            return root / relative
    import pytest

    raise pytest.skip.Exception(f"golden file {relative} is neither in shared/golden nor in deepinfer_plugin/golden")


def run_interpreted(module: str) -> str:
    """What ``python -m deepinfer_kernels.MODULE`` prints, in a process of its own with Triton's interpreter.

    Raises:
        AssertionError: it failed; with the end of what it said.
    """
    root = Path(__file__).parents[1]
    variables = ["TRITON_INTERPRET=1", "CUDA_VISIBLE_DEVICES=", f"PYTHONPATH={root}"]
    command = ["env", *variables, sys.executable, "-m", f"deepinfer_kernels.{module}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout
