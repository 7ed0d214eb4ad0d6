"""Index scores on the device: bf16 queries over MXFP4 pages at the width of the model."""

import pytest
import torch

from deepinfer_kernels.indexer_logits.reference import indexer_logits_reference, make_inputs
from deepinfer_kernels.indexer_logits.triton_kernel import indexer_logits_triton
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.row_testing import NEEDS_GPU, assert_graph_gives_eager_bits
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = NEEDS_GPU


def make_case(lengths: list[int], rows_per_request: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    case = make_inputs(lengths, 32, 128, RecordFormat.MXFP4, 64, generator, "cuda", rows_per_request)
    case["q"], case["weights"] = case["q"].bfloat16(), case["weights"].bfloat16()
    return case


def run(
    case: dict[str, torch.Tensor], width: int, round_bf16: bool, rows: slice = slice(None), group: int | None = None
) -> torch.Tensor:
    q, weights, req_idx, num_visible = (case[name][rows] for name in ("q", "weights", "req_idx", "num_visible"))
    tables = (case["key_cache"], case["block_table"], req_idx, num_visible)
    return indexer_logits_triton(q, weights, *tables, width, round_bf16=round_bf16, rows=group)


@pytest.mark.parametrize("round_bf16", [True, False])
def test_scores_are_those_of_the_reference(round_bf16: bool) -> None:
    case = make_case([1000, 1, 64, 0, 517], 5)
    got = run(case, 1000, round_bf16)
    on_cpu = {name: tensor.cpu() for name, tensor in case.items()}
    want = indexer_logits_reference(
        **on_cpu, max_entries=1000, fmt=RecordFormat.MXFP4, entries_per_block=64, round_bf16=round_bf16
    )
    got = got.cpu()
    hidden = want == -torch.inf
    assert torch.equal(got == -torch.inf, hidden)
    error = (got - want).masked_fill(hidden, 0.0).abs().max()
    # Heads are added in another order: the last bit of a sum may differ, and then that of its bf16 rounding.
    assert float(error) < (2**-8 * float(want.masked_fill(hidden, 0.0).abs().max()) if round_bf16 else 1e-5)
    assert float((got != want).float().mean()) < (0.002 if round_bf16 else 1.0)


@pytest.mark.parametrize("round_bf16", [True, False])
def test_scores_keep_their_bits_in_any_batch_row_group_and_width(round_bf16: bool) -> None:
    case = make_case([1500, 33, 700, 0, 517, 1024], 50)
    want = run(case, 1500, round_bf16)
    for group in (1, 2, 8):
        assert_bitwise_equal(run(case, 1500, round_bf16, group=group), want, f"groups of {group} rows")
    for low, high in ((0, 1), (3, 4), (0, 63), (60, 150), (49, 51), (299, 300)):
        assert_bitwise_equal(run(case, 1500, round_bf16, slice(low, high)), want[low:high], f"rows {low}:{high}")
    alone = [run(case, 1500, round_bf16, slice(t, t + 1)) for t in range(300)]
    assert_bitwise_equal(torch.cat(alone), want, "each row alone")
    for width in (20000, 262144):  # the second: more tiles than programs
        wide = run(case, width, round_bf16)
        assert_bitwise_equal(wide[:, :1500].contiguous(), want, f"{width} wide")
        assert bool((wide[:, 1500:] == -torch.inf).all())
    few = run(case, 1500, round_bf16, slice(0, 300, 10))
    assert_bitwise_equal(run(case, 1 << 20, round_bf16, slice(0, 300, 10))[:, :1500].contiguous(), few, "2^20 wide")
    assert_graph_gives_eager_bits(lambda: run(case, 1500, round_bf16), "indexer_logits")
