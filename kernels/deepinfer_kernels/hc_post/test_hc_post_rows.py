"""mHC elementwise kernels on the device: collapse, Sinkhorn and post at the width of the model, in fp32."""

import pytest
import torch

from deepinfer_kernels.hc_collapse.reference import hc_collapse_reference
from deepinfer_kernels.hc_collapse.triton_kernel import hc_collapse_triton
from deepinfer_kernels.hc_post.reference import make_inputs
from deepinfer_kernels.hc_post.triton_kernel import hc_post_triton
from deepinfer_kernels.hc_sinkhorn import hc_sinkhorn
from deepinfer_kernels.hc_sinkhorn.reference import make_inputs as make_logits
from deepinfer_kernels.row_testing import NEEDS_GPU, NUM_ROWS, assert_graph_gives_eager_bits, assert_one_set_of_bits
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = NEEDS_GPU


def test_post_and_collapse_rows_keep_their_fp32_bits_from_1_to_8192_rows() -> None:
    y, streams, post, comb = make_inputs(NUM_ROWS, 4, 5120, torch.bfloat16, "cuda", torch.Generator().manual_seed(4))

    def run(rows: slice) -> torch.Tensor:
        return hc_post_triton(y[rows], streams[rows], post[rows], comb[rows], torch.float32).flatten(1)

    assert_one_set_of_bits(run, NUM_ROWS, "hc_post")
    assert_one_set_of_bits(
        lambda rows: hc_collapse_triton(streams[rows], post[rows], torch.float32), NUM_ROWS, "hc_collapse"
    )
    assert_graph_gives_eager_bits(lambda: hc_post_triton(y, streams, post, comb), "hc_post")
    # Products and sums are rounded one by one, so the bits are those of the reference.
    few = slice(0, 64)
    want = hc_collapse_reference(streams[few].float().cpu(), post[few].cpu())
    assert_bitwise_equal(hc_collapse_triton(streams[few], post[few], torch.float32).cpu(), want, "collapse")


def test_the_tilelang_kernel_has_the_bits_of_the_other_one_in_any_batch() -> None:
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from deepinfer_kernels.hc_post.tilelang_kernel import hc_post_tilelang

    y, streams, post, comb = make_inputs(NUM_ROWS, 4, 5120, torch.bfloat16, "cuda", torch.Generator().manual_seed(4))

    def run(rows: slice) -> torch.Tensor:
        return hc_post_tilelang(y[rows], streams[rows], post[rows], comb[rows], torch.float32).flatten(1)

    assert_one_set_of_bits(run, NUM_ROWS, "hc_post")
    assert_graph_gives_eager_bits(lambda: hc_post_tilelang(y, streams, post, comb), "hc_post")
    want = hc_post_triton(y, streams, post, comb, torch.float32).flatten(1)
    assert_bitwise_equal(run(slice(0, NUM_ROWS)), want, "both sets")


def test_sinkhorn_rows_keep_their_bits_from_1_to_8192_rows() -> None:
    logits, scale, base = make_logits(NUM_ROWS, 4, "cuda", torch.Generator().manual_seed(5))

    def run(rows: slice) -> torch.Tensor:
        parts = hc_sinkhorn(logits[rows], scale, base, iters=20, eps=1e-6)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    assert_one_set_of_bits(run, NUM_ROWS, "hc_sinkhorn")
