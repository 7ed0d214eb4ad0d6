"""Update of the streams against the golden vectors, the example of the specification, and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.hc_post.reference import TOLERANCE_BF16_ULPS, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    require_golden,
)


def _inputs(
    num_rows: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, 4, 97, dtype, device, torch.Generator().manual_seed(19))


@pytest.mark.parametrize("name", ["a", "b"])
def test_streams_agree_with_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    got = hc_post(*(golden[f"mhc.full.{part}"] for part in ("y", "x", "post", "comb")))
    assert_within_ulps_bf16(got, golden["mhc.full.out"], TOLERANCE_BF16_ULPS, "streams")


def test_example_of_the_specification_gives_its_numbers(device: str) -> None:
    comb = torch.tensor(
        [
            [0.228056, 0.589508, 0.133751, 0.048685],
            [0.386272, 0.274302, 0.167482, 0.171944],
            [0.282237, 0.098248, 0.253400, 0.366114],
            [0.103435, 0.037941, 0.445366, 0.413256],
        ],
        device=device,
    )
    post = torch.tensor([[1.122904, 1.197012, 0.826795, 0.846684]], device=device)
    streams = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).view(1, 4, 1)
    got = hc_post(torch.full((1, 1), 10.0, device=device), streams, post, comb.unsqueeze(0))
    assert_close(got.flatten(), torch.tensor([13.490087, 13.554740, 11.278332, 11.610781]), 2e-5, "streams")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_sources_are_rows_of_comb_and_the_sum_is_rounded_once(num_rows: int, device: str) -> None:
    y, streams, post, comb = _inputs(num_rows, torch.bfloat16, device)
    want = torch.einsum("td,tj->tjd", y.double(), post.double())
    want += torch.einsum("tij,tid->tjd", comb.double(), streams.double())
    got = hc_post(y.float(), streams.float(), post, comb)
    assert_close(got, want.float(), TOLERANCE_FP32, "streams")
    assert_bitwise_equal(hc_post(y, streams, post, comb), got.bfloat16(), "bf16")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    y, streams, post, comb = _inputs(40, torch.float32, device)
    assert_rows_keep_their_bits(lambda rows: hc_post(y[rows], streams[rows], post[rows], comb[rows]), 40, "hc_post")


def test_strided_input_gives_the_same_bits(device: str) -> None:
    y, streams, post, comb = _inputs(20, torch.float32, device)
    turned = streams.transpose(0, 1).contiguous().transpose(0, 1)
    got = hc_post(y.t().contiguous().t(), turned, post, comb.transpose(1, 2).contiguous().transpose(1, 2))
    assert_bitwise_equal(got, hc_post(y, streams, post, comb), "other strides")


def test_nan_in_one_row_stays_there(device: str) -> None:
    y, streams, post, comb = _inputs(20, torch.float32, device)
    want = hc_post(y, streams, post, comb)
    y[3] = float("nan")
    got = hc_post(y, streams, post, comb)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    y, streams, post, comb = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^hc_post: y is \[1, 97\], expected \[2, 97\]; one row per token"):
        hc_post(y[:1], streams, post, comb)
    with pytest.raises(ShapeError, match=r"^hc_post: comb is \[2, 4, 3\], expected \[2, 4, 4\]; one weight per pair"):
        hc_post(y, streams, post, comb[..., :3])
    with pytest.raises(UnsupportedError, match=r"^hc_post: streams is torch.bfloat16, expected torch.float32;"):
        hc_post(y, streams.bfloat16(), post, comb)
