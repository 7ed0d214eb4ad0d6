"""Attention over packed records for SM90, in Gluon: layouts, shared memory and asynchronous products are explicit.

One program owns one row and 64 heads. While the tensor cores multiply the weights and values of one block of 64 list
slots, and the queries and keys of the next, the program unpacks the block after that. Even and odd columns stay apart,
as the two nibbles of a byte do, and meet again when the result is stored. Threads keep their own part of a denominator.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer_kernels.kv_store.triton_codec import UNPACK_PAIRS
from deepinfer_kernels.sparse_attention.arguments import first_arguments, two_lists
from deepinfer_kernels.sparse_attention.reference import SlotList

HEADS = 64
HEAD_DIM = 512
_WARPS = 8
_SLOTS = 64

# The codes of a record as words: low byte or nibble is the even column. See ``kv_store/triton_codec.py``.
_UNPACK_E4M3 = gl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    mov.b32 e, 0x7B807B80;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 8;
    shr.b32 c, $2, 4;
    and.b32 b, b, 0x80008000;
    and.b32 d, $2, 0x80008000;
    lop3.b32 a, a, 0x07F007F0, b, 0xEA;
    lop3.b32 c, c, 0x07F007F0, d, 0xEA;
    mul.rn.bf16x2 a, a, e;
    mul.rn.bf16x2 c, c, e;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, c, $3;
    }"""
)

_PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0]))  # [slots or heads, 256]
_SCALES_4 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 32, 1], [_WARPS, 1, 1], [2, 1, 0]))  # [slots, 32, 8 bytes]
_SCALES_8 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [_WARPS, 1, 1], [2, 1, 0]))  # [slots, 16, 16 words]
_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [1, 32], [_WARPS, 1], [1, 0]))  # [heads, 512]
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [heads, slots]
_RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))  # [heads, 256]
_LIST = gl.constexpr(gl.BlockedLayout([4], [32], [_WARPS], [0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _offsets(slots, BLOCK_SIZE: gl.constexpr, block_stride, RECORD_BYTES: gl.constexpr):
    """Byte offsets of the records of slots; empty slots give the first record, which is not read."""
    slots = gl.maximum(slots, 0).to(gl.uint32)
    block = slots // BLOCK_SIZE
    return block.to(gl.int64) * block_stride + ((slots - block * BLOCK_SIZE) * RECORD_BYTES).to(gl.int64)


@gluon.jit
def _load_slots(slots_ptr, stride, start, length, LAYOUT: gl.constexpr):
    place = start + gl.arange(0, 64, layout=LAYOUT)
    return gl.load(slots_ptr + place * stride, mask=place < length, other=-1).to(gl.int32)


@gluon.jit
def _load_window(cache_ptr, slots, BLOCK_SIZE: gl.constexpr, block_stride):
    """Codes as words [slots, 16, 16] and E8M0 scales [slots, 16] of MXFP8 records."""
    offset = _offsets(slots, BLOCK_SIZE, block_stride, 528)
    group = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, _SCALES_8)))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, _SCALES_8)))
    record_ptr = cache_ptr + gl.expand_dims(offset, 1)
    is_some = gl.expand_dims(slots >= 0, 1)
    scale = gl.load(record_ptr + 512 + gl.expand_dims(group, 0), mask=is_some, other=0)
    group = gl.expand_dims(gl.expand_dims(group, 0), 2)
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    word_ptr = gl.expand_dims(record_ptr, 2).to(gl.pointer_type(gl.int16), bitcast=True) + (group * 16 + word)
    return gl.load(word_ptr, mask=gl.expand_dims(is_some, 2), other=0), scale


