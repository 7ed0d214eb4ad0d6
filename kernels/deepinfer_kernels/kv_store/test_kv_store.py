import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.kv_store import RecordFormat, gather_records, pack_records, store_records, unpack_records
from deepinfer_kernels.kv_store.reference import make_inputs
from deepinfer_kernels.mxfp4_quant import mxfp4_fake_quant
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant
from deepinfer_kernels.nvfp4_quant import nvfp4_fake_quant
from deepinfer_kernels.testing import assert_bitwise_equal, require_golden

FORMATS = list(RecordFormat)
WIDTH = 64


def _fake_quant(x: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    if fmt is RecordFormat.MXFP8:
        return mxfp8_fake_quant(x)
    if fmt is RecordFormat.NVFP4:
        return nvfp4_fake_quant(x)
    return mxfp4_fake_quant(x) if fmt is RecordFormat.MXFP4 else x.clone()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize(
    ("fmt", "width", "record_bytes"),
    [
        (RecordFormat.MXFP8, 512, 528),
        (RecordFormat.NVFP4, 512, 288),
        (RecordFormat.MXFP4, 128, 68),
        (RecordFormat.FP32, 512, 2048),
        (RecordFormat.MXFP8, 32, 33),
        (RecordFormat.NVFP4, 64, 36),
        (RecordFormat.MXFP4, 32, 17),
    ],
)
def test_record_sizes_are_those_of_the_specification(fmt: RecordFormat, width: int, record_bytes: int) -> None:
    assert fmt.record_bytes(width) == record_bytes
    assert pack_records(torch.zeros(1, width), fmt).shape == (1, record_bytes)


@pytest.mark.parametrize("vectors", ["a", "b"])
@pytest.mark.parametrize(
    ("fmt", "values_key"),
    [(RecordFormat.MXFP8, "codes"), (RecordFormat.MXFP4, "packed"), (RecordFormat.NVFP4, "packed")],
)
def test_records_hold_the_golden_values_then_scales(
    vectors: str, fmt: RecordFormat, values_key: str, device: str
) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{vectors}.safetensors"))
    x, name = golden["quant.x"].to(device), fmt.value
    want = torch.cat([golden[f"{name}.{values_key}"], golden[f"{name}.scales"]], dim=1).to(device)
    assert_bitwise_equal(pack_records(x, fmt), want, label=f"{name} records")
    assert_bitwise_equal(
        unpack_records(want, x.shape[1], fmt, torch.bfloat16), golden[f"{name}.value"].to(device), f"{name} values"
    )


@pytest.mark.parametrize("padding", [0, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_gather_returns_what_store_quantised(
    num_tokens: int, fmt: RecordFormat, dtype: torch.dtype, padding: int, device: str
) -> None:
    kv_cache, x = make_inputs(3, 16, WIDTH, fmt, _generator(), device, block_padding_bytes=padding)
    x = x.to(dtype)
    slots = torch.randperm(48, generator=_generator())[:num_tokens].to(device)
    store_records(kv_cache, slots, x[:num_tokens], fmt)
    got = gather_records(kv_cache, slots, WIDTH, fmt, dtype)
    assert_bitwise_equal(got, _fake_quant(x[:num_tokens], fmt), label=f"{fmt.value} {num_tokens} records")


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_block_padded_cache_holds_the_bytes_of_a_dense_one(fmt: RecordFormat, device: str) -> None:
    dense, x = make_inputs(3, 16, WIDTH, fmt, _generator(), device)
    padded, _ = make_inputs(3, 16, WIDTH, fmt, _generator(), device, block_padding_bytes=37)
    memory = torch.empty(0, dtype=torch.uint8, device=device).set_(padded.untyped_storage())
    before = memory.clone()
    padded.copy_(dense)
    slots = torch.tensor([47, 0, -1, 16, 31], device=device)
    for kv_cache in (dense, padded):
        store_records(kv_cache, slots, x[:5], fmt)
    assert_bitwise_equal(padded.contiguous(), dense, label="bytes of the records")
    between = memory.view(3, -1)[:, :37]
    assert_bitwise_equal(between, before.view(3, -1)[:, :37], label="bytes between the blocks")
    everything = torch.arange(48, device=device)
    got, want = (gather_records(c, everything, WIDTH, fmt, torch.float32).nan_to_num() for c in (padded, dense))
    assert_bitwise_equal(got, want, label="values")


@pytest.mark.parametrize("fmt", FORMATS)
def test_negative_slots_write_nothing_and_read_zeros(fmt: RecordFormat, device: str) -> None:
    kv_cache, x = make_inputs(2, 8, WIDTH, fmt, _generator(), device)
    kv_cache.fill_(0xFF)  # NaN scales, NaN codes, NaN floats
    before = kv_cache.clone()
    x[1] = float("nan")
    slots = torch.tensor([9, -1, 3], device=device)
    store_records(kv_cache, torch.full_like(slots, -1), x[:3], fmt)
    assert_bitwise_equal(kv_cache, before, label="nothing written")
    store_records(kv_cache, slots, x[:3], fmt)
    assert gather_records(kv_cache, slots[[0, 2]], WIDTH, fmt, torch.float32).isfinite().all()
    got = gather_records(kv_cache, torch.full((2, 3), -1, device=device), WIDTH, fmt, torch.float32)
    assert_bitwise_equal(got, torch.zeros(2, 3, WIDTH, device=device), label="empty slots")


def test_an_index_page_holds_all_values_before_all_scales(device: str) -> None:
    fmt, block_size = RecordFormat.MXFP4, 8
    kv_cache, x = make_inputs(2, block_size, WIDTH, fmt, _generator(), device)
    store_records(kv_cache, torch.arange(2 * block_size, device=device), x, fmt)
    records = pack_records(x, fmt).view(2, block_size, -1)
    values, scales = records[..., : WIDTH // 2], records[..., WIDTH // 2 :]
    want = torch.cat([values.flatten(1), scales.flatten(1)], dim=1)
    assert_bitwise_equal(kv_cache.flatten(1), want, label="bytes of two pages")


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_row_keeps_its_bits_in_any_batch(fmt: RecordFormat, device: str) -> None:
    kv_cache, x = make_inputs(2, 16, WIDTH, fmt, _generator(), device)
    alone = torch.cat([pack_records(x[t : t + 1], fmt) for t in range(32)])
    assert_bitwise_equal(pack_records(x, fmt), alone, label="packed")
    slots = torch.arange(32, device=device)
    store_records(kv_cache, slots, x, fmt)
    batch = gather_records(kv_cache, slots, WIDTH, fmt, torch.float32)
    alone = torch.cat([gather_records(kv_cache, slots[t : t + 1], WIDTH, fmt, torch.float32) for t in range(32)])
    assert_bitwise_equal(batch, alone, label="gathered")


@pytest.mark.parametrize("fmt", FORMATS)
def test_strided_rows_and_records_are_read_through_their_strides(fmt: RecordFormat, device: str) -> None:
    kv_cache, x = make_inputs(1, 16, WIDTH, fmt, _generator(), device)
    wide = torch.full((16, WIDTH + 5), float("nan"), device=device)
    wide[:, 3 : 3 + WIDTH] = x
    slots = torch.arange(32, device=device)[::2] // 2
    store_records(kv_cache, slots, wide[:, 3 : 3 + WIDTH], fmt)
    assert_bitwise_equal(
        gather_records(kv_cache, slots.view(4, 4).t(), WIDTH, fmt, torch.float32),
        _fake_quant(x, fmt).view(4, 4, WIDTH).transpose(0, 1).contiguous(),
        label="strided",
    )
    records = torch.zeros(16, fmt.record_bytes(WIDTH) + 3, dtype=torch.uint8, device=device)
    records[:, 1:-2] = pack_records(x, fmt)
    got = unpack_records(records[:, 1:-2], WIDTH, fmt, torch.float32)
    assert_bitwise_equal(got, _fake_quant(x, fmt), label="unaligned records")


def test_errors_name_operation_argument_and_rule() -> None:
    kv_cache, x = make_inputs(1, 16, WIDTH, RecordFormat.MXFP8, _generator(), "cpu")
    slots = torch.arange(16)
    with pytest.raises(ShapeError, match=r"record_bytes: width is 48, expected a positive multiple of 32 for mxfp8"):
        RecordFormat.MXFP8.record_bytes(48)
    with pytest.raises(ShapeError, match=r"store_records: kv_cache has shape \[1, 16, 66\], expected .* 36\]"):
        store_records(kv_cache, slots, x, RecordFormat.NVFP4)
    with pytest.raises(ShapeError, match=r"store_records: slot_mapping has shape \[15\], expected \[16\]"):
        store_records(kv_cache, slots[1:], x, RecordFormat.MXFP8)
    with pytest.raises(ShapeError, match="store_records: x has shape"):
        store_records(kv_cache, slots, x[None], RecordFormat.MXFP8)
    with pytest.raises(ShapeError, match="gather_records: kv_cache has strides"):
        gather_records(kv_cache.expand(2, 16, 66)[:, ::2], slots, WIDTH, RecordFormat.MXFP8, torch.float32)
    with pytest.raises(ShapeError, match=r"gather_records: kv_cache has shape .* at least one slot"):
        gather_records(kv_cache[:0], slots, WIDTH, RecordFormat.MXFP8, torch.float32)
    with pytest.raises(UnsupportedError, match=r"gather_records: slots is torch.int32, expected torch.int64"):
        gather_records(kv_cache, slots.int(), WIDTH, RecordFormat.MXFP8, torch.float32)
    with pytest.raises(UnsupportedError, match=r"pack_records: x is torch.float64"):
        pack_records(x.double(), RecordFormat.MXFP8)
    with pytest.raises(UnsupportedError, match=r"unpack_records: records is torch.int8"):
        unpack_records(kv_cache.view(torch.int8), WIDTH, RecordFormat.MXFP8, torch.float32)
    with pytest.raises(ShapeError, match=r"unpack_records: records has shape \[1, 16, 66\], expected 68 bytes"):
        unpack_records(kv_cache, 128, RecordFormat.MXFP4, torch.float32)
    with pytest.raises(IndexError):
        gather_records(kv_cache, torch.tensor([16]), WIDTH, RecordFormat.MXFP8, torch.float32)
