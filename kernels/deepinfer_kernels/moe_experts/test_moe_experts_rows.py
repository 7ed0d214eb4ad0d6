"""On the device: every row of the experts has one set of fp32 bits, whatever the batch and the tile."""

from functools import partial

import pytest
import torch

from deepinfer_kernels import dispatch, tiling
from deepinfer_kernels.dispatch import KernelSet
from deepinfer_kernels.moe_experts import moe_experts
from deepinfer_kernels.moe_experts.reference import make_inputs, moe_experts_reference, run_shares
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]

LIMIT = 10.0
SIZES = (1, 2, 7, 16, 33, 63, 64, 65, 85, 86, 200, 512, 1023, 2048, 4096, 8192)
# Codes of the hidden values flip where an fp32 sum ends beside a tie; measured in the Frobenius norm.
RELATIVE_ERROR = 1e-3


@pytest.fixture(params=list(KernelSet), autouse=True)
def kernel_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelSet:
    """Every test runs on both sets of kernels."""
    if request.param is KernelSet.TILELANG:
        pytest.importorskip("tilelang", reason="TileLang is not installed")
    monkeypatch.setattr(dispatch, "_chosen", request.param)
    assert isinstance(request.param, KernelSet)
    return request.param


def _inputs(num_tokens: int, dtype: torch.dtype, seed: int, *, num_experts: int = 16) -> dict[str, torch.Tensor]:
    return make_inputs(num_tokens, 6, 640, 288, num_experts, dtype, torch.Generator().manual_seed(seed), "cuda")


