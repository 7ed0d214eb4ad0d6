"""Records as Triton kernels: one program packs one vector, or unpacks one record."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.kv_store.record_format import RecordFormat
from deepinfer_kernels.kv_store.triton_codec import (
    FORMAT_CODES,
    encode_mxfp4,
    encode_mxfp8,
    encode_nvfp4,
    load_values,
    pack_nibbles,
)
from deepinfer_kernels.launching import as_rows


@triton.jit
def _store_kernel(
    x_ptr,
    slots_ptr,
    cache_ptr,
    x_stride,
    slots_stride,
    block_size,
    block_stride,
    value_stride,
    scale_start,
    scale_stride,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    FMT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = token
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + token * slots_stride)
    if slot >= 0:
        block = slot // block_size
        offset = slot - block * block_size
        value_ptr = cache_ptr + block * block_stride + offset * value_stride
        scale_ptr = cache_ptr + block * block_stride + scale_start + offset * scale_stride
        group = tl.arange(0, BLOCK_GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(x_ptr + token * x_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        is_group = (group < WIDTH // GROUP)[:, None]
        if FMT == 0:
            bits = x.to(tl.int32, bitcast=True)
            for byte in tl.static_range(4):
                part = ((bits >> (8 * byte)) & 255).to(tl.uint8)
                tl.store(value_ptr + column * 4 + byte, part, mask=column < WIDTH)
        elif FMT == 1:
            codes, scale = encode_mxfp8(x)
            tl.store(value_ptr + column, codes, mask=column < WIDTH)
            tl.store(scale_ptr + group[:, None], scale, mask=is_group)
        else:
            if FMT == 2:
                codes, scale = encode_nvfp4(x)
            else:
                codes, scale = encode_mxfp4(x)
            packed = pack_nibbles(codes, BLOCK_GROUPS, GROUP)
            half = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            tl.store(value_ptr + half, packed, mask=half < WIDTH // 2)
            tl.store(scale_ptr + group[:, None], scale, mask=is_group)


@triton.jit
def _gather_kernel(
    slots_ptr,
    cache_ptr,
    out_ptr,
    block_size,
    block_stride,
    value_stride,
    scale_start,
    scale_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FMT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    record = tl.program_id(0).to(tl.int64)
    slot = record
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + record)
    column = tl.arange(0, BLOCK)
    block = tl.maximum(slot, 0) // block_size
    offset = slot - block * block_size
    value_ptr = cache_ptr + block * block_stride + offset * value_stride
    scale_ptr = cache_ptr + block * block_stride + scale_start + offset * scale_stride
    # An empty slot reads nothing: masked values are +0 whatever their scale.
    value = load_values(value_ptr, scale_ptr, column, (column < WIDTH) & (slot >= 0), FMT)
    tl.store(out_ptr + record * WIDTH + column, value, mask=column < WIDTH)


def _layout(width: int, fmt: RecordFormat, block_size: int) -> tuple[int, int, int]:
    """Distance of values, start of the scales within a block, and distance of scales, in bytes."""
    if fmt.is_segregated and block_size > 1:
        return fmt.value_bytes(width), block_size * fmt.value_bytes(width), fmt.scale_bytes(width)
    return fmt.record_bytes(width), fmt.value_bytes(width), fmt.record_bytes(width)


def _launch_store(
    x: torch.Tensor, slots: torch.Tensor | None, cache: torch.Tensor, block_size: int, fmt: RecordFormat
) -> None:
    num_tokens, width = x.shape
    if num_tokens == 0:
        return
    group = fmt.group_width if fmt is not RecordFormat.FP32 else triton.next_power_of_2(width)
    _store_kernel[(num_tokens,)](
        x,
        slots,
        cache,
        x.stride(0),
        slots.stride(0) if slots is not None else 0,
        block_size,
        cache.stride(0),
        *_layout(width, fmt, block_size),
        WIDTH=width,
        GROUP=group,
        BLOCK_GROUPS=triton.next_power_of_2(triton.cdiv(width, group)),
        FMT=FORMAT_CODES[fmt],
        HAS_SLOTS=slots is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _launch_gather(
    slots: torch.Tensor | None, cache: torch.Tensor, block_size: int, out: torch.Tensor, fmt: RecordFormat
) -> None:
    num_records, width = out.shape
    if num_records == 0:
        return
    _gather_kernel[(num_records,)](
        slots,
        cache,
        out,
        block_size,
        cache.stride(0),
        *_layout(width, fmt, block_size),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        FMT=FORMAT_CODES[fmt],
        HAS_SLOTS=slots is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )


def pack_records_triton(x: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """Launch the kernel on arguments ``pack_records`` has checked: every record is a block of its own."""
    rows = as_rows(x)
    out = torch.empty((rows.shape[0], fmt.record_bytes(x.shape[-1])), dtype=torch.uint8, device=x.device)
    _launch_store(rows, None, out, 1, fmt)
    return out.view(*x.shape[:-1], out.shape[1])


def unpack_records_triton(records: torch.Tensor, width: int, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """Launch the kernel on arguments ``unpack_records`` has checked."""
    rows = as_rows(records)
    out = torch.empty((rows.shape[0], width), dtype=dtype, device=records.device)
    _launch_gather(None, rows, 1, out, fmt)
    return out.view(*records.shape[:-1], width)


def store_records_triton(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, x: torch.Tensor, fmt: RecordFormat
) -> None:
    """Launch the kernel on arguments ``store_records`` has checked."""
    _launch_store(as_rows(x), slot_mapping, kv_cache, kv_cache.shape[1], fmt)


def gather_records_triton(
    kv_cache: torch.Tensor, slots: torch.Tensor, width: int, fmt: RecordFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Launch the kernel on arguments ``gather_records`` has checked."""
    flat = slots.reshape(-1).contiguous()
    out = torch.empty((flat.shape[0], width), dtype=dtype, device=kv_cache.device)
    _launch_gather(flat, kv_cache, kv_cache.shape[1], out, fmt)
    return out.view(*slots.shape, width)
