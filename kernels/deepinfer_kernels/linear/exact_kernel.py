"""Product in plain fp32, for operands that are not exact in bf16: the test modes q32 and s32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling


@triton.jit
def _exact_matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride_m,
    weight_stride_n,
    out_stride_m,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * x_stride_m + k[None, :]
    weight_ptrs = weight_ptr + tl.minimum(n, num_out - 1).to(tl.int64)[None, :] * weight_stride_n + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + start, mask=(start + k < K)[None, :], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptrs + start, mask=(start + k < K)[:, None], other=0.0).to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride_m + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < num_out)[None, :])


def exact_matmul(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply ``x`` [M, K] with the transpose of ``weight`` [N, K]; bf16 or fp32 each, contiguous last axes."""
    num_rows, num_out = x.shape[0], weight.shape[0]
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=x.device)
    block_m, block_n, block_k = tiling.EXACT_TILE
    _exact_matmul_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(num_out, block_n))](
        x,
        weight,
        out,
        num_rows,
        num_out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        x.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
