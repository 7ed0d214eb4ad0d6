"""Cache records in plain PyTorch."""

import torch

from deepinfer_kernels.kv_store.record_format import RecordFormat
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant, mxfp4_quant
from deepinfer_kernels.mxfp8_quant import mxfp8_dequant, mxfp8_quant
from deepinfer_kernels.nvfp4_quant import nvfp4_dequant, nvfp4_quant


def make_inputs(
    num_blocks: int,
    block_size: int,
    width: int,
    fmt: RecordFormat,
    generator: torch.Generator,
    device: str,
    block_padding_bytes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of random bytes, and one random vector per slot: [num_blocks * block_size, width] fp32.

    ``block_padding_bytes`` more bytes stand before every block, as when several caches share an allocation.
    """
    record_bytes = fmt.record_bytes(width)
    block_stride = block_padding_bytes + block_size * record_bytes
    memory = torch.randint(0, 256, (num_blocks * block_stride,), dtype=torch.uint8, generator=generator).to(device)
    kv_cache = memory.as_strided(
        (num_blocks, block_size, record_bytes), (block_stride, record_bytes, 1), block_padding_bytes
    )
    x = torch.randn(num_blocks * block_size, width, generator=generator).to(device)
    return kv_cache, x


def pack_records_reference(x: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """``pack_records`` on checked arguments."""
    if fmt is RecordFormat.FP32:
        return x.to(torch.float32).contiguous().view(torch.uint8)
    return torch.cat(_encode(x, fmt), dim=-1)


def unpack_records_reference(records: torch.Tensor, width: int, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """``unpack_records`` on checked arguments."""
    if fmt is RecordFormat.FP32:
        # A copy, because bytes of a packed allocation need not start on a multiple of four.
        return records.clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
    value_bytes = fmt.value_bytes(width)
    return _decode(records[..., :value_bytes], records[..., value_bytes:], fmt, dtype)


def store_records_reference(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, x: torch.Tensor, fmt: RecordFormat
) -> None:
    """``store_records`` on checked arguments."""
    block_size, width = kv_cache.shape[1], x.shape[1]
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, kept)
    place = (slots // block_size, slots % block_size)
    x = x.index_select(0, kept)
    if fmt.is_segregated:
        value_field, scale_field = _segregated_fields(kv_cache, width, fmt)
        value_field[place], scale_field[place] = _encode(x, fmt)
    else:
        kv_cache[place] = pack_records_reference(x, fmt)


def gather_records_reference(
    kv_cache: torch.Tensor, slots: torch.Tensor, width: int, fmt: RecordFormat, dtype: torch.dtype
) -> torch.Tensor:
    """``gather_records`` on checked arguments."""
    flat = slots.reshape(-1)
    is_empty = (flat < 0).unsqueeze(1)
    flat = flat.clamp(min=0)
    if fmt.is_segregated:
        value_field, scale_field = _segregated_fields(kv_cache, width, fmt)
        values = _gather_bytes(value_field, flat).masked_fill_(is_empty, 0)
        scales = _gather_bytes(scale_field, flat).masked_fill_(is_empty, 0)
        decoded = _decode(values, scales, fmt, dtype)
    else:
        # Zero bytes decode to +0 in every format.
        records = _gather_bytes(kv_cache, flat).masked_fill_(is_empty, 0)
        if fmt is RecordFormat.FP32:
            decoded = records.view(torch.float32).to(dtype)
        else:
            decoded = unpack_records_reference(records, width, fmt, dtype)
    return decoded.view(*slots.shape, width)


def _encode(x: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of each vector as bytes."""
    if fmt is RecordFormat.MXFP8:
        codes, scales = mxfp8_quant(x)
        return codes.view(torch.uint8), scales
    return mxfp4_quant(x) if fmt is RecordFormat.MXFP4 else nvfp4_quant(x)


def _decode(values: torch.Tensor, scales: torch.Tensor, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    if fmt is RecordFormat.MXFP8:
        return mxfp8_dequant(values.view(torch.float8_e4m3fn), scales, dtype)
    if fmt is RecordFormat.MXFP4:
        return mxfp4_dequant(values, scales, dtype)
    return nvfp4_dequant(values, scales, dtype)


def _segregated_fields(kv_cache: torch.Tensor, width: int, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the values and of the scales in every page, [num_blocks, block_size, bytes] each."""
    num_blocks, block_size, _ = kv_cache.shape
    block_stride, start = kv_cache.stride(0), kv_cache.storage_offset()
    value_bytes, scale_bytes = fmt.value_bytes(width), fmt.scale_bytes(width)
    values = kv_cache.as_strided((num_blocks, block_size, value_bytes), (block_stride, value_bytes, 1), start)
    scales = kv_cache.as_strided(
        (num_blocks, block_size, scale_bytes), (block_stride, scale_bytes, 1), start + block_size * value_bytes
    )
    return values, scales


def _gather_bytes(field: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a [num_blocks, block_size, num_bytes] view whose blocks may lie any distance apart."""
    num_blocks, block_size, num_bytes = field.shape
    block_stride, start = field.stride(0), field.storage_offset()
    gap = block_stride - block_size * num_bytes
    if gap == 0 or num_blocks == 1:
        rows = field.as_strided((num_blocks * block_size, num_bytes), (num_bytes, 1), start)
        return rows.index_select(0, slots)
    # Row i of `windows` is the num_bytes bytes from byte i on: one copy per record, which is four times faster on a
    # CPU than indexing with (block, offset), and reads no byte outside the view.
    last = (num_blocks - 1) * block_stride + (block_size - 1) * num_bytes
    windows = field.as_strided((last + 1, num_bytes), (1, 1), start)
    return windows.index_select(0, slots * num_bytes + slots // block_size * gap)