@gluon.jit
def _unpack_window(words, scale):
    exponent = scale.to(gl.int16)
    bits = gl.where(exponent == 0, 0x0040, exponent << 7)
    bits = gl.where(exponent == 255, 0x7FC0, bits).to(gl.int16)
    factor = gl.expand_dims(bits.to(gl.bfloat16, bitcast=True), 2)
    even, odd = gl.inline_asm_elementwise(
        _UNPACK_E4M3,
        "=&r,=&r,r,r",
        [words, factor],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    even = gl.convert_layout(gl.reshape(even, [64, 256]), _PAIRS, assert_trivial=True)
    return even, gl.convert_layout(gl.reshape(odd, [64, 256]), _PAIRS, assert_trivial=True)


@gluon.jit
def _load_compressed(cache_ptr, slots, BLOCK_SIZE: gl.constexpr, block_stride):
    """Packed codes [slots, 32, 8] and e4m3 scales [slots, 32] of NVFP4 records."""
    offset = _offsets(slots, BLOCK_SIZE, block_stride, 288)
    group = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, _SCALES_4)))
    byte = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, _SCALES_4)))
    record_ptr = cache_ptr + gl.expand_dims(offset, 1)
    is_some = gl.expand_dims(slots >= 0, 1)
    scale = gl.load(record_ptr + 256 + gl.expand_dims(group, 0), mask=is_some, other=0)
    group = gl.expand_dims(gl.expand_dims(group, 0), 2)
    byte = gl.expand_dims(gl.expand_dims(byte, 0), 1)
    byte_ptr = gl.expand_dims(record_ptr, 2) + (group * 8 + byte)
    return gl.load(byte_ptr, mask=gl.expand_dims(is_some, 2), other=0), scale


@gluon.jit
def _unpack_compressed(packed, scale):
    factor = gl.expand_dims(scale.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16), 2)
    even, odd = gl.inline_asm_elementwise(
        UNPACK_PAIRS,
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, factor],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    even = gl.convert_layout(gl.reshape(even, [64, 256]), _PAIRS, assert_trivial=True)
    return even, gl.convert_layout(gl.reshape(odd, [64, 256]), _PAIRS, assert_trivial=True)


