"""Attention over packed records on the device: accuracy, bits of rows and tiles, prefill against decode."""

import pytest
import torch

from deepinfer_kernels.kv_store import RecordFormat, gather_records, store_records
from deepinfer_kernels.rope import rope
from deepinfer_kernels.row_testing import (
    NEEDS_GPU,
    assert_graph_gives_eager_bits,
    assert_one_set_of_bits,
    relative_error,
)
from deepinfer_kernels.sparse_attention import sparse_attention
from deepinfer_kernels.sparse_attention.hopper_kernel import fits_hopper, sparse_attention_hopper
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.sparse_attention.triton_kernel import fits_tensor_cores, sparse_attention_triton
from deepinfer_kernels.sparse_attention.triton_kernel_fp32 import sparse_attention_fp32_triton
from deepinfer_kernels.testing import assert_bitwise_equal, ulp_distance_bf16

pytestmark = NEEDS_GPU
FORMATS = (RecordFormat.MXFP8, RecordFormat.NVFP4)
# heads, head width, lengths of both lists
SHAPES = (
    (64, 512, (128, 512)),
    (64, 512, (128, 0)),
    (70, 512, (64, 1100)),
    (4, 64, (64, 70)),
    (16, 128, (128, 0)),
)
Case = dict[str, torch.Tensor]


def make_case(num_tokens: int, num_heads: int, head_dim: int, lengths: tuple[int, int], seed: int) -> Case:
    """Caches whose unlisted slots hold NaN bytes, lists with -1 at any place, row 0 empty, row 1 full."""
    generator = torch.Generator().manual_seed(seed)
    case = {
        "q": torch.randn(num_tokens, num_heads, head_dim, generator=generator).bfloat16().cuda(),
        "sink": torch.randn(num_heads, generator=generator).cuda(),
    }
    angles = torch.rand(num_tokens, 16, generator=generator).cuda() * 6
    case["cos"], case["sin"] = angles.cos(), angles.sin()
    for name, length, fmt in zip(("window", "compressed"), lengths, FORMATS, strict=True):
        cache = torch.full((64, 32, fmt.record_bytes(head_dim)), 255, dtype=torch.uint8, device="cuda")
        listed = torch.randperm(2048, generator=generator)[:1500].cuda()
        store_records(cache, listed, 2 * torch.randn(1500, head_dim, generator=generator).cuda(), fmt)
        place = torch.randint(0, 1500, (num_tokens, length), generator=generator).cuda()
        slots = listed[place]
        num_valid = torch.randint(0, length + 1, (num_tokens, 1), generator=generator).cuda()
        num_valid[:1], num_valid[1:2] = 0, length
        slots = slots.masked_fill(torch.arange(length, device="cuda") >= num_valid, -1)
        slots[3::7] = slots[3::7].flip(1)  # -1 first
        case[f"{name}_cache"], case[f"{name}_slots"] = cache, slots
    return case


def parts_of(case: Case, rows: slice = slice(None)) -> list[SlotList]:
    return [
        SlotList(kv_cache=case[f"{name}_cache"], slots=case[f"{name}_slots"][rows], fmt=fmt)
        for name, fmt in zip(("window", "compressed"), FORMATS, strict=True)
    ]


def run(
    case: Case, rows: slice = slice(None), heads: int | None = None, turn: bool = True, kernel: str = "hopper"
) -> torch.Tensor:
    cos, sin = (case["cos"][rows], case["sin"][rows]) if turn else (None, None)
    scale = case["q"].shape[2] ** -0.5
    parts = parts_of(case, rows)
    assert fits_tensor_cores(case["q"], parts, True)
    if kernel == "tilelang":
        pytest.importorskip("tilelang", reason="TileLang is not installed")
        from deepinfer_kernels.sparse_attention.tilelang_kernel import fits_tilelang, sparse_attention_tilelang

        if not fits_tilelang(case["q"], parts):
            pytest.skip("written for a head width of 512")
        return sparse_attention_tilelang(case["q"][rows], parts, case["sink"], scale, cos=cos, sin=sin)
    if kernel == "hopper":
        if not fits_hopper(case["q"], parts):
            pytest.skip("written for SM90 and a head width of 512")
        return sparse_attention_hopper(case["q"][rows], parts, case["sink"], scale, cos=cos, sin=sin)
    return sparse_attention_triton(case["q"][rows], parts, case["sink"], scale, cos=cos, sin=sin, heads=heads)


def exact(case: Case) -> torch.Tensor:
    """Softmax with a sink in fp64."""
    q = case["q"].double()
    keys = [
        gather_records(part.kv_cache, part.slots, q.shape[2], part.fmt, torch.float32).double()
        for part in parts_of(case)
    ]
    key = torch.cat(keys, dim=1)
    is_none = torch.cat([part.slots for part in parts_of(case)], dim=1) < 0
    scores = torch.einsum("thd,tkd->thk", q, key) * q.shape[2] ** -0.5
    scores = scores.masked_fill(is_none[:, None], -torch.inf)
    sink = case["sink"].double()[None, :, None].expand(len(q), -1, 1)
    weights = torch.cat([scores, sink], dim=2).softmax(dim=2)[:, :, :-1]
    return torch.einsum("thk,tkd->thd", weights, key)


