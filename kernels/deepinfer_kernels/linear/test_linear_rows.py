"""On the device: every row has one set of fp32 bits, whatever the number of rows, the kernel and the tile."""

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.linear import dequantize_blocks, grouped_linear, linear, mxfp8_linear
from deepinfer_kernels.linear.reference import make_inputs
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]

SIZES = (1, 2, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 256, 511, 512, 513, 2048, 4097, 8192)
ALONE = (0, 1, 15, 16, 63, 64, 127, 128, 511, 512, 4095, 8191)
# outputs, K: with and without parts of K, and sizes no tile divides.
SHAPES = ((1280, 5120), (4096, 2304), (8192, 1280), (8192, 2304), (1000, 320))
_NO_PARTS = 1 << 20  # wider than any K
RELATIVE_ERROR = 2e-5  # of fp32 sums over K = 5120, in the Frobenius norm


def _inputs(num_out: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return make_inputs(max(SIZES), num_out, depth, torch.bfloat16, "cuda", generator)


@pytest.mark.parametrize(("num_out", "depth"), SHAPES)
@pytest.mark.parametrize("op", ["linear", "mxfp8_linear", "grouped_linear"])
def test_every_row_keeps_its_bits_in_any_batch(op: str, num_out: int, depth: int) -> None:
    x, weight, scale = _inputs(num_out, depth, 31)
    dense = dequantize_blocks(weight, scale, torch.bfloat16)

    def run(rows: slice) -> torch.Tensor:
        if op == "linear":
            return linear(x[rows], dense, out_dtype=torch.float32)
        if op == "mxfp8_linear":
            return mxfp8_linear(x[rows], weight, scale, out_dtype=torch.float32, quantize_input=True)
        pairs = torch.stack([x[rows], x[rows].flip(1)], dim=1)
        return grouped_linear(pairs, weight, scale, out_dtype=torch.float32)

    batch = run(slice(None))
    for size in SIZES:
        assert_bitwise_equal(run(slice(0, size)), batch[:size], f"{size} rows")
        assert_bitwise_equal(run(slice(8192 - size, None)), batch[8192 - size :], f"last {size} rows")
    for row in ALONE:
        assert_bitwise_equal(run(slice(row, row + 1)), batch[row : row + 1], f"row {row} alone")


@pytest.mark.parametrize(("num_out", "depth"), SHAPES)
def test_every_tile_of_the_families_gives_the_same_bits(num_out: int, depth: int) -> None:
    from deepinfer_kernels.linear.mxfp8_kernel import mxfp8_narrow
    from deepinfer_kernels.linear.plain_kernel import plain_narrow
    from deepinfer_kernels.linear.prepare_kernel import prepare_rows
    from deepinfer_kernels.linear.unpack_kernel import unpack_weight
    from deepinfer_kernels.linear.wide_kernel import wide_matmul
    from deepinfer_kernels.triton_formats import WEIGHT_SHIFT

    x, weight, scale = _inputs(num_out, depth, 32)
    x = x[:600]
    rows = prepare_rows(x, codes=tiling.E4M3_CODES, quantize=True)
    dense, turned = dequantize_blocks(weight, scale, torch.bfloat16), unpack_weight(weight, scale)
    wide = [tile for _, tile in tiling.WIDE_TILES + tiling.WIDE_SPLIT_TILES]
    for split_k in (_NO_PARTS, *(width for _, _, width in tiling.SPLIT_K_BY_SHAPE)):
        tiles = wide if split_k == _NO_PARTS else [tile for _, tile in tiling.WIDE_SPLIT_TILES]
        want = wide_matmul(rows, turned, 1, torch.float32, tiles[0], split_k, shift=WEIGHT_SHIFT)
        plain = wide_matmul(x, dense, 1, torch.float32, tiles[0], split_k)
        for tile in tiles[1:]:
            got = wide_matmul(rows, turned, 1, torch.float32, tile, split_k, shift=WEIGHT_SHIFT)
            assert_bitwise_equal(got, want, f"turned, {split_k}, {tile}")
            got = wide_matmul(x, dense, 1, torch.float32, tile, split_k)
            assert_bitwise_equal(got, plain, f"plain, {split_k}, {tile}")
        for _, tile in tiling.MXFP8_TILES + tiling.MXFP8_SPLIT_TILES:
            got = mxfp8_narrow(rows, weight, scale, 1, torch.float32, tile, split_k)
            assert_bitwise_equal(got, want, f"mxfp8, {split_k}, {tile}")
        for _, tile in tiling.PLAIN_TILES + tiling.PLAIN_LARGE_TILES:
            got = plain_narrow(x, dense, torch.float32, tile, split_k)
            assert_bitwise_equal(got, plain, f"bf16, {split_k}, {tile}")


@pytest.mark.parametrize("num_rows", [1, 64, 300])
def test_products_agree_with_double_precision(num_rows: int) -> None:
    x, weight, scale = _inputs(1280, 5120, 33)
    x, dense = x[:num_rows], dequantize_blocks(weight, scale, torch.bfloat16)
    for label, got, rows in (
        ("bf16", linear(x, dense, out_dtype=torch.float32), x),
        (
            "mxfp8",
            mxfp8_linear(x, weight, scale, out_dtype=torch.float32, quantize_input=True),
            mxfp8_fake_quant(x),
        ),
        ("mxfp8, rows as they are", grouped_linear(x[:, None], weight, scale, out_dtype=torch.float32)[:, 0], x),
    ):
        want = rows.double() @ dense.double().t()
        error = float((got.double() - want).norm() / want.norm())
        assert error < RELATIVE_ERROR, f"{label}: {error}"


def test_every_code_and_scale_unpacks_exactly() -> None:
    from deepinfer_kernels.linear.unpack_kernel import unpack_weight
    from deepinfer_kernels.triton_formats import WEIGHT_SHIFT

    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[[0x7F, 0xFF]] = 0  # the two NaN: no checkpoint holds them
    lowest, highest = 26, 144
    scale = torch.arange(lowest, highest + 1, dtype=torch.uint8, device="cuda")[:, None].repeat(1, 8)
    weight = codes.view(torch.float8_e4m3fn).repeat(32 * scale.shape[0], 1)
    got = unpack_weight(weight, scale).double() * WEIGHT_SHIFT
    want = dequantize_blocks(weight, scale, torch.float32).double()
    assert torch.equal(got, want.view(-1, 2, 64, 2).transpose(2, 3).reshape(-1, 256))


def test_a_scale_of_nan_gives_nan_in_every_kernel() -> None:
    x, weight, scale = _inputs(64, 320, 36)
    scale[1, 3] = 255
    for num_rows in (1, 300):
        got = mxfp8_linear(x[:num_rows], weight, scale, out_dtype=torch.float32, quantize_input=True)
        assert bool(got[:, 32:].isnan().all())
        assert not bool(got[:, :32].isnan().any())


def test_nan_in_one_row_stays_there_in_every_kernel() -> None:
    x, weight, scale = _inputs(1280, 320, 34)
    for num_rows in (17, 300):
        rows = x[:num_rows].clone()
        want = mxfp8_linear(rows, weight, scale, out_dtype=torch.float32, quantize_input=True)
        rows[5, 7] = float("nan")
        got = mxfp8_linear(rows, weight, scale, out_dtype=torch.float32, quantize_input=True)
        assert bool(got[5].isnan().all())
        got[5] = want[5]
        assert_bitwise_equal(got, want, f"{num_rows} rows")


def test_a_graph_replays_the_bits_of_the_eager_call() -> None:
    x, weight, scale = _inputs(1280, 5120, 35)
    for num_rows in (3, 300):
        rows = x[:num_rows].clone()
        want = mxfp8_linear(rows, weight, scale, out_dtype=torch.float32, quantize_input=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = mxfp8_linear(rows, weight, scale, out_dtype=torch.float32, quantize_input=True)
        got.fill_(float("nan"))
        graph.replay()
        assert_bitwise_equal(got, want, f"{num_rows} rows")
