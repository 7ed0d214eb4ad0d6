"""The Engram gate and lookup on the device, at the width of the model."""

import pytest
import torch

from deepinfer_kernels.dispatch import KernelSet
from deepinfer_kernels.engram_gate.reference import TOLERANCE, engram_gate_reference, make_inputs
from deepinfer_kernels.engram_gate.triton_kernel import engram_gate_triton
from deepinfer_kernels.row_testing import NEEDS_GPU, assert_graph_gives_eager_bits, assert_one_set_of_bits
from deepinfer_kernels.testing import assert_close

pytestmark = NEEDS_GPU
NUM_ROWS = 4096


@pytest.mark.parametrize("kernel_set", list(KernelSet))
def test_rows_keep_their_fp32_bits(kernel_set: KernelSet) -> None:
    gate = engram_gate_triton
    if kernel_set is KernelSet.TILELANG:
        pytest.importorskip("tilelang", reason="TileLang is not installed")
        from deepinfer_kernels.engram_gate.tilelang_kernel import engram_gate_tilelang

        gate = engram_gate_tilelang
    streams, key, value, q_weight, k_weight = make_inputs(
        NUM_ROWS, 4, 5120, torch.bfloat16, torch.Generator().manual_seed(6), "cuda"
    )

    def run(rows: slice) -> torch.Tensor:
        arguments = (streams[rows], key[rows], value[rows], q_weight, k_weight, 1e-20, None, torch.float32)
        return gate(*arguments).flatten(1)

    assert_one_set_of_bits(run, NUM_ROWS, "engram_gate")
    assert_graph_gives_eager_bits(lambda: run(slice(0, 100)), "engram_gate")
    few = slice(0, 64)
    x, k, v = streams[few].float(), key[few].float(), value[few].float()
    want = engram_gate_reference(x, k, v, q_weight, k_weight, 1e-20, None).flatten(1)
    assert_close(run(few), want, TOLERANCE, label="engram_gate")
