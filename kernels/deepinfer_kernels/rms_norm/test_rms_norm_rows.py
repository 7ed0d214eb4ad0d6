"""RMSNorm on the device: bits of a row in fp32, bf16 inputs, at the widths of the model."""

import pytest
import torch

from deepinfer_kernels.rms_norm.reference import make_inputs
from deepinfer_kernels.rms_norm.triton_kernel import rms_norm_triton
from deepinfer_kernels.row_testing import NEEDS_GPU, NUM_ROWS, assert_graph_gives_eager_bits, assert_one_set_of_bits

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("width", [128, 512, 1280, 5120])
def test_rows_keep_their_fp32_bits_from_1_to_8192_rows(width: int) -> None:
    x, weight = make_inputs(NUM_ROWS, width, torch.bfloat16, "cuda", torch.Generator().manual_seed(1))
    assert_one_set_of_bits(lambda rows: rms_norm_triton(x[rows], weight, 1e-20, torch.float32), NUM_ROWS, "rms_norm")
    assert_graph_gives_eager_bits(lambda: rms_norm_triton(x, weight, 1e-20), "rms_norm")
    wide = x.double()
    want = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    got = rms_norm_triton(x, weight, 1e-20, torch.float32)
    assert float((got.double() - want).abs().max()) < 1e-5
