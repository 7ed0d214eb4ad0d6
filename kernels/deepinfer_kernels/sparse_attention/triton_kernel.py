"""Attention over packed MXFP8 window and NVFP4 compressed records on tensor cores.

One program owns one row and a group of heads. Products are turned round, keys times queries: the 64 list slots of a
block, and then the columns of the values, are the tall side, so that few heads still fill a tensor-core tile. Even and
odd columns stay apart from the record to the result, as the two nibbles of a byte do, and meet again when it is stored.
Records become bf16 exactly; an empty slot reads nothing and is zero.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.kv_store.triton_codec import e8m0_to_bf16, unpack_nibbles
from deepinfer_kernels.launching import from_table
from deepinfer_kernels.rope.triton_kernel import rotate_pairs
from deepinfer_kernels.sparse_attention.arguments import first_arguments
from deepinfer_kernels.sparse_attention.reference import SlotList

_FIRST_MAXIMUM = tl.constexpr(-1e30)


@triton.jit
def _record_offsets(slots, block_size, block_stride, RECORD_BYTES: tl.constexpr):
    block = tl.maximum(slots, 0) // block_size
    return block * block_stride + (slots - block * block_size) * RECORD_BYTES


@triton.jit
def _load_mxfp8(cache_ptr, offset, is_some, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr):
    """Even and odd columns [SLOTS, HEAD_DIM / 2] bf16 of MXFP8 records."""
    GROUPS: tl.constexpr = HEAD_DIM // 32
    d = tl.arange(0, HEAD_DIM)
    group = tl.arange(0, GROUPS)
    code = tl.load(cache_ptr + offset[:, None] + d[None, :], mask=is_some[:, None], other=0)
    scale_ptr = cache_ptr + offset[:, None] + HEAD_DIM + group[None, :]
    scale = e8m0_to_bf16(tl.load(scale_ptr, mask=is_some[:, None], other=0))
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    value = tl.reshape(value, [SLOTS, GROUPS, 32]) * scale[:, :, None]
    return tl.split(tl.reshape(value, [SLOTS, HEAD_DIM // 2, 2]))


@triton.jit
def _load_nvfp4(cache_ptr, offset, is_some, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr):
    """Even and odd columns [SLOTS, HEAD_DIM / 2] bf16 of NVFP4 records."""
    GROUPS: tl.constexpr = HEAD_DIM // 16
    group = tl.arange(0, GROUPS)
    byte = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed_ptr = cache_ptr + offset[:, None, None] + byte[None, :, :]
    packed = tl.load(packed_ptr, mask=is_some[:, None, None], other=0)
    scale_ptr = cache_ptr + offset[:, None] + HEAD_DIM // 2 + group[None, :]
    scale = tl.load(scale_ptr, mask=is_some[:, None], other=0).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    even, odd = unpack_nibbles(packed, tl.broadcast_to(scale[:, :, None], packed.shape))
    return tl.reshape(even, [SLOTS, HEAD_DIM // 2]), tl.reshape(odd, [SLOTS, HEAD_DIM // 2])


@triton.jit
def _attend(q_even, q_odd, k_even, k_odd, is_some, scale, maximum, denominator, even, odd):
    """Take one block of slots into the running result."""
    scores = tl.dot(k_even, tl.trans(q_even))
    scores = tl.dot(k_odd, tl.trans(q_odd), scores) * scale  # [SLOTS, HEADS]
    scores = tl.where(is_some[:, None], scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
    p = tl.exp(scores - new_maximum[None, :])
    rescale = tl.exp(maximum - new_maximum)
    denominator = denominator * rescale + tl.sum(p, axis=0)
    p = p.to(tl.bfloat16)
    even = tl.dot(tl.trans(k_even), p, even * rescale[None, :])
    odd = tl.dot(tl.trans(k_odd), p, odd * rescale[None, :])
    return new_maximum, denominator, even, odd


@triton.jit
def _length_in_use(slots_ptr, stride, length, BLOCK: tl.constexpr):
    """Place behind the last slot that is not empty: blocks of empty slots beyond it change nothing."""
    place = tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + place * stride, mask=place < length, other=-1)
    return tl.max(tl.where(slots >= 0, place + 1, 0), axis=0)


@triton.jit
def _load_slots(slots_ptr, stride, place, stop):
    return tl.load(slots_ptr + place * stride, mask=place < stop, other=-1)


@triton.jit
def _sparse_attention_kernel(
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
    window_stride_t,
    window_stride_s,
    window_length,
    compressed_block_size,
    compressed_block_stride,
    compressed_stride_t,
    compressed_stride_s,
    compressed_length,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK_COMPRESSED: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    num_groups = tl.cdiv(NUM_HEADS, HEADS)
    token = (tl.program_id(0) // num_groups).to(tl.int64)
    h = (tl.program_id(0) % num_groups) * HEADS + tl.arange(0, HEADS)
    is_head = h < NUM_HEADS
    d = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + token * q_stride_t + h[:, None] * q_stride_h + d[None, :], mask=is_head[:, None], other=0.0)
    q_even, q_odd = tl.split(tl.reshape(q, [HEADS, HALF, 2]))
    maximum = tl.full([HEADS], _FIRST_MAXIMUM, dtype=tl.float32)
    denominator = tl.zeros([HEADS], dtype=tl.float32)
    even = tl.zeros([HALF, HEADS], dtype=tl.float32)
    odd = tl.zeros([HALF, HEADS], dtype=tl.float32)
    lane = tl.arange(0, SLOTS)

    window_slots_ptr += token * window_stride_t
    stop = _length_in_use(window_slots_ptr, window_stride_s, window_length, BLOCK_WINDOW)
    # The keys of a block are loaded one step ahead: a loop's own values go to shared memory once, for both products.
    slots = _load_slots(window_slots_ptr, window_stride_s, lane, stop)
    offset = _record_offsets(slots, window_block_size, window_block_stride, HEAD_DIM + HEAD_DIM // 32)
    k_even, k_odd = _load_mxfp8(window_ptr, offset, slots >= 0, HEAD_DIM, SLOTS)
    for start in tl.range(0, stop, SLOTS, num_stages=1):
        maximum, denominator, even, odd = _attend(
            q_even, q_odd, k_even, k_odd, slots >= 0, scale, maximum, denominator, even, odd
        )
        slots = _load_slots(window_slots_ptr, window_stride_s, start + SLOTS + lane, stop)
        offset = _record_offsets(slots, window_block_size, window_block_stride, HEAD_DIM + HEAD_DIM // 32)
        k_even, k_odd = _load_mxfp8(window_ptr, offset, slots >= 0, HEAD_DIM, SLOTS)
    if BLOCK_COMPRESSED > 0:
        compressed_slots_ptr += token * compressed_stride_t
        stop = _length_in_use(compressed_slots_ptr, compressed_stride_s, compressed_length, BLOCK_COMPRESSED)
        slots = _load_slots(compressed_slots_ptr, compressed_stride_s, lane, stop)
        offset = _record_offsets(slots, compressed_block_size, compressed_block_stride, HALF + HEAD_DIM // 16)
        k_even, k_odd = _load_nvfp4(compressed_ptr, offset, slots >= 0, HEAD_DIM, SLOTS)
        for start in tl.range(0, stop, SLOTS, num_stages=1):
            maximum, denominator, even, odd = _attend(
                q_even, q_odd, k_even, k_odd, slots >= 0, scale, maximum, denominator, even, odd
            )
            slots = _load_slots(compressed_slots_ptr, compressed_stride_s, start + SLOTS + lane, stop)
            offset = _record_offsets(slots, compressed_block_size, compressed_block_stride, HALF + HEAD_DIM // 16)
            k_even, k_odd = _load_nvfp4(compressed_ptr, offset, slots >= 0, HEAD_DIM, SLOTS)

    # Without any slot the first maximum is left: the sink term is infinite and the result 0.
    sink = tl.load(sink_ptr + h, mask=is_head, other=0.0)
    denominator += tl.exp(sink - maximum)
    even = tl.div_rn(even, tl.broadcast_to(denominator[None, :], [HALF, HEADS])).to(tl.bfloat16)
    odd = tl.div_rn(odd, tl.broadcast_to(denominator[None, :], [HALF, HEADS])).to(tl.bfloat16)
    if NUM_PAIRS > 0:
        pair = tl.arange(0, HALF) - (HALF - NUM_PAIRS)
        cos = tl.load(cos_ptr + token * NUM_PAIRS + pair, mask=pair >= 0, other=0.0)[:, None]
        sin = tl.load(sin_ptr + token * NUM_PAIRS + pair, mask=pair >= 0, other=0.0)[:, None]
        turned_even, turned_odd = rotate_pairs(even.to(tl.float32), odd.to(tl.float32), cos, sin, True)
        even = tl.where((pair >= 0)[:, None], turned_even.to(tl.bfloat16), even)
        odd = tl.where((pair >= 0)[:, None], turned_odd.to(tl.bfloat16), odd)
    out = tl.reshape(tl.join(tl.trans(even), tl.trans(odd)), [HEADS, HEAD_DIM])
    out_ptr += (token * NUM_HEADS + h[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out_ptr, out, mask=is_head[:, None])


def fits_tensor_cores(q: torch.Tensor, parts: list[SlotList], round_p: bool) -> bool:
    """Whether this kernel serves a call: bf16 queries and weights, packed records, no block in both lists."""
    head_dim = q.shape[2]
    return (
        q.dtype == torch.bfloat16
        and round_p
        and [part.fmt for part in parts] in ([RecordFormat.MXFP8], [RecordFormat.MXFP8, RecordFormat.NVFP4])
        and parts[0].slots.shape[1] % tiling.ATTENTION_SLOT_TILE == 0
        and parts[0].slots.shape[1] > 0
        and head_dim >= 64
        and head_dim & (head_dim - 1) == 0
    )


def sparse_attention_triton(
    q: torch.Tensor,
    parts: list[SlotList],
    sink: torch.Tensor,
    scale: float,
    *,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int | None = None,
) -> torch.Tensor:
    """Launch the kernel on checked arguments that fit it; ``heads`` overrides the table of head groups."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    has_compressed = len(parts) == 2 and parts[1].slots.shape[1] > 0
    window, compressed = parts[0], parts[1] if has_compressed else parts[0]
    heads = min(heads or from_table(tiling.ATTENTION_HEADS, num_tokens), max(16, triton.next_power_of_2(num_heads)))
    lists = [
        (
            part.kv_cache.shape[1],
            part.kv_cache.stride(0),
            part.slots.stride(0),
            part.slots.stride(1),
            part.slots.shape[1],
        )
        for part in (window, compressed)
    ]
    _sparse_attention_kernel[(num_tokens * triton.cdiv(num_heads, heads),)](
        *first_arguments(q, out, (window, compressed), sink, scale, cos, sin),
        *lists[0],
        *lists[1],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=cos.shape[1] if cos is not None else 0,
        HEADS=heads,
        SLOTS=tiling.ATTENTION_SLOT_TILE,
        BLOCK_WINDOW=triton.next_power_of_2(window.slots.shape[1]),
        BLOCK_COMPRESSED=triton.next_power_of_2(compressed.slots.shape[1]) if has_compressed else 0,
        num_warps=tiling.ATTENTION_WARPS,
        enable_fp_fusion=False,
    )
    return out
