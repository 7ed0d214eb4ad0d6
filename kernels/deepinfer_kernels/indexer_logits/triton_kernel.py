"""Index scores of bf16 queries over packed MXFP4 pages on tensor cores.

A program owns some rows and every n-th tile of entries; rows of one request that follow each other share the unpacked
keys. Tiles beyond what a row sees cost a store of -inf, however wide the result is.
All heads of a row are the other side of the product. Their weighted sum halves the heads, upper half onto lower.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_logits.arguments import constants_of, strides_of, tensors_of
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.kv_store.triton_codec import e8m0_to_bf16, unpack_nibbles
from deepinfer_kernels.launching import from_table, last_axis_contiguous
from deepinfer_kernels.triton_sums import halving_row_sums


@triton.jit
def _load_keys(
    cache_ptr,
    table_ptr,
    table_stride_b,
    entry,
    is_visible,
    per_block,
    block_stride,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Even and odd columns [KEYS, HEAD_DIM / 2] bf16 of the entries of one request; zero where not visible."""
    GROUPS: tl.constexpr = HEAD_DIM // 32
    page = entry // per_block
    block = tl.load(table_ptr + page.to(tl.int64) * table_stride_b, mask=is_visible, other=0).to(tl.int64)
    page_ptr = cache_ptr + block * block_stride
    place = entry - page * per_block
    group = tl.arange(0, GROUPS)
    byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed_ptr = (page_ptr + place * (HEAD_DIM // 2))[:, None, None] + byte[None, :, :]
    packed = tl.load(packed_ptr, mask=is_visible[:, None, None], other=0)
    scale_ptr = (page_ptr + per_block * (HEAD_DIM // 2) + place * GROUPS)[:, None] + group[None, :]
    scale = e8m0_to_bf16(tl.load(scale_ptr, mask=is_visible[:, None], other=0))
    even, odd = unpack_nibbles(packed, tl.broadcast_to(scale[:, :, None], packed.shape))
    return tl.reshape(even, [KEYS, HEAD_DIM // 2]), tl.reshape(odd, [KEYS, HEAD_DIM // 2])


@triton.jit(do_not_specialize=["num_tokens", "max_entries"])
def _indexer_logits_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    table_ptr,
    req_idx_ptr,
    num_visible_ptr,
    out_ptr,
    num_tokens,
    max_entries,
    per_block,
    block_stride,
    table_stride_r,
    table_stride_b,
    q_stride_t,
    q_stride_h,
    weights_stride_t,
    weights_stride_h,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    h = tl.arange(0, HEADS)
    d = tl.arange(0, HEAD_DIM)
    is_head = h < NUM_HEADS
    for tile in range(tl.program_id(1), tl.cdiv(max_entries, KEYS), tl.num_programs(1)):
        first = tile * KEYS
        entry = first + tl.arange(0, KEYS)
        held_request = -1
        held_visible = tl.zeros([], dtype=tl.int64)
        k_even = tl.zeros([KEYS, HALF], dtype=tl.bfloat16)
        k_odd = tl.zeros([KEYS, HALF], dtype=tl.bfloat16)
        for r in range(ROWS):
            token = tl.program_id(0).to(tl.int64) * ROWS + r
            is_token = token < num_tokens
            num_visible = tl.load(num_visible_ptr + token, mask=is_token, other=0)
            request = tl.load(req_idx_ptr + token, mask=is_token, other=-1)
            out_row_ptr = out_ptr + token * max_entries + entry
            is_entry = (entry < max_entries) & is_token
            if (first < num_visible) & (request >= 0):
                visible_here = tl.minimum(num_visible, first + KEYS)
                if (request != held_request) | (visible_here > held_visible):
                    k_even, k_odd = _load_keys(
                        cache_ptr,
                        table_ptr + request.to(tl.int64) * table_stride_r,
                        table_stride_b,
                        entry,
                        entry < num_visible,
                        per_block,
                        block_stride,
                        HEAD_DIM,
                        KEYS,
                    )
                    held_request = request
                    held_visible = visible_here
                q_row_ptr = q_ptr + token * q_stride_t + h[:, None] * q_stride_h + d[None, :]
                q = tl.load(q_row_ptr, mask=is_head[:, None], other=0.0)
                q_even, q_odd = tl.split(tl.reshape(q, [HEADS, HALF, 2]))
                weights_ptrs = weights_ptr + token * weights_stride_t + h * weights_stride_h
                weights = tl.load(weights_ptrs, mask=is_head, other=0.0).to(tl.float32)
                dots = tl.dot(k_even, tl.trans(q_even))
                dots = tl.dot(k_odd, tl.trans(q_odd), dots)  # [KEYS, HEADS]
                if ROUND:
                    dots = dots.to(tl.bfloat16).to(tl.float32)
                products = tl.maximum(dots, 0.0) * weights[None, :]
                if ROUND:
                    products = products.to(tl.bfloat16).to(tl.float32)
                # Plus 0, as in a sum that starts there: a key without matching heads scores +0 under negative weights.
                score = halving_row_sums(products, KEYS, HEADS, LEVELS) + 0.0
                if ROUND:
                    score = score.to(tl.bfloat16).to(tl.float32)
                tl.store(out_row_ptr, tl.where(entry < num_visible, score, -float("inf")), mask=is_entry)
            else:
                tl.store(out_row_ptr, tl.full([KEYS], -float("inf"), dtype=tl.float32), mask=is_entry)


def fits_tensor_cores(q: torch.Tensor, fmt: RecordFormat) -> bool:
    """Whether this kernel serves a call: bf16 queries over MXFP4 pages, a head width that fills its tiles."""
    head_dim = q.shape[2]
    return q.dtype == torch.bfloat16 and fmt is RecordFormat.MXFP4 and head_dim >= 32 and head_dim & (head_dim - 1) == 0


def indexer_logits_triton(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_idx: torch.Tensor,
    num_visible: torch.Tensor,
    max_entries: int,
    *,
    round_bf16: bool,
    rows: int | None = None,
) -> torch.Tensor:
    """Launch the kernel on checked arguments: bf16 queries, MXFP4 pages; ``rows`` overrides the table."""
    num_tokens = q.shape[0]
    out = torch.empty((num_tokens, max_entries), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    q = last_axis_contiguous(q)
    rows = rows or from_table(tiling.INDEX_ROWS, num_tokens)
    groups = triton.cdiv(num_tokens, rows)
    programs = max(tiling.INDEX_LEAST_PROGRAMS, triton.cdiv(tiling.INDEX_PROGRAMS, groups))
    _indexer_logits_kernel[(groups, min(programs, triton.cdiv(max_entries, tiling.INDEX_KEY_TILE)))](
        *tensors_of(q, weights, key_cache, block_table, req_idx, num_visible, out),
        num_tokens,
        max_entries,
        key_cache.shape[1],
        key_cache.stride(0),
        *strides_of(block_table, q, weights),
        **constants_of(q, round_bf16),
        KEYS=tiling.INDEX_KEY_TILE,
        ROWS=rows,
    )
    return out