def _run(arguments: dict[str, torch.Tensor], rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
    cut = {k: v[rows] if k in ("x", "topk_idx", "topk_weights") else v for k, v in arguments.items()}
    return moe_experts(num_shares=1, gather=None, **cut, limit=LIMIT, quantize_input=True)


def test_every_row_keeps_its_bits_in_any_batch() -> None:
    arguments = _inputs(max(SIZES), torch.float32, 41)
    batch = _run(arguments)
    for size in SIZES:
        assert_bitwise_equal(_run(arguments, slice(0, size)), batch[:size], f"{size} tokens")
        assert_bitwise_equal(_run(arguments, slice(-size, None)), batch[-size:], f"last {size} tokens")
    for row in (0, 1, 15, 16, 100, 4095, 8191):
        assert_bitwise_equal(_run(arguments, slice(row, row + 1)), batch[row : row + 1], f"token {row} alone")


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_every_tile_of_the_family_gives_the_same_bits(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _inputs(num_tokens, torch.float32, 42)
    want = _run(arguments)
    for (_, up), (_, down) in zip(tiling.EXPERT_TILES, tiling.EXPERT_DOWN_TILES, strict=True):
        assert up.rows == down.rows, "one routing serves both products"
        monkeypatch.setattr(tiling, "EXPERT_TILES", ((1 << 62, up),))
        monkeypatch.setattr(tiling, "EXPERT_DOWN_TILES", ((1 << 62, down),))
        assert_bitwise_equal(_run(arguments), want, f"{up}, {down}")
    for _, rows in tiling.EXPERT_TILELANG_ROWS:
        monkeypatch.setattr(tiling, "EXPERT_TILELANG_ROWS", ((1 << 62, rows),))
        assert_bitwise_equal(_run(arguments), want, f"{rows} rows")


def test_both_ways_of_routing_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _inputs(80, torch.float32, 43)
    want = _run(arguments)
    monkeypatch.setattr(tiling, "ROUTE_ONE_PROGRAM", 0)
    assert_bitwise_equal(_run(arguments), want, "counters in memory")


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
@pytest.mark.parametrize(("inner", "num_ranks"), [(2304, 2), (2304, 4), (2304, 8), (288, 3), (288, 8)])
def test_shares_side_by_side_have_the_bits_of_the_whole(inner: int, num_ranks: int, num_tokens: int) -> None:
    # 2304, the released width: whole blocks on 2 ranks, units of 32 columns on 4 and 8. 288: with a last block that is
    # filled up; and 36 columns a rank, no units.
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(49)
        arguments = make_inputs(num_tokens, 6, 768, inner, 16, dtype, generator, "cuda")
        share = partial(moe_experts, limit=LIMIT, quantize_input=True)
        assert_bitwise_equal(run_shares(share, arguments, num_ranks), _run(arguments), f"{num_ranks} ranks, {dtype}")


def test_shares_in_another_order_are_seen() -> None:
    arguments, share = _inputs(40, torch.bfloat16, 50), partial(moe_experts, limit=LIMIT, quantize_input=True)
    got = run_shares(share, arguments, 2, lambda parts: torch.cat(parts[::-1], dim=1))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(got, _run(arguments), "planted fault")


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_results_agree_with_the_reference(num_tokens: int) -> None:
    arguments = _inputs(num_tokens, torch.float32, 44)
    want = moe_experts_reference(gather=None, **arguments, limit=LIMIT, quantize_input=True).double()
    error = float((_run(arguments).double() - want).norm() / want.norm())
    assert error < RELATIVE_ERROR, error


@pytest.mark.parametrize("case", ["all tokens choose the same experts", "some experts have no token"])
def test_uneven_routing_gives_the_same_bits(case: str) -> None:
    arguments = _inputs(300, torch.float32, 45)
    arguments["topk_idx"][:] = torch.tensor([0, 3, 7, 8, 12, 15], dtype=torch.int32, device="cuda")
    if case == "some experts have no token":
        arguments["topk_idx"][::2] = torch.tensor([0, 1, 2, 8, 9, 15], dtype=torch.int32, device="cuda")
    batch = _run(arguments)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(46)).cuda()
    assert_bitwise_equal(_run(arguments, order), batch[order], case)
    assert_bitwise_equal(_run(arguments, slice(7, 9)), batch[7:9], case)


def test_every_code_and_scale_unpacks_exactly() -> None:
    # One non-zero activation per token picks one column of the weight: the sum is that value.
    w2 = torch.arange(256, dtype=torch.uint8).repeat(4).view(1, 64, 16).cuda()
    scale = torch.linspace(26, 144, 64).to(torch.uint8).view(1, 64, 1).cuda()
    from deepinfer_kernels.linear.prepare_kernel import prepare_rows
    from deepinfer_kernels.moe_experts.down_kernel import experts_down
    from deepinfer_kernels.moe_experts.route_kernel import route_pairs

    rows = prepare_rows(torch.eye(32, device="cuda", dtype=torch.bfloat16), codes=tiling.E2M1_CODES, quantize=False)
    tile = tiling.EXPERT_DOWN_TILES[0][1]
    tiles = route_pairs(torch.zeros(32, 1, dtype=torch.int32, device="cuda"), 1, tile.rows)
    got = experts_down(rows, w2, scale, tiles, out_dtype=torch.float32, tile=tile)
    want = mxfp4_dequant(w2[0], scale[0], torch.float32).t()
    assert torch.equal(got, want), (got != want).nonzero()[:4]


def test_nan_in_one_token_stays_there() -> None:
    arguments = _inputs(40, torch.bfloat16, 47)
    clean = _run(arguments)
    arguments["x"][4, 3] = float("nan")
    got = _run(arguments)
    assert bool(got[4].isnan().all())
    got[4] = clean[4]
    assert_bitwise_equal(got, clean, "tokens beside the NaN")


@pytest.mark.parametrize("num_tokens", [2, 200])
def test_a_graph_replays_the_bits_of_the_eager_call(num_tokens: int) -> None:
    arguments = _inputs(num_tokens, torch.bfloat16, 48)
    other = _inputs(num_tokens, torch.bfloat16, 49)
    _run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _run(arguments)
    for name in ("x", "topk_idx", "topk_weights"):
        arguments[name].copy_(other[name])
    graph.replay()
    assert_bitwise_equal(got, _run(arguments), "another routing in the same graph")
