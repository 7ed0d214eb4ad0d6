"""Slots of window rows and of compressed entries as Triton kernels; integers only."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl


@triton.jit
def _slot(entry, is_some, request, table_ptr, table_stride_r, table_stride_b, per_block):
    """Slot of each entry of one request, -1 where there is none."""
    page = entry // per_block
    table = table_ptr + request * table_stride_r + page.to(tl.int64) * table_stride_b
    block = tl.load(table, mask=is_some, other=0).to(tl.int64)
    return tl.where(is_some, block * per_block + (entry - page * per_block), -1)


@triton.jit
def _window_slots_kernel(
    positions_ptr,
    req_idx_ptr,
    floor_ptr,
    table_ptr,
    out_ptr,
    positions_stride,
    req_idx_stride,
    floor_stride,
    table_stride_r,
    table_stride_b,
    per_block,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(positions_ptr + token * positions_stride)
    request = tl.load(req_idx_ptr + token * req_idx_stride).to(tl.int64)
    floor = tl.load(floor_ptr + token * floor_stride)
    w = tl.arange(0, BLOCK)
    entry = tl.maximum(tl.maximum(last - (WINDOW - 1), floor), 0) + w
    is_some = (entry <= last) & (request >= 0) & (w < WINDOW)
    slot = _slot(entry, is_some, request, table_ptr, table_stride_r, table_stride_b, per_block)
    tl.store(out_ptr + token * WINDOW + w, slot, mask=w < WINDOW)


@triton.jit(do_not_specialize=["length"])
def _entry_slots_kernel(
    indices_ptr,
    req_idx_ptr,
    table_ptr,
    out_ptr,
    length,
    indices_stride_t,
    indices_stride_k,
    req_idx_stride,
    table_stride_r,
    table_stride_b,
    per_block,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(req_idx_ptr + token * req_idx_stride).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < length
    entry = tl.load(indices_ptr + token * indices_stride_t + place * indices_stride_k, mask=is_place, other=-1)
    is_some = (entry >= 0) & (request >= 0)
    entry = tl.where(is_some, entry, 0).to(tl.int64)
    slot = _slot(entry, is_some, request, table_ptr, table_stride_r, table_stride_b, per_block)
    tl.store(out_ptr + token * length + place, slot, mask=is_place)


def window_slots_triton(
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window: int,
    floor: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel on arguments ``window_slots`` has checked."""
    out = torch.empty((positions.shape[0], window), dtype=torch.int64, device=positions.device)
    if out.numel() > 0:
        _window_slots_kernel[(positions.shape[0],)](
            positions,
            req_idx,
            floor,
            block_table,
            out,
            positions.stride(0),
            req_idx.stride(0),
            floor.stride(0),
            block_table.stride(0),
            block_table.stride(1),
            block_size,
            WINDOW=window,
            BLOCK=triton.next_power_of_2(window),
            num_warps=1,
        )
    return out


def entry_slots_triton(
    indices: torch.Tensor, req_idx: torch.Tensor, block_table: torch.Tensor, entries_per_block: int
) -> torch.Tensor:
    """Launch the kernel on arguments ``entry_slots`` has checked."""
    num_tokens, length = indices.shape
    out = torch.empty((num_tokens, length), dtype=torch.int64, device=indices.device)
    if out.numel() > 0:
        block = min(512, triton.next_power_of_2(length))
        _entry_slots_kernel[(num_tokens, triton.cdiv(length, block))](
            indices,
            req_idx,
            block_table,
            out,
            length,
            indices.stride(0),
            indices.stride(1),
            req_idx.stride(0),
            block_table.stride(0),
            block_table.stride(1),
            entries_per_block,
            BLOCK=block,
            num_warps=4,
        )
    return out
