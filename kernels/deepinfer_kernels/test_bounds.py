"""No kernel leaves its arguments, in Triton's interpreter, in processes of its own."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import deepinfer_kernels
from deepinfer_kernels.linear.triton_kernel import prepared_parts
from deepinfer_kernels.moe_experts import triton_kernel
from deepinfer_kernels.moe_experts.triton_kernel import moe_experts_triton
from deepinfer_kernels.testing import run_interpreted

_PACKAGE = Path(deepinfer_kernels.__file__).parent
_KERNEL = re.compile(r"^@triton\.jit.*\ndef (\w+_kernel)\(", re.MULTILINE)


def test_planted_faults_are_found_with_kernel_argument_and_offset() -> None:
    behind, before, also_behind, unwritten, between = run_interpreted("interpreted_bounds_faults").splitlines()
    assert behind == (
        "_copy_kernel: load of 4 bytes at byte 20 of the storage of x_ptr, expected bytes 0 to 19 of its storage; "
        "1 lanes leave the arguments"
    )
    assert before == (
        "_copy_kernel: store of 4 bytes at byte -4 of out_ptr, expected an element of its view, 5 x 4 bytes; "
        "1 lanes leave the arguments"
    )
    assert also_behind == behind
    assert unwritten.startswith(f"_count_kernel: atomic of 4 bytes at byte {4 * 0x7B7B7B7B} of count_ptr, ")
    assert between.startswith("_rows_kernel: store of 4 bytes at byte 12 of out_ptr, ")


def test_every_kernel_stays_inside_its_arguments_at_every_border() -> None:
    launched = {name for part in ("", "_rows") for name in run_interpreted(f"interpreted_layouts{part}").split()}
    written = {name for path in _PACKAGE.glob("*/*.py") for name in _KERNEL.findall(path.read_text(encoding="utf-8"))}
    assert launched == written


def test_rows_that_are_not_prepared_reach_no_kernel_that_reads_whole_blocks() -> None:
    rows, scale = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.uint8)
    weight = torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match=r"\[2, 64\]"):
        prepared_parts(rows, weight, scale, torch.bfloat16)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    shapes = ((1, 64, 32), (1, 64, 2), (1, 64, 16), (1, 64, 1))
    w13, w13_scale, w2, w2_scale = (torch.zeros(shape, dtype=torch.uint8) for shape in shapes)
    arguments = (rows, ids, weights, w13, w13_scale, w2, w2_scale, rows)
    with patch.object(triton_kernel, "route_pairs"), pytest.raises(AssertionError, match=r"\[2, 64\]"):
        moe_experts_triton(*arguments, limit=7.0, quantize_input=True)
