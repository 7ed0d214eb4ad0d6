"""Attention in fp32 products: every format, width and list, for the modes that do not round to bf16 and for edges.

One program owns one row, some heads and some columns of the result; scores are computed again for each part of the
columns. Same blocks, order and rounding points as the tensor-core kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.kv_store.triton_codec import FORMAT_CODES, load_values
from deepinfer_kernels.rope.triton_kernel import rotate_pairs
from deepinfer_kernels.sparse_attention.arguments import first_arguments, two_lists
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.triton_sums import halving_row_sums

_FIRST_MAXIMUM = tl.constexpr(-1e30)


@triton.jit
def _record_ptr(cache_ptr, slots, block_size, block_stride, record_bytes):
    block = tl.maximum(slots, 0) // block_size
    return cache_ptr + block * block_stride + (tl.maximum(slots, 0) - block * block_size) * record_bytes


@triton.jit
def _keys(
    window_ptr,
    window_slots,
    window_value_bytes,
    WINDOW_FORMAT: tl.constexpr,
    compressed_ptr,
    compressed_slots,
    compressed_value_bytes,
    COMPRESSED_FORMAT: tl.constexpr,
    d,
    HEAD_DIM: tl.constexpr,
):
    """fp32 columns ``d`` of the slots of one block; a slot is empty in one of the two lists at least."""
    is_column = (d < HEAD_DIM)[None, :]
    mask = (window_slots >= 0)[:, None] & is_column
    value_ptr = window_ptr[:, None]
    keys = load_values(value_ptr, value_ptr + window_value_bytes, d[None, :], mask, WINDOW_FORMAT)
    mask = (compressed_slots >= 0)[:, None] & is_column
    value_ptr = compressed_ptr[:, None]
    other = load_values(value_ptr, value_ptr + compressed_value_bytes, d[None, :], mask, COMPRESSED_FORMAT)
    return tl.where((window_slots >= 0)[:, None], keys, other)


@triton.jit
def _sparse_attention_fp32_kernel(
    q_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    window_ptr,
    window_slots_ptr,
    compressed_ptr,
    compressed_slots_ptr,
    scale,
    q_stride_t,
    q_stride_h,
    window_block_size,
    window_block_stride,
    window_record_bytes,
    window_value_bytes,
    window_stride_t,
    window_stride_s,
    window_length,
    compressed_block_size,
    compressed_block_stride,
    compressed_record_bytes,
    compressed_value_bytes,
    compressed_stride_t,
    compressed_stride_s,
    compressed_length,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    WINDOW_FORMAT: tl.constexpr,
    COMPRESSED_FORMAT: tl.constexpr,
    ROUND_P: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_head = h < NUM_HEADS
    q_ptr += token * q_stride_t + h[:, None] * q_stride_h
    window_slots_ptr += token * window_stride_t
    compressed_slots_ptr += token * compressed_stride_t
    maximum = tl.full([HEADS], _FIRST_MAXIMUM, dtype=tl.float32)
    denominator = tl.zeros([HEADS], dtype=tl.float32)
    total = tl.zeros([HEADS, BLOCK_D], dtype=tl.float32)
    length = window_length + compressed_length
    for start in range(0, length, SLOTS):
        place = start + tl.arange(0, SLOTS)
        window_slots = tl.load(window_slots_ptr + place * window_stride_s, mask=place < window_length, other=-1)
        is_compressed = (place >= window_length) & (place < length)
        slots_ptr = compressed_slots_ptr + (place - window_length) * compressed_stride_s
        compressed_slots = tl.load(slots_ptr, mask=is_compressed, other=-1)
        windows = _record_ptr(window_ptr, window_slots, window_block_size, window_block_stride, window_record_bytes)
        compresseds = _record_ptr(
            compressed_ptr, compressed_slots, compressed_block_size, compressed_block_stride, compressed_record_bytes
        )
        scores = tl.zeros([HEADS, SLOTS], dtype=tl.float32)
        for d_start in range(0, HEAD_DIM, BLOCK_D):
            d = d_start + tl.arange(0, BLOCK_D)
            q = tl.load(q_ptr + d[None, :], mask=is_head[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            keys = _keys(
                windows,
                window_slots,
                window_value_bytes,
                WINDOW_FORMAT,
                compresseds,
                compressed_slots,
                compressed_value_bytes,
                COMPRESSED_FORMAT,
                d,
                HEAD_DIM,
            )
            scores = tl.dot(q.to(tl.float32), tl.trans(keys), scores, input_precision="ieee")
        is_some = (window_slots >= 0) | (compressed_slots >= 0)
        scores = tl.where(is_some[None, :], scores * scale, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        p = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        denominator = denominator * rescale + halving_row_sums(p, HEADS, SLOTS, LEVELS)
        if ROUND_P:
            p = p.to(tl.bfloat16).to(tl.float32)
        values = _keys(
            windows,
            window_slots,
            window_value_bytes,
            WINDOW_FORMAT,
            compresseds,
            compressed_slots,
            compressed_value_bytes,
            COMPRESSED_FORMAT,
            column,
            HEAD_DIM,
        )
        total = tl.dot(p, values, total * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    denominator += tl.exp(tl.load(sink_ptr + h, mask=is_head, other=0.0) - maximum)
    out = tl.div_rn(total, tl.broadcast_to(denominator[:, None], [HEADS, BLOCK_D])).to(out_ptr.dtype.element_ty)
    if NUM_PAIRS > 0:
        even, odd = tl.split(tl.reshape(out.to(tl.float32), [HEADS, BLOCK_D // 2, 2]))
        pair = tl.program_id(2) * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2) - (HEAD_DIM // 2 - NUM_PAIRS)
        is_rotated = (pair >= 0) & (pair < NUM_PAIRS)
        cos = tl.load(cos_ptr + token * NUM_PAIRS + pair, mask=is_rotated, other=0.0)[None, :]
        sin = tl.load(sin_ptr + token * NUM_PAIRS + pair, mask=is_rotated, other=0.0)[None, :]
        turned_even, turned_odd = rotate_pairs(even, odd, cos, sin, True)
        even = tl.where(is_rotated[None, :], turned_even, even)
        odd = tl.where(is_rotated[None, :], turned_odd, odd)
        out = tl.reshape(tl.join(even, odd), [HEADS, BLOCK_D]).to(out_ptr.dtype.element_ty)
    out_ptr += (token * NUM_HEADS + h[:, None]) * HEAD_DIM + column[None, :]
    tl.store(out_ptr, out, mask=is_head[:, None] & (column < HEAD_DIM)[None, :])


def _list_arguments(part: SlotList, head_dim: int) -> tuple[int, int, int, int, int, int, int]:
    cache, slots = part.kv_cache, part.slots
    value_bytes = part.fmt.value_bytes(head_dim)
    strides = (slots.stride(0), slots.stride(1))
    return (cache.shape[1], cache.stride(0), cache.shape[2], value_bytes, *strides, slots.shape[1])


def sparse_attention_fp32_triton(
    q: torch.Tensor,
    parts: list[SlotList],
    sink: torch.Tensor,
    scale: float,
    *,
    round_p: bool,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel on arguments ``sparse_attention`` has checked."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    window, compressed = two_lists(parts)
    heads, block_d = tiling.ATTENTION_FP32_HEADS, tiling.ATTENTION_FP32_BLOCK_D
    _sparse_attention_fp32_kernel[(num_tokens, triton.cdiv(num_heads, heads), triton.cdiv(head_dim, block_d))](
        *first_arguments(q, out, (window, compressed), sink, scale, cos, sin),
        *_list_arguments(window, head_dim),
        *_list_arguments(compressed, head_dim),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=cos.shape[1] if cos is not None else 0,
        WINDOW_FORMAT=FORMAT_CODES[window.fmt],
        COMPRESSED_FORMAT=FORMAT_CODES[compressed.fmt],
        ROUND_P=round_p,
        HEADS=heads,
        SLOTS=tiling.ATTENTION_SLOT_TILE,
        LEVELS=tiling.ATTENTION_SLOT_TILE.bit_length() - 1,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out
