"""Attention over packed MXFP8 window and NVFP4 compressed records in TileLang, for the head width of the model.

One program owns one row and 64 heads. It unpacks 64 records at a time to bf16 in shared memory, exactly, and keys and
values are that one copy. Both products are queries times keys and weights times values: rows of heads, so that a head
never meets another. An empty slot reads nothing and is zero, and a block of empty slots changes nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="valid-type, name-defined, index, misc, no-any-return"
import tilelang
import tilelang.language as T
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.tilelang_formats import byte_of, e2m1_value, e4m3_value, e8m0_value
from deepinfer_kernels.tilelang_options import PASSES

_SLOTS = tiling.ATTENTION_SLOT_TILE
_HEADS = tiling.ATTENTION_TILELANG_HEADS
_THREADS = tiling.ATTENTION_TILELANG_THREADS
_FIRST_MAXIMUM = -1e30
_UNIT = 16  # bytes of one load; a record is a whole number of them
_NO_RECORD = -1


@T.macro
def _find_records(slots, place, block, length, token, block_size, block_units, record_units):
    """Where the records of one block of list slots begin, in units of 16 bytes."""
    lane = T.get_thread_binding(0)
    if lane < _SLOTS:
        if block * _SLOTS + lane < length:
            slot = slots[token, block * _SLOTS + lane]
            start = slot // block_size * block_units + slot % block_size * record_units
            place[lane] = T.if_then_else(slot >= 0, start, T.int64(_NO_RECORD))
        else:
            place[lane] = T.int64(_NO_RECORD)
    T.sync_threads()


@T.macro
def _load_mxfp8(cache, place, keys, head_dim):
    """Unpack 64 records of one e4m3 byte a value, then a scale for every 32."""
    lane = T.get_thread_binding(0)
    words = T.alloc_local((4,), T.int32)
    values = T.alloc_local((16,), T.bfloat16)
    for step in T.unroll(_SLOTS * head_dim // 16 // _THREADS):
        unit = step * _THREADS + lane
        row = unit // (head_dim // 16)
        column = unit % (head_dim // 16)
        if place[row] >= 0:
            for v in T.vectorized(4):
                words[v] = cache[place[row] * 4 + column * 4 + v]
            scale_word = cache[place[row] * 4 + head_dim // 4 + column // 8]
            scale = e8m0_value(byte_of(scale_word, column // 2 % 4))
            for e in T.unroll(16):
                values[e] = T.Cast(T.bfloat16, e4m3_value(byte_of(words[e // 4], e % 4)) * scale)
        else:
            for e in T.unroll(16):
                values[e] = T.bfloat16(0)
        for half in T.unroll(2):
            for v in T.vectorized(8):
                keys[row, column * 16 + half * 8 + v] = values[half * 8 + v]


@T.macro
def _load_nvfp4(cache, place, keys, head_dim):
    """Unpack 64 records of two e2m1 codes a byte, low nibble first, then an e4m3 scale for every 16."""
    lane = T.get_thread_binding(0)
    words = T.alloc_local((4,), T.int32)
    values = T.alloc_local((32,), T.bfloat16)
    for step in T.unroll(_SLOTS * head_dim // 32 // _THREADS):
        unit = step * _THREADS + lane
        row = unit // (head_dim // 32)
        column = unit % (head_dim // 32)
        if place[row] >= 0:
            for v in T.vectorized(4):
                words[v] = cache[place[row] * 4 + column * 4 + v]
            scale_word = cache[place[row] * 4 + head_dim // 8 + column // 2]
            for half in T.unroll(2):
                scale = e4m3_value(byte_of(scale_word, column % 2 * 2 + half))
                for e in T.unroll(16):
                    code = (words[half * 2 + e // 8] >> (e % 8 * 4)) & 15
                    values[half * 16 + e] = T.Cast(T.bfloat16, e2m1_value(code) * scale)
        else:
            for e in T.unroll(32):
                values[e] = T.bfloat16(0)
        for quarter in T.unroll(4):
            for v in T.vectorized(8):
                keys[row, column * 32 + quarter * 8 + v] = values[quarter * 8 + v]


@T.macro
def _attend(q, keys, weights, place, scores, total, maximum, denominator, head_dim, scale):
    """Take one block of unpacked records into the running result."""
    block_maximum = T.alloc_fragment((_HEADS,), T.float32)
    block_sum = T.alloc_fragment((_HEADS,), T.float32)
    rescale = T.alloc_fragment((_HEADS,), T.float32)
    T.fence_proxy_async()
    T.clear(scores)
    T.gemm(q, keys, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
    for h, n in T.Parallel(_HEADS, _SLOTS):
        scores[h, n] = T.if_then_else(place[n] >= 0, scores[h, n] * scale, -T.infinity(T.float32))
    T.reduce_max(scores, block_maximum, dim=1, clear=True)
    for h in T.Parallel(_HEADS):
        block_maximum[h] = T.max(block_maximum[h], maximum[h])
        rescale[h] = T.exp(maximum[h] - block_maximum[h])
        maximum[h] = block_maximum[h]
    for h, n in T.Parallel(_HEADS, _SLOTS):
        scores[h, n] = T.exp(scores[h, n] - maximum[h])
    T.reduce_sum(scores, block_sum, dim=1, clear=True)
    for h in T.Parallel(_HEADS):
        denominator[h] = denominator[h] * rescale[h] + block_sum[h]
    T.copy(scores, weights)
    for h, d in T.Parallel(_HEADS, head_dim):
        total[h, d] = total[h, d] * rescale[h]
    T.fence_proxy_async()
    T.gemm(weights, keys, total, policy=T.GemmWarpPolicy.FullCol)


@T.macro
def _store(rounded, cos, sin, out, token, first_head, num_heads, head_dim, num_pairs):
    """Write the rounded rows; the last ``num_pairs`` pairs of columns are rotated back and rounded again."""
    plain = head_dim - 2 * num_pairs
    for h, d in T.Parallel(_HEADS, plain):
        if first_head + h < num_heads:
            out[token, first_head + h, d] = rounded[h, d]
    for h, pair in T.Parallel(_HEADS, num_pairs):
        if first_head + h < num_heads:
            even = T.Cast(T.float32, rounded[h, plain + 2 * pair])
            odd = T.Cast(T.float32, rounded[h, plain + 2 * pair + 1])
            turned_even = even * cos[token, pair] + odd * sin[token, pair]
            turned_odd = odd * cos[token, pair] - even * sin[token, pair]
            out[token, first_head + h, plain + 2 * pair] = T.Cast(T.bfloat16, turned_even)
            out[token, first_head + h, plain + 2 * pair + 1] = T.Cast(T.bfloat16, turned_odd)


@tilelang.jit(pass_configs=PASSES)
def sparse_attention_kernel(num_heads, head_dim, window_block, compressed_block, num_pairs):
    """The kernel of one head count and width; ``compressed_block`` 0: there are no compressed records."""
    num_tokens = T.dynamic("num_tokens")
    window_length, compressed_length = T.dynamic("window_length"), T.dynamic("compressed_length")
    window_words, compressed_words = T.dynamic("window_words", "int64"), T.dynamic("compressed_words", "int64")

    @T.prim_func
    def sparse_attention_tile(
        q: T.Tensor((num_tokens, num_heads, head_dim), T.bfloat16),
        sink: T.Tensor((num_heads,), T.float32),
        cos: T.Tensor((num_tokens, max(num_pairs, 1)), T.float32),
        sin: T.Tensor((num_tokens, max(num_pairs, 1)), T.float32),
        window: T.Tensor((window_words,), T.int32),
        window_slots: T.Tensor((num_tokens, window_length), T.int64),
        compressed: T.Tensor((compressed_words,), T.int32),
        compressed_slots: T.Tensor((num_tokens, compressed_length), T.int64),
        out: T.Tensor((num_tokens, num_heads, head_dim), T.bfloat16),
        window_units: T.int64,
        compressed_units: T.int64,
        scale: T.float32,
    ):
        with T.Kernel(num_tokens, T.ceildiv(num_heads, _HEADS), threads=_THREADS) as (token, group):
            q_shared = T.alloc_shared((_HEADS, head_dim), T.bfloat16)
            keys = T.alloc_shared((_SLOTS, head_dim), T.bfloat16)
            weights = T.alloc_shared((_HEADS, _SLOTS), T.bfloat16)
            place = T.alloc_shared((_SLOTS,), T.int64)
            scores = T.alloc_fragment((_HEADS, _SLOTS), T.float32)
            total = T.alloc_fragment((_HEADS, head_dim), T.float32)
            maximum = T.alloc_fragment((_HEADS,), T.float32)
            denominator = T.alloc_fragment((_HEADS,), T.float32)
            first_head = group * _HEADS
            for h, d in T.Parallel(_HEADS, head_dim):
                if first_head + h < num_heads:
                    q_shared[h, d] = q[token, first_head + h, d]
                else:
                    q_shared[h, d] = T.bfloat16(0)
            T.fill(maximum, _FIRST_MAXIMUM)
            T.clear(denominator)
            T.clear(total)
            for block in T.serial(T.ceildiv(window_length, _SLOTS)):
                record = (head_dim + head_dim // 32) // _UNIT
                _find_records(window_slots, place, block, window_length, token, window_block, window_units, record)
                _load_mxfp8(window, place, keys, head_dim)
                _attend(q_shared, keys, weights, place, scores, total, maximum, denominator, head_dim, scale)
            if compressed_block > 0:
                for block in T.serial(T.ceildiv(compressed_length, _SLOTS)):
                    record = (head_dim // 2 + head_dim // 16) // _UNIT
                    _find_records(
                        compressed_slots,
                        place,
                        block,
                        compressed_length,
                        token,
                        compressed_block,
                        compressed_units,
                        record,
                    )
                    _load_nvfp4(compressed, place, keys, head_dim)
                    _attend(q_shared, keys, weights, place, scores, total, maximum, denominator, head_dim, scale)
            # Without any slot the first maximum is left: the sink term is infinite and the result 0.
            for h in T.Parallel(_HEADS):
                if first_head + h < num_heads:
                    denominator[h] = denominator[h] + T.exp(sink[first_head + h] - maximum[h])
            for h, d in T.Parallel(_HEADS, head_dim):
                keys[h, d] = T.Cast(T.bfloat16, T.ieee_fdiv(total[h, d], denominator[h]))
            _store(keys, cos, sin, out, token, first_head, num_heads, head_dim, num_pairs)

    return sparse_attention_tile


def _as_words(kv_cache: torch.Tensor) -> torch.Tensor:
    """All bytes of a cache whose records follow each other inside a block, as int32."""
    num_blocks, block_size, record_bytes = kv_cache.shape
    extent = (num_blocks - 1) * kv_cache.stride(0) + block_size * record_bytes
    return kv_cache.as_strided((extent,), (1,)).view(torch.int32)


def _is_in_units(part: SlotList, head_dim: int) -> bool:
    cache = part.kv_cache
    record_bytes = part.fmt.record_bytes(head_dim)
    in_order = cache.stride(2) == 1 and cache.stride(1) == record_bytes
    return in_order and all(n % _UNIT == 0 for n in (record_bytes, cache.stride(0), cache.data_ptr()))


def fits_tilelang(q: torch.Tensor, parts: list[SlotList]) -> bool:
    """Whether this kernel serves a call that fits the tensor cores: records of whole 16-byte units, as at width 512."""
    head_dim = q.shape[2]
    return head_dim % 512 == 0 and head_dim <= 512 and all(_is_in_units(part, head_dim) for part in parts)


def sparse_attention_tilelang(
    q: torch.Tensor,
    parts: list[SlotList],
    sink: torch.Tensor,
    scale: float,
    *,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel on checked arguments that fit it."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    assert [part.fmt for part in parts] == [RecordFormat.MXFP8, RecordFormat.NVFP4][: len(parts)]
    has_compressed = len(parts) == 2 and parts[1].slots.shape[1] > 0
    window, compressed = parts[0], parts[1] if has_compressed else parts[0]
    compressed_block = compressed.kv_cache.shape[1] if has_compressed else 0
    num_pairs = cos.shape[1] if cos is not None else 0
    angles = [sink.new_zeros(num_tokens, 1)] * 2 if cos is None or sin is None else [cos.contiguous(), sin.contiguous()]
    kernel = sparse_attention_kernel(num_heads, head_dim, window.kv_cache.shape[1], compressed_block, num_pairs)
    kernel(
        q.contiguous(),
        sink.detach().contiguous(),
        *angles,
        _as_words(window.kv_cache),
        window.slots.contiguous(),
        _as_words(compressed.kv_cache),
        compressed.slots.contiguous(),
        out,
        window.kv_cache.stride(0) // _UNIT,
        compressed.kv_cache.stride(0) // _UNIT,
        scale,
    )
    return out