@gluon.jit
def _start_scores(q_even, q_odd, k_even, k_odd, at):
    """Start the products of the queries with the keys of one buffer."""
    zeros = gl.zeros([64, 64], gl.float32, layout=_SCORES)
    scores = warpgroup_mma(q_even, k_even.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(q_odd, k_odd.index(at).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _start_values(p_shared, k_even, k_odd, at, even, odd):
    """Start the products of the weights with the values of one buffer."""
    even = warpgroup_mma(p_shared, k_even.index(at), even, is_async=True)
    return even, warpgroup_mma(p_shared, k_odd.index(at), odd, is_async=True)


@gluon.jit
def _sums_of_threads(p):
    """Sums of [64, 64] over the slots that one thread holds: [64, 2, 4]. Nothing is exchanged."""
    # Columns are warp group * 32 + 8 * register + 2 * lane + register.
    return gl.sum(gl.sum(gl.reshape(p, [64, 2, 4, 4, 2]), axis=4), axis=2)


@gluon.jit
def _largest_of_threads(x):
    return gl.max(gl.max(gl.reshape(x, [64, 2, 4, 4, 2]), axis=4), axis=2)


@gluon.jit
def _weigh(scores, is_some, scale, maximum, denominator, p_shared):
    """Put the weights of a block into shared memory; new maximum, denominator, and the factor of all sums before."""
    scores = gl.where(gl.expand_dims(is_some, 0), scores * scale, -float("inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1))
    p = gl.exp(scores - gl.expand_dims(new_maximum, 1))
    p_shared.store(p.to(gl.bfloat16))
    fence_async_shared()
    rescale = gl.exp(maximum - new_maximum)
    factor, _ = gl.broadcast(gl.expand_dims(rescale, 1), p)
    denominator = denominator * _largest_of_threads(factor) + _sums_of_threads(p)
    return new_maximum, denominator, gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, _RESULT)), 1)


@gluon.jit
def _hopper_attention_kernel(
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
    window_block_stride,
    window_stride_t,
    window_stride_s,
    compressed_block_stride,
    compressed_stride_t,
    compressed_stride_s,
    compressed_length,
    NUM_HEADS: gl.constexpr,
    NUM_PAIRS: gl.constexpr,
    WINDOW: gl.constexpr,
    WINDOW_BLOCK: gl.constexpr,
    COMPRESSED_BLOCK: gl.constexpr,
):
    NUM_GROUPS: gl.constexpr = (NUM_HEADS + 63) // 64
    ROW_OF_8: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _SCALES_8))
    ROW_OF_4: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _SCALES_4))
    COLUMN: gl.constexpr = gl.SliceLayout(0, _SCORES)
    NUM_WINDOW: gl.constexpr = WINDOW // 64
    token = (gl.program_id(0) // NUM_GROUPS).to(gl.int64)
    first_head = (gl.program_id(0) % NUM_GROUPS) * 64
    window_slots_ptr += token * window_stride_t
    compressed_slots_ptr += token * compressed_stride_t

    k_even = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], _SHARED)
    k_odd = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], _SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)
    words, scales = _load_window(
        window_ptr,
        _load_slots(window_slots_ptr, window_stride_s, 0, WINDOW, ROW_OF_8),
        WINDOW_BLOCK,
        window_block_stride,
    )
    h = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS))
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, _ROWS))
    q_ptrs = q_ptr + token * q_stride_t + gl.expand_dims(h, 1) * q_stride_h + gl.expand_dims(d, 0)
    q = gl.load(q_ptrs, mask=gl.expand_dims(h < NUM_HEADS, 1), other=0.0)
    even, odd = gl.split(gl.reshape(q, [64, 256, 2]))
    q_even = gl.allocate_shared_memory(gl.bfloat16, [64, 256], _SHARED, even)
    q_odd = gl.allocate_shared_memory(gl.bfloat16, [64, 256], _SHARED, odd)
    next_even, next_odd = _unpack_window(words, scales)
    k_even.index(0).store(next_even)
    k_odd.index(0).store(next_odd)
    fence_async_shared()

    # Blocks of empty slots at the end of the list change nothing and are left out.
    place = gl.arange(0, 1024, layout=_LIST)
    stop = 0
    for start in range(0, compressed_length, 1024):
        listed = gl.load(
            compressed_slots_ptr + (start + place) * compressed_stride_s,
            mask=start + place < compressed_length,
            other=-1,
        )
        stop = gl.maximum(stop, gl.max(gl.where(listed >= 0, start + place + 1, 0), axis=0))

    maximum = gl.full([64], -1e30, gl.float32, layout=gl.SliceLayout(1, _SCORES))
    denominator = _sums_of_threads(gl.zeros([64, 64], gl.float32, layout=_SCORES))
    even = gl.zeros([64, 256], gl.float32, layout=_RESULT)
    odd = gl.zeros([64, 256], gl.float32, layout=_RESULT)
    slots = _load_slots(compressed_slots_ptr, compressed_stride_s, 0, stop, ROW_OF_4)

    # A step: start the values of the block before and the scores of this block, unpack the next block, wait, weigh.
    for block in gl.static_range(NUM_WINDOW):
        is_some = _load_slots(window_slots_ptr, window_stride_s, block * 64, WINDOW, COLUMN) >= 0
        if block > 0:
            even, odd = _start_values(p_shared, k_even, k_odd, (block - 1) % 2, even, odd)
        scores = _start_scores(q_even, q_odd, k_even, k_odd, block % 2)
        if block + 1 < NUM_WINDOW:
            row_slots = _load_slots(window_slots_ptr, window_stride_s, block * 64 + 64, WINDOW, ROW_OF_8)
            words, scales = _load_window(window_ptr, row_slots, WINDOW_BLOCK, window_block_stride)
            next_even, next_odd = _unpack_window(words, scales)
        else:
            packed, scales = _load_compressed(compressed_ptr, slots, COMPRESSED_BLOCK, compressed_block_stride)
            slots = _load_slots(compressed_slots_ptr, compressed_stride_s, 64, stop, ROW_OF_4)
            next_even, next_odd = _unpack_compressed(packed, scales)
        if block > 0:
            even, odd, scores = warpgroup_mma_wait(0, deps=(even, odd, scores))
        else:
            scores = warpgroup_mma_wait(0, deps=(scores,))
        k_even.index((block + 1) % 2).store(next_even)
        k_odd.index((block + 1) % 2).store(next_odd)
        maximum, denominator, factor = _weigh(scores, is_some, scale, maximum, denominator, p_shared)
        even *= factor
        odd *= factor

    for start in range(0, stop, 64):
        at = (start // 64 + NUM_WINDOW) % 2
        is_some = _load_slots(compressed_slots_ptr, compressed_stride_s, start, stop, COLUMN) >= 0
        packed, scales = _load_compressed(compressed_ptr, slots, COMPRESSED_BLOCK, compressed_block_stride)
        even, odd = _start_values(p_shared, k_even, k_odd, 1 - at, even, odd)
        scores = _start_scores(q_even, q_odd, k_even, k_odd, at)
        slots = _load_slots(compressed_slots_ptr, compressed_stride_s, start + 128, stop, ROW_OF_4)
        next_even, next_odd = _unpack_compressed(packed, scales)
        even, odd, scores = warpgroup_mma_wait(0, deps=(even, odd, scores))
        k_even.index(1 - at).store(next_even)
        k_odd.index(1 - at).store(next_odd)
        maximum, denominator, factor = _weigh(scores, is_some, scale, maximum, denominator, p_shared)
        even *= factor
        odd *= factor
    at = (gl.cdiv(stop, 64) + NUM_WINDOW - 1) % 2
    even, odd = _start_values(p_shared, k_even, k_odd, at, even, odd)
    even, odd = warpgroup_mma_wait(0, deps=(even, odd))

    # Without any slot the first maximum is left: the sink term is infinite and the result 0.
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORES))
    sink = gl.load(sink_ptr + head, mask=head < NUM_HEADS, other=0.0)
    total = gl.convert_layout(gl.sum(gl.sum(denominator, axis=2), axis=1), gl.SliceLayout(1, _SCORES))
    one = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, _SCORES))
    share = gl.div_rn(one, total + gl.exp(sink - maximum))
    share = gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, _RESULT)), 1)
    even = (even * share).to(gl.bfloat16)
    odd = (odd * share).to(gl.bfloat16)
    if NUM_PAIRS > 0:
        pair = gl.arange(0, 256, layout=gl.SliceLayout(0, _RESULT)) - (256 - NUM_PAIRS)
        cos = gl.expand_dims(gl.load(cos_ptr + token * NUM_PAIRS + pair, mask=pair >= 0, other=0.0), 0)
        sin = gl.expand_dims(gl.load(sin_ptr + token * NUM_PAIRS + pair, mask=pair >= 0, other=0.0), 0)
        wide_even, wide_odd = even.to(gl.float32), odd.to(gl.float32)
        is_rotated = gl.expand_dims(pair >= 0, 0)
        even = gl.where(is_rotated, (wide_even * cos + wide_odd * sin).to(gl.bfloat16), even)
        odd = gl.where(is_rotated, (wide_odd * cos - wide_even * sin).to(gl.bfloat16), odd)
    out = gl.convert_layout(gl.reshape(gl.join(even, odd), [64, 512]), _ROWS)
    out_ptrs = out_ptr + (token * NUM_HEADS + gl.expand_dims(h, 1)) * 512 + gl.expand_dims(d, 0)
    gl.store(out_ptrs, out, mask=gl.expand_dims(h < NUM_HEADS, 1))