@pytest.mark.parametrize("kernel", ["hopper", "portable", "tilelang"])
@pytest.mark.parametrize(("num_heads", "head_dim", "lengths"), SHAPES)
def test_rows_are_softmax_with_a_sink(num_heads: int, head_dim: int, lengths: tuple[int, int], kernel: str) -> None:
    case = make_case(70, num_heads, head_dim, lengths, 7)
    got = run(case, turn=False, kernel=kernel)
    assert relative_error(got, exact(case)) < 4e-3
    assert not got[0].any()
    reference = sparse_attention_fp32_triton(
        case["q"], parts_of(case), case["sink"], head_dim**-0.5, round_p=True, cos=None, sin=None
    )
    assert relative_error(got, reference) < 1e-3
    assert bool((ulp_distance_bf16(got, reference) > 1).float().mean() < 0.02)


def test_the_public_function_takes_this_kernel_and_turns_the_rounded_rows_back() -> None:
    case = make_case(9, 64, 512, (128, 512), 8)
    got = sparse_attention(
        case["q"],
        case["window_cache"],
        case["window_slots"],
        case["compressed_cache"],
        case["compressed_slots"],
        case["sink"],
        512**-0.5,
        window_format=FORMATS[0],
        compressed_format=FORMATS[1],
        round_p=True,
        cos=case["cos"],
        sin=case["sin"],
    )
    assert_bitwise_equal(got, run(case), "public function")
    assert_bitwise_equal(got, rope(run(case, turn=False), case["cos"], case["sin"], inverse=True), "rotation")


@pytest.mark.parametrize("kernel", ["hopper", "portable", "tilelang"])
def test_rows_keep_their_bits_in_any_batch(kernel: str) -> None:
    case = make_case(2048, 64, 512, (128, 512), 9)
    assert_one_set_of_bits(lambda rows: run(case, rows, kernel=kernel).flatten(1), 2048, "sparse_attention")
    assert_graph_gives_eager_bits(lambda: run(case, slice(0, 40), kernel=kernel), "sparse_attention")


def test_every_head_group_of_the_portable_kernel_gives_the_same_bits() -> None:
    case = make_case(300, 64, 512, (128, 512), 9)
    want = run(case, kernel="portable")
    for heads in (16, 32, 64):
        assert_bitwise_equal(run(case, heads=heads, kernel="portable"), want, f"groups of {heads} heads")


@pytest.mark.parametrize("kernel", ["hopper", "tilelang"])
def test_prefill_rows_are_decode_rows(kernel: str) -> None:
    # 500 positions of a prompt at once, then one at a time: same caches, the list of each position.
    generator = torch.Generator().manual_seed(11)
    case = make_case(500, 64, 512, (128, 512), 11)
    order = torch.randperm(512, generator=generator).cuda()
    for name, fmt in zip(("window", "compressed"), FORMATS, strict=True):
        cache = torch.full((16, 32, fmt.record_bytes(512)), 255, dtype=torch.uint8, device="cuda")
        store_records(cache, order[:500], torch.randn(500, 512, generator=generator).cuda(), fmt)
        case[f"{name}_cache"] = cache
    position = torch.arange(500, device="cuda")[:, None]
    window = (position - 127).clamp(min=0) + torch.arange(128, device="cuda")
    case["window_slots"] = torch.where(window <= position, order[window.clamp(max=499)], -1)
    entry = torch.arange(512, device="cuda")[None]
    case["compressed_slots"] = torch.where(entry <= position, order[entry], -1)
    prefill = run(case, kernel=kernel)
    decode = torch.cat([run(case, slice(t, t + 1), kernel=kernel) for t in range(500)])
    assert_bitwise_equal(prefill, decode, "prefill against decode")
    assert bool(prefill.isfinite().all())


@pytest.mark.parametrize("kernel", ["hopper", "tilelang"])
def test_many_launches_give_one_result(kernel: str) -> None:
    # A missing barrier shows as a result that changes from launch to launch.
    case = make_case(700, 64, 512, (128, 512), 12)
    want = run(case, kernel=kernel)
    for launch in range(50):
        assert_bitwise_equal(run(case, kernel=kernel), want, f"launch {launch}")


@pytest.mark.parametrize("kernel", ["hopper", "tilelang"])
def test_a_longer_list_of_none_changes_nothing(kernel: str) -> None:
    case = make_case(40, 64, 512, (128, 300), 10)
    want = run(case, kernel=kernel)
    longer = {**case, "compressed_slots": torch.nn.functional.pad(case["compressed_slots"], (0, 700), value=-1)}
    assert_bitwise_equal(run(longer, kernel=kernel), want, "more -1")
