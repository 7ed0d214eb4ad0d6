"""The combine: order of the sum, one rounding, and row independence."""

import re

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.moe_combine.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal

HIDDEN_SIZE = 97


def inputs(num_tokens: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return make_inputs(num_tokens, 6, HIDDEN_SIZE, dtype, torch.Generator().manual_seed(6), device)


def test_slots_are_added_in_ascending_order_and_the_shared_expert_last(device: str) -> None:
    big = 2.0**24  # adding 1 to it changes nothing in fp32
    slots = torch.tensor([[[big], [-big], [1.0]], [[1.0], [big], [-big]], [[big], [1.0], [-big]]], device=device)
    shared = torch.tensor([[1.0], [1.0], [3.0]], device=device)
    assert moe_combine(slots, shared).flatten().tolist() == [2.0, 1.0, 3.0]
    late = torch.tensor([[[1.0], [1.0]]], device=device), torch.tensor([[big]], device=device)
    assert moe_combine(*late).item() == big + 2  # (1 + 1) + big; with the shared expert first it would be big


def test_bf16_is_rounded_once_at_the_end(device: str) -> None:
    slots = torch.tensor([[[256.0], [1.0]]], device=device).bfloat16()
    shared = torch.tensor([[1.0]], device=device).bfloat16()
    # 256 + 1 rounds back to 256 in bf16; only the fp32 sum 258 shows both ones.
    assert moe_combine(slots, shared).item() == 258.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_every_row_keeps_its_bits_in_any_batch(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    expert_out, shared_out = inputs(num_tokens, dtype, device)
    batch = moe_combine(expert_out, shared_out)
    assert batch.shape == shared_out.shape
    assert batch.dtype == dtype
    for t in range(num_tokens):
        alone = moe_combine(expert_out[t : t + 1], shared_out[t : t + 1])
        assert_bitwise_equal(batch[t : t + 1], alone, label=f"row {t}")


def test_one_slot_is_a_new_tensor(device: str) -> None:
    expert_out, shared_out = inputs(3, torch.float32, device)
    kept = expert_out.clone()
    got = moe_combine(expert_out[:, :1], shared_out)
    assert_bitwise_equal(got, expert_out[:, 0] + shared_out, label="one slot")
    assert_bitwise_equal(expert_out, kept, label="input")


def test_strided_inputs_give_the_bits_of_contiguous_ones(device: str) -> None:
    expert_out, shared_out = inputs(18, torch.bfloat16, device)
    slots, shared = expert_out[::2, 1::2], shared_out[1::2]
    assert not slots.is_contiguous()
    assert_bitwise_equal(
        moe_combine(slots, shared), moe_combine(slots.contiguous(), shared.contiguous()), label="strided"
    )


def test_nan_in_one_row_stays_there(device: str) -> None:
    expert_out, shared_out = inputs(17, torch.float32, device)
    clean = moe_combine(expert_out, shared_out)
    expert_out[9, 2] = float("nan")
    got = moe_combine(expert_out, shared_out)
    others = torch.arange(17) != 9
    assert bool(got[9].isnan().all())
    assert_bitwise_equal(got[others], clean[others], label="rows beside the NaN")


def test_arguments_that_do_not_fit_are_named() -> None:
    expert_out, shared_out = inputs(3, torch.float32, "cpu")
    with pytest.raises(ShapeError, match=re.escape("moe_combine: shared_out is [2, 97], expected [3, 97]")):
        moe_combine(expert_out, shared_out[:2])
    with pytest.raises(ShapeError, match=re.escape("moe_combine: expert_out is [3, 0, 97], expected at least one")):
        moe_combine(expert_out[:, :0], shared_out)
    with pytest.raises(UnsupportedError, match=re.escape("moe_combine: expert_out is torch.float16, expected")):
        moe_combine(expert_out.half(), shared_out)
    with pytest.raises(UnsupportedError, match=re.escape("moe_combine: shared_out is torch.bfloat16, expected")):
        moe_combine(expert_out, shared_out.bfloat16())