def fits_hopper(q: torch.Tensor, parts: list[SlotList]) -> bool:
    """Whether this kernel serves a call that fits the tensor cores: SM90, the head width it is written for."""
    return (
        q.shape[2] == HEAD_DIM
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and all(part.kv_cache.shape[0] * part.kv_cache.shape[1] < 1 << 31 for part in parts)
        and parts[0].kv_cache.stride(0) % 2 == 0
        and parts[0].kv_cache.data_ptr() % 2 == 0
    )


def sparse_attention_hopper(
    q: torch.Tensor,
    parts: list[SlotList],
    sink: torch.Tensor,
    scale: float,
    *,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel on checked arguments that fit it."""
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    window, compressed = two_lists(parts)
    _hopper_attention_kernel[(num_tokens * triton.cdiv(num_heads, HEADS),)](
        *first_arguments(q, out, (window, compressed), sink, scale, cos, sin),
        window.kv_cache.stride(0),
        window.slots.stride(0),
        window.slots.stride(1),
        compressed.kv_cache.stride(0),
        compressed.slots.stride(0),
        compressed.slots.stride(1),
        compressed.slots.shape[1],
        NUM_HEADS=num_heads,
        NUM_PAIRS=cos.shape[1] if cos is not None else 0,
        WINDOW=window.slots.shape[1],
        WINDOW_BLOCK=window.kv_cache.shape[1],
        COMPRESSED_BLOCK=compressed.kv_cache.shape[1],
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return out
