import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.indexer_logits import indexer_logits
from deepinfer_kernels.indexer_logits.reference import make_inputs
from deepinfer_kernels.kv_store import RecordFormat, gather_records, store_records
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close, require_golden
from deepinfer_kernels.tiling import REFERENCE_KEY_TILE as TILE

FORMATS = [RecordFormat.MXFP4, RecordFormat.FP32]


def _inputs(lengths: list[int], device: str, fmt: RecordFormat, per_block: int = 8) -> dict[str, torch.Tensor]:
    return make_inputs(lengths, 4, 32, fmt, per_block, torch.Generator().manual_seed(9), device)


def _run(
    inputs: dict[str, torch.Tensor], max_entries: int, fmt: RecordFormat, per_block: int = 8, round_bf16: bool = False
) -> torch.Tensor:
    return indexer_logits(
        **inputs, max_entries=max_entries, fmt=fmt, entries_per_block=per_block, round_bf16=round_bf16
    )


def _rows(inputs: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    by_row = {name: inputs[name][rows] for name in ("q", "weights", "req_idx", "num_visible")}
    return {**inputs, **by_row}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("vectors", ["a", "b"])
def test_scores_are_the_golden_ones(vectors: str, fmt: RecordFormat, device: str) -> None:
    golden = {k: v.to(device) for k, v in load_file(require_golden(f"kernels/vectors_{vectors}.safetensors")).items()}
    q, keys = golden["index.q"], golden["index.k"]
    num_tokens, num_entries = golden["index.scores_fp32"].shape
    key_cache = torch.zeros(5, 8, fmt.record_bytes(32), dtype=torch.uint8, device=device)
    store_records(key_cache, torch.arange(num_entries, device=device), keys, fmt)
    rest = {
        "key_cache": key_cache,
        "block_table": torch.arange(5, dtype=torch.int32, device=device).view(1, 5),
        "req_idx": torch.zeros(num_tokens, dtype=torch.int32, device=device),
    }
    causal = {"num_visible": torch.arange(1, num_tokens + 1, device=device), **rest}  # as the golden bf16 scores are
    rounded = _run({"q": q, "weights": golden["index.w"], **causal}, num_entries, fmt, round_bf16=True)
    assert_bitwise_equal(rounded, golden["index.scores_bf16"].float(), label="bf16 rounding")
    whole = {"num_visible": torch.full((num_tokens,), num_entries, device=device), **rest}
    exact = _run({"q": q.float(), "weights": golden["index.w"].float(), **whole}, num_entries, fmt)
    assert_close(exact, golden["index.scores_fp32"], 1e-5, label="fp32")


@pytest.mark.parametrize("round_bf16", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_row_keeps_its_bits_in_any_batch(fmt: RecordFormat, round_bf16: bool, device: str) -> None:
    inputs = _inputs([130, 1, 64, 0, 17], device, fmt)
    batch = _run(inputs, 130, fmt, round_bf16=round_bf16)
    alone = [_run(_rows(inputs, slice(t, t + 1)), 130, fmt, round_bf16=round_bf16) for t in range(len(batch))]
    assert_bitwise_equal(batch, torch.cat(alone), label="each row alone")
    assert_bitwise_equal(_run(_rows(inputs, slice(4, 11)), 130, fmt, round_bf16=round_bf16), batch[4:11], label="4:11")


@pytest.mark.parametrize("max_entries", [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 7])
@pytest.mark.parametrize("fmt", FORMATS)
def test_scores_do_not_depend_on_max_entries(fmt: RecordFormat, max_entries: int, device: str) -> None:
    inputs = _inputs([max_entries, 3], device, fmt)
    inputs["num_visible"].clamp_(max=max_entries)
    got = _run(inputs, max_entries, fmt)
    wide = _run(inputs, 17 * TILE, fmt)
    assert got.shape == (6, max_entries)
    assert_bitwise_equal(got, wide[:, :max_entries], label=f"max_entries {max_entries}")
    assert bool((wide[:, max_entries:] == -torch.inf).all())


@pytest.mark.parametrize("elements", [4 * TILE * 32, 9 * 2 * TILE * 32])
def test_scores_do_not_depend_on_the_chunk_a_row_falls_into(
    elements: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs([150, 70, 31], device, RecordFormat.FP32)
    want = _run(inputs, 150, RecordFormat.FP32)
    # 9 rows of 3 tiles: rows in chunks of 4 with one tile at a time, then all rows with two tiles at a time.
    monkeypatch.setattr("deepinfer_kernels.indexer_logits.reference._KEY_ELEMENTS", elements)
    assert_bitwise_equal(_run(inputs, 150, RecordFormat.FP32), want, label=f"chunks of {elements} key elements")


@pytest.mark.parametrize("fmt", FORMATS)
def test_scores_do_not_depend_on_the_page_size(fmt: RecordFormat, device: str) -> None:
    inputs = _inputs([40, 21], device, fmt)
    small = _run(inputs, 40, fmt)
    repaged = _inputs([40, 21], device, fmt, per_block=16)
    old_slots = inputs["block_table"].long()[:, :, None] * 8 + torch.arange(8, device=device)
    new_slots = repaged["block_table"].long()[:, :, None] * 16 + torch.arange(16, device=device)
    keys = gather_records(inputs["key_cache"], old_slots.flatten(1)[:, :40], 32, fmt, torch.float32)
    for request, length in enumerate((40, 21)):
        store_records(repaged["key_cache"], new_slots.flatten(1)[request, :length], keys[request, :length], fmt)
    got = _run({**inputs, **{n: repaged[n] for n in ("key_cache", "block_table")}}, 40, fmt, per_block=16)
    assert_bitwise_equal(got, small, label="pages of 16 against pages of 8")


@pytest.mark.parametrize("round_bf16", [False, True])
def test_nan_in_unused_slots_and_garbage_in_unused_table_entries_do_not_leak(round_bf16: bool, device: str) -> None:
    inputs = _inputs([13, 5], device, RecordFormat.FP32)
    inputs["block_table"][1, 1] = -1431655766
    inputs["q"][0] = float("nan")  # row 0 sees nothing
    inputs["req_idx"][0] = -1
    got = _run(inputs, 16, RecordFormat.FP32, round_bf16=round_bf16)
    assert inputs["num_visible"].tolist() == [0, 6, 13, 0, 2, 5]
    is_visible = torch.arange(16, device=device) < inputs["num_visible"][:, None]
    assert bool(got[is_visible].isfinite().all())
    assert bool((got[~is_visible] == -torch.inf).all())


def test_no_rows_give_no_scores(device: str) -> None:
    inputs = _rows(_inputs([13], device, RecordFormat.MXFP4), slice(0, 0))
    assert _run(inputs, 13, RecordFormat.MXFP4).shape == (0, 13)


def test_strided_arguments_give_the_same_bits(device: str) -> None:
    inputs = _inputs([70, 9], device, RecordFormat.MXFP4)
    want = _run(inputs, 70, RecordFormat.MXFP4)
    shape = inputs["key_cache"].shape
    memory = torch.full((shape[0], shape[1] * shape[2] + 11), 255, dtype=torch.uint8, device=device)
    memory[:, 11:] = inputs["key_cache"].flatten(1)
    strided = {
        **inputs,
        "q": torch.cat([inputs["q"], inputs["q"] + 1], dim=2)[:, :, :32],
        "weights": inputs["weights"].t().contiguous().t(),
        "block_table": inputs["block_table"].repeat_interleave(2, dim=1)[:, ::2],
        "key_cache": memory[:, 11:].as_strided(tuple(shape), (memory.stride(0), shape[2], 1)),
    }
    assert not strided["key_cache"].is_contiguous()
    assert_bitwise_equal(_run(strided, 70, RecordFormat.MXFP4), want, label="strided")


def test_errors_name_operation_argument_and_rule() -> None:
    inputs = _inputs([9], "cpu", RecordFormat.MXFP4)
    cases = [
        ({"q": inputs["q"][..., :20]}, r"q has shape \[3, 4, 20\], expected a multiple of 16"),
        ({"weights": inputs["weights"][:, 1:]}, r"q has shape \[3, 4, 32\] and weights \[3, 3\]"),
        ({"req_idx": inputs["req_idx"][1:]}, r"req_idx has shape \[2\], expected \[3\]"),
        ({"block_table": inputs["block_table"][0]}, r"block_table has shape \[2\]"),
        ({"key_cache": inputs["key_cache"][:, 1:]}, r"key_cache has shape \[2, 7, 17\], expected \[num_blocks, 8"),
    ]
    for change, message in cases:
        with pytest.raises(ShapeError, match=f"indexer_logits: {message}"):
            _run({**inputs, **change}, 9, RecordFormat.MXFP4)
    with pytest.raises(ShapeError, match="indexer_logits: max_entries is -1"):
        _run(inputs, -1, RecordFormat.MXFP4)
    with pytest.raises(UnsupportedError, match=r"indexer_logits: weights is torch.bfloat16, expected torch.float32"):
        _run({**inputs, "weights": inputs["weights"].bfloat16()}, 9, RecordFormat.MXFP4)
