"""Attention over all keys on an NVIDIA GPU: bf16 on tensor cores, fp32 on the plain units. One tile, so one order."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.triton_sums import halving_row_sums

_FIRST_MAXIMUM = tl.constexpr(-1e30)


# The counts are no constants of the compiled kernel: one program serves images and batches of every size.
@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _dense_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,
    num_queries,
    num_keys,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEVELS: tl.constexpr,
    SPLIT_P: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    is_column = (d < HEAD_DIM)[None, :]
    is_query = (row < num_queries)[:, None]
    q_ptr += row[:, None] * q_stride_t + head * q_stride_h + d[None, :]
    q = tl.load(q_ptr, mask=is_query & is_column, other=0.0)
    maximum = tl.full([ROWS], _FIRST_MAXIMUM, tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, num_keys, KEYS):
        key = (start + tl.arange(0, KEYS)).to(tl.int64)
        is_key = key < num_keys
        mask = is_key[:, None] & is_column
        keys = tl.load(k_ptr + key[:, None] * k_stride_t + head * k_stride_h + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        p = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        denominator = denominator * rescale + halving_row_sums(p, ROWS, KEYS, LEVELS)
        values = tl.load(v_ptr + key[:, None] * v_stride_t + head * v_stride_h + d[None, :], mask=mask, other=0.0)
        high = p.to(values.dtype)
        total = tl.dot(high, values, total * rescale[:, None], input_precision="ieee")
        if SPLIT_P:
            total = tl.dot((p - high.to(tl.float32)).to(values.dtype), values, total)
        maximum = new_maximum
    out = tl.div_rn(total, tl.broadcast_to(denominator[:, None], [ROWS, BLOCK_D])).to(out_ptr.dtype.element_ty)
    out_ptr += row[:, None] * out_stride_t + head * HEAD_DIM + d[None, :]
    tl.store(out_ptr, out, mask=is_query & is_column)


def dense_attention_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Launch the kernel on arguments ``dense_attention`` has already checked."""
    num_queries, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v = (last_axis_contiguous(x) for x in (q, k, v))
    rows = tiling.DENSE_ATTENTION_ROWS
    _dense_attention_kernel[(triton.cdiv(num_queries, rows), num_heads)](
        q,
        k,
        v,
        out,
        scale,
        num_queries,
        k.shape[0],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=rows,
        KEYS=tiling.ATTENTION_SLOT_TILE,
        LEVELS=tiling.ATTENTION_SLOT_TILE.bit_length() - 1,
        SPLIT_P=q.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    return out
