"""Predecessors of the rows of a step as one Triton kernel; integers only.

A GPU reaches the history over the bus, so a lane loads from it only where the id is in no row of the step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

# One variant for any number of rows and requests: nothing is compiled when a batch grows.
_BLOCK_T = 32
_BLOCK_R = 128


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _lookback_ids_kernel(
    input_ids_ptr,
    positions_ptr,
    starts_ptr,
    slots_ptr,
    history_ptr,
    out_ptr,
    num_tokens,
    num_reqs,
    last_position,
    history_stride_r,
    history_stride_p,
    out_stride_t,
    out_stride_d,
    DEPTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = row < num_tokens
    request = tl.zeros([BLOCK_T], dtype=tl.int32)
    for first in range(0, num_reqs, BLOCK_R):  # a row lies behind so many ends
        other = first + tl.arange(0, BLOCK_R)
        end = tl.load(starts_ptr + 1 + other, mask=other < num_reqs, other=0x7FFFFFFF)
        request += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
    request = tl.minimum(request, num_reqs - 1)
    start = tl.load(starts_ptr + request, mask=is_row, other=0)
    slot = tl.load(slots_ptr + request, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    for distance in tl.static_range(1, DEPTH + 1):
        earlier = position - distance
        has_id = is_row & (earlier >= 0)
        in_step = row - distance >= start
        from_step = tl.load(input_ids_ptr + row - distance, mask=has_id & in_step, other=-1).to(tl.int64)
        place = tl.minimum(tl.maximum(earlier, 0), last_position)
        history = history_ptr + slot * history_stride_r + place * history_stride_p
        from_history = tl.load(history, mask=has_id & (in_step == 0), other=-1).to(tl.int64)
        out = out_ptr + row.to(tl.int64) * out_stride_t + (distance - 1) * out_stride_d
        tl.store(out, tl.where(in_step, from_step, from_history), mask=is_row)


def lookback_ids_triton(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel on arguments ``lookback_ids`` has checked."""
    num_tokens, depth = out.shape
    if out.numel() > 0:
        _lookback_ids_kernel[(triton.cdiv(num_tokens, _BLOCK_T),)](
            input_ids.contiguous(),
            positions.contiguous(),
            query_start_loc.contiguous(),
            idx_mapping.contiguous(),
            all_token_ids,
            out,
            num_tokens,
            idx_mapping.shape[0],
            all_token_ids.shape[1] - 1,
            all_token_ids.stride(0),
            all_token_ids.stride(1),
            out.stride(0),
            out.stride(1),
            DEPTH=depth,
            BLOCK_T=_BLOCK_T,
            BLOCK_R=_BLOCK_R,
            num_warps=4,
        )
    return out
