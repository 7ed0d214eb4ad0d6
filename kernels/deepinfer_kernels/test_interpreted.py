"""Without a GPU: small cases of the kernels run in Triton's interpreter, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import deepinfer_kernels


def test_kernels_agree_with_the_references_in_the_interpreter() -> None:
    root = Path(deepinfer_kernels.__file__).parents[1]
    variables = ["TRITON_INTERPRET=1", "CUDA_VISIBLE_DEVICES=", f"PYTHONPATH={root}"]
    command = ["env", *variables, sys.executable, "-m", "deepinfer_kernels.interpreted"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
