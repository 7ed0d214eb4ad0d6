"""On the device: a row of an image has one set of bits, whatever rows are computed with it."""

import pytest
import torch

from deepinfer_kernels.dense_attention import dense_attention
from deepinfer_kernels.dense_attention.reference import dense_attention_reference, make_inputs
from deepinfer_kernels.row_testing import (
    NEEDS_GPU,
    assert_graph_gives_eager_bits,
    assert_one_set_of_bits,
    relative_error,
)

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("num_keys", [1521, 2047])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_keep_their_bits_in_any_batch(dtype: torch.dtype, num_keys: int) -> None:
    q, k, v = make_inputs(1521, num_keys, 16, 64, dtype, torch.Generator().manual_seed(6), "cuda")
    assert_one_set_of_bits(lambda rows: dense_attention(q[rows], k, v, 0.125).flatten(1), 1521, "dense_attention")
    assert_graph_gives_eager_bits(lambda: dense_attention(q[:40], k, v, 0.125), "dense_attention")


@pytest.mark.parametrize("head_dim", [16, 64])
def test_rows_agree_with_the_reference(head_dim: int) -> None:
    q, k, v = make_inputs(300, 500, 4, head_dim, torch.bfloat16, torch.Generator().manual_seed(7), "cuda")
    scale = head_dim**-0.5
    want = dense_attention_reference(q.cpu(), k.cpu(), v.cpu(), scale)
    assert relative_error(dense_attention(q, k, v, scale).cpu(), want) < 5e-3
