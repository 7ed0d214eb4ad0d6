"""Mix logits on the device: bf16 streams at the width of the model, every tile, against double precision."""

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.hc_mix.reference import make_inputs
from deepinfer_kernels.hc_mix.triton_kernel import hc_mix_triton
from deepinfer_kernels.row_testing import NEEDS_GPU, NUM_ROWS, assert_graph_gives_eager_bits, assert_one_set_of_bits
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = NEEDS_GPU


def test_rows_keep_their_fp32_bits_from_1_to_8192_rows() -> None:
    streams, fn = make_inputs(NUM_ROWS, 4, 5120, torch.bfloat16, "cuda", torch.Generator().manual_seed(2))
    assert_one_set_of_bits(lambda rows: hc_mix_triton(streams[rows], fn, 1e-20), NUM_ROWS, "hc_mix")
    assert_graph_gives_eager_bits(lambda: hc_mix_triton(streams, fn, 1e-20), "hc_mix")


def test_the_tilelang_kernel_keeps_the_bits_of_a_row_and_loses_nothing() -> None:
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    from deepinfer_kernels.hc_mix.tilelang_kernel import hc_mix_tilelang

    streams, fn = make_inputs(NUM_ROWS, 4, 5120, torch.bfloat16, "cuda", torch.Generator().manual_seed(2))
    assert_one_set_of_bits(lambda rows: hc_mix_tilelang(streams[rows], fn, 1e-20), NUM_ROWS, "hc_mix")
    assert_graph_gives_eager_bits(lambda: hc_mix_tilelang(streams, fn, 1e-20), "hc_mix")
    flat = streams[:300].double().flatten(1)
    exact = flat @ fn.double().t() / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    assert float((hc_mix_tilelang(streams[:300], fn, 1e-20).double() - exact).abs().max()) < 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tile_gives_the_same_bits_and_the_fp32_weights_lose_nothing(dtype: torch.dtype) -> None:
    streams, fn = make_inputs(300, 4, 5120, dtype, "cuda", torch.Generator().manual_seed(3))
    want = hc_mix_triton(streams, fn, 1e-20)
    for tile in (*(tile for _, tile in tiling.HC_MIX_TILES), (64, 4, True), (64, 1, False)):
        assert_bitwise_equal(hc_mix_triton(streams, fn, 1e-20, tile), want, f"tile of {tile} rows")
    flat = streams.double().flatten(1)
    exact = flat @ fn.double().t() / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    # bf16 weights would be off by 1e-3.
    assert float((want.double() - exact).abs().max()) < (3e-5 if dtype is torch.bfloat16 else 1e-5)
