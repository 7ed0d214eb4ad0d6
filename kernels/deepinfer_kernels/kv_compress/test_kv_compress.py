from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.kv_compress import compress_pairs
from deepinfer_kernels.kv_compress.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal, require_golden, ulp_distance_bf16

WIDTH, RING = 48, 8
_ROW_NAMES = ("latent", "score", "positions", "req_idx")


def _inputs(lengths: list[int], starts: list[int], device: str) -> dict[str, torch.Tensor]:
    return make_inputs(lengths, starts, WIDTH, RING, torch.Generator().manual_seed(5), device)


def _run(
    inputs: dict[str, torch.Tensor], rows: slice | torch.Tensor, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    chosen = {name: inputs[name][rows] for name in _ROW_NAMES}
    return compress_pairs(
        **chosen, state_cache=inputs["state_cache"], state_block=inputs["state_block"], out_dtype=out_dtype
    )


def _clone(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


@pytest.mark.parametrize("vectors", ["a", "b"])
@pytest.mark.parametrize("cut", [21, 10, 9, 1])
def test_pooled_rows_reach_the_golden_latent(vectors: str, cut: int, device: str) -> None:
    golden = {k: v.to(device) for k, v in load_file(require_golden(f"kernels/vectors_{vectors}.safetensors")).items()}
    x = golden["comp.x"].float()
    latent, score = x @ golden["comp.wkv"].float().t(), x @ golden["comp.wgate"].float().t()
    num_tokens, width = latent.shape
    state = torch.full((1, RING, 2 * width), float("nan"), device=device)
    pooled = torch.cat(
        [
            compress_pairs(
                latent[start : start + cut],
                score[start : start + cut],
                torch.arange(start, min(start + cut, num_tokens), device=device),
                torch.zeros(min(cut, num_tokens - start), dtype=torch.int32, device=device),
                state,
                torch.zeros(1, dtype=torch.int32, device=device),
                out_dtype=torch.bfloat16,
            )
            for start in range(0, num_tokens, cut)
        ]
    )
    u = pooled[1::2].float()
    got = (golden["comp.norm"].float() * (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-20))).bfloat16()
    assert int(ulp_distance_bf16(got, golden["comp.r2.latent"]).max()) <= 1
    assert not pooled[0::2].any()


def test_a_pair_is_the_softmax_weighted_sum_of_its_two_tokens(device: str) -> None:
    inputs = _inputs([6], [0], device)
    got = _run(inputs, slice(None))
    weights = inputs["score"].double().view(3, 2, WIDTH).softmax(dim=1)
    want = (weights * inputs["latent"].double().view(3, 2, WIDTH)).sum(dim=1)
    assert (got[1::2].double() - want).abs().max() < 1e-6
    assert not got[0::2].any()


@pytest.mark.parametrize("sizes", [[1] * 33, [2] * 16 + [1], [7] * 4 + [5], [8, 9, 16], [32, 1], [1, 32]])
@pytest.mark.parametrize("start", [0, 1])
def test_any_cut_into_calls_gives_the_rows_and_state_of_one_call(sizes: list[int], start: int, device: str) -> None:
    whole = _inputs([33], [start], device)
    parts = _clone(whole)
    want = _run(whole, slice(None))
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    got = torch.cat([_run(parts, slice(low, high)) for low, high in pairwise(bounds)])
    assert_bitwise_equal(got, want, label=f"sizes {sizes}")
    assert_bitwise_equal(parts["state_cache"], whole["state_cache"], label="state")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    lengths, starts = [1, 9, 2, 1, 8, 17, 1], [5, 0, 7, 4, 3, 1, 0]
    batch = _inputs(lengths, starts, device)
    single, rowwise = _clone(batch), _clone(batch)
    want = _run(batch, slice(None))
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    alone = [_run(single, slice(low, high)) for low, high in pairwise(bounds)]
    assert_bitwise_equal(torch.cat(alone), want, label="each request alone")
    rows = torch.cat([_run(rowwise, slice(t, t + 1)) for t in range(len(want))])
    assert_bitwise_equal(rows, want, label="each row alone")
    for other in (single, rowwise):
        assert_bitwise_equal(other["state_cache"], batch["state_cache"], label="state")


@pytest.mark.parametrize("num_tokens", [0, 1, RING - 1, RING, RING + 1, 2 * RING + 3])
def test_the_state_keeps_the_last_rows_of_each_request(num_tokens: int, device: str) -> None:
    inputs = _inputs([num_tokens, 3], [3, 0], device)
    before = inputs["state_cache"].clone()
    _run(inputs, slice(None))
    state, block = inputs["state_cache"], int(inputs["state_block"][0])
    kept = range(max(0, num_tokens - RING), num_tokens)
    for row in kept:
        want = torch.cat([inputs["latent"][row], inputs["score"][row]])
        assert_bitwise_equal(state[block, (3 + row) % RING], want, label=f"row {row}")
    untouched = [i for i in range(RING) if i not in {(3 + row) % RING for row in kept}]
    assert_bitwise_equal(state[block, untouched], before[block, untouched], label="rest of the ring")
    assert_bitwise_equal(state[0], before[0], label="block of no request")


def test_a_neighbour_of_another_request_or_position_is_not_taken_for_the_pair(device: str) -> None:
    # Request 1 starts at an odd position right behind a row at the position before, which belongs to request 0.
    inputs = _inputs([3, 2], [0, 3], device)
    want = _run(_clone(inputs), slice(3, 5))
    got = _run(inputs, slice(None))
    assert_bitwise_equal(got[3:], want, label="request 1")
    assert bool(got[3].any())


def test_nan_in_unused_state_and_padded_rows_does_not_leak(device: str) -> None:
    inputs = _inputs([4, 5], [0, 1], device)
    want_inputs = _clone(inputs)
    want = _run(want_inputs, slice(0, 4))
    inputs["req_idx"][4:] = -1
    for name in ("latent", "score"):
        inputs[name][4:] = float("nan")
    inputs["state_cache"][int(inputs["state_block"][0])] = float("nan")
    got = _run(inputs, slice(None))
    assert_bitwise_equal(got[:4], want, label="real rows")
    assert not got[4:].any()
    untouched = int(inputs["state_block"][1])
    assert_bitwise_equal(
        inputs["state_cache"][untouched], want_inputs["state_cache"][untouched], label="state of the padded request"
    )


def test_strided_rows_and_a_strided_state_give_the_same_bits(device: str) -> None:
    inputs = _inputs([6, 3], [1, 2], device)
    strided = _clone(inputs)
    both = torch.cat([inputs["score"], inputs["latent"]], dim=1)
    strided["score"], strided["latent"] = both[:, :WIDTH], both[:, WIDTH:]
    roomy = torch.full((3, RING + 2, 2 * WIDTH), float("nan"), device=device)
    roomy[:, 1:-1] = inputs["state_cache"]
    strided["state_cache"] = roomy[:, 1:-1]
    want = _run(inputs, slice(None))
    assert_bitwise_equal(_run(strided, slice(None)), want, label="rows")
    assert_bitwise_equal(strided["state_cache"].contiguous(), inputs["state_cache"], label="state")
    assert bool(roomy[:, 0].isnan().all())


def test_bf16_rows_are_the_fp32_rows_rounded_once(device: str) -> None:
    inputs = _inputs([9], [1], device)
    want = _run(_clone(inputs), slice(None)).bfloat16()
    assert_bitwise_equal(_run(inputs, slice(None), torch.bfloat16), want, label="rounded")


def test_errors_name_operation_argument_and_rule() -> None:
    inputs = _inputs([4], [0], "cpu")
    with pytest.raises(UnsupportedError, match=r"compress_pairs: latent is torch.bfloat16, expected torch.float32"):
        compress_pairs(**{**inputs, "latent": inputs["latent"].bfloat16()}, out_dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"compress_pairs: score has shape \[3, 48\], expected .* \[4, 48\]"):
        compress_pairs(**{**inputs, "score": inputs["score"][1:]}, out_dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"compress_pairs: req_idx has shape \[3\], expected \[4\]"):
        compress_pairs(**{**inputs, "req_idx": inputs["req_idx"][1:]}, out_dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"compress_pairs: state_cache has shape \[2, 8, 95\], expected .* 96\]"):
        compress_pairs(**{**inputs, "state_cache": inputs["state_cache"][..., 1:]}, out_dtype=torch.float32)
