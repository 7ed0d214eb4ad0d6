"""Index scores in fp32 products: every format and width, for the modes that do not round to bf16."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_logits.arguments import constants_of, strides_of, tensors_of
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.kv_store.triton_codec import FORMAT_CODES, load_values
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.triton_sums import halving_row_sums


@triton.jit(do_not_specialize=["max_entries"])
def _indexer_logits_fp32_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    table_ptr,
    req_idx_ptr,
    num_visible_ptr,
    out_ptr,
    max_entries,
    per_block,
    block_stride,
    value_stride,
    scale_start,
    scale_stride,
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
    FMT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROUND: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    h = tl.arange(0, HEADS)
    is_head = h < NUM_HEADS
    num_visible = tl.load(num_visible_ptr + token)
    if tl.program_id(1) * KEYS >= num_visible:
        tl.store(out_ptr + token * max_entries + entry, tl.full([KEYS], -float("inf"), tl.float32), entry < max_entries)
        return
    is_visible = entry < num_visible
    request = tl.maximum(tl.load(req_idx_ptr + token), 0).to(tl.int64)
    page = entry // per_block
    table_ptr += request * table_stride_r + page.to(tl.int64) * table_stride_b
    block = tl.load(table_ptr, mask=is_visible, other=0).to(tl.int64)
    place = entry - page * per_block
    value_ptr = (cache_ptr + block * block_stride + place * value_stride)[:, None]
    scale_ptr = (cache_ptr + block * block_stride + scale_start + place * scale_stride)[:, None]
    dots = tl.zeros([KEYS, HEADS], dtype=tl.float32)
    for start in range(0, HEAD_DIM, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        is_column = (d < HEAD_DIM)[None, :]
        q_row_ptr = q_ptr + token * q_stride_t + h[:, None] * q_stride_h + d[None, :]
        q = tl.load(q_row_ptr, mask=is_head[:, None] & is_column, other=0.0).to(tl.float32)
        keys = load_values(value_ptr, scale_ptr, d[None, :], is_visible[:, None] & is_column, FMT)
        dots = tl.dot(keys, tl.trans(q), dots, input_precision="ieee")
    weights_ptrs = weights_ptr + token * weights_stride_t + h * weights_stride_h
    weights = tl.load(weights_ptrs, mask=is_head, other=0.0).to(tl.float32)
    if ROUND:
        dots = dots.to(tl.bfloat16).to(tl.float32)
        weights = weights.to(tl.bfloat16).to(tl.float32)
    products = tl.maximum(dots, 0.0) * weights[None, :]
    if ROUND:
        products = products.to(tl.bfloat16).to(tl.float32)
    score = halving_row_sums(products, KEYS, HEADS, LEVELS) + 0.0
    if ROUND:
        score = score.to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + token * max_entries + entry, tl.where(is_visible, score, -float("inf")), entry < max_entries)


def indexer_logits_fp32_triton(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_idx: torch.Tensor,
    num_visible: torch.Tensor,
    max_entries: int,
    *,
    fmt: RecordFormat,
    round_bf16: bool,
) -> torch.Tensor:
    """Launch the kernel on arguments ``indexer_logits`` has checked."""
    num_tokens, _, head_dim = q.shape
    out = torch.empty((num_tokens, max_entries), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    q = last_axis_contiguous(q)
    per_block = key_cache.shape[1]
    value_bytes, scale_bytes = fmt.value_bytes(head_dim), fmt.scale_bytes(head_dim)
    if fmt.is_segregated:
        strides = (value_bytes, per_block * value_bytes, scale_bytes)
    else:
        strides = (fmt.record_bytes(head_dim), value_bytes, fmt.record_bytes(head_dim))
    _indexer_logits_fp32_kernel[(num_tokens, triton.cdiv(max_entries, tiling.INDEX_FP32_KEY_TILE))](
        *tensors_of(q, weights, key_cache, block_table, req_idx, num_visible, out),
        max_entries,
        per_block,
        key_cache.stride(0),
        *strides,
        *strides_of(block_table, q, weights),
        **constants_of(q, round_bf16),
        FMT=FORMAT_CODES[fmt],
        KEYS=tiling.INDEX_FP32_KEY_TILE,
        BLOCK_D=32,
    )
    return out
