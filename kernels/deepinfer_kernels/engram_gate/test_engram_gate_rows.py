"""The Engram gate and lookup on the device, at the width of the model."""

import torch

from deepinfer_kernels.engram_gate.reference import make_inputs
from deepinfer_kernels.engram_gate.triton_kernel import engram_gate_triton
from deepinfer_kernels.row_testing import NEEDS_GPU, assert_graph_gives_eager_bits, assert_one_set_of_bits

pytestmark = NEEDS_GPU
NUM_ROWS = 4096


def test_rows_keep_their_fp32_bits() -> None:
    streams, key, value, q_weight, k_weight = make_inputs(
        NUM_ROWS, 4, 5120, torch.bfloat16, torch.Generator().manual_seed(6), "cuda"
    )

    def run(rows: slice) -> torch.Tensor:
        arguments = (streams[rows], key[rows], value[rows], q_weight, k_weight, 1e-20, None, torch.float32)
        return engram_gate_triton(*arguments).flatten(1)

    assert_one_set_of_bits(run, NUM_ROWS, "engram_gate")
    assert_graph_gives_eager_bits(lambda: run(slice(0, 100)), "engram_gate")
