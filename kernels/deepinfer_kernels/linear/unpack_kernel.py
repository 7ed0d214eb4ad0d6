"""An MXFP8 weight as bf16, columns turned like those of the prepared rows: operand of the wide product."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.triton_formats import load_packed_scale, unpack_e4m3


@triton.jit
def _unpack_weight_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_out,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // 2)
    is_row = (n < num_out)[:, None]
    n_row = tl.minimum(n, num_out - 1).to(tl.int64)
    is_word = is_row & (start // 2 + word < K // 2)[None, :]
    words = tl.load(weight_ptr + n_row[:, None] * (K // 2) + (start // 2 + word)[None, :], mask=is_word, other=0)
    scale = load_packed_scale(scale_ptr + n_row // 32 * (K // 32), start, K, PADDED_K)
    out_ptrs = out_ptr + n_row[:, None] * PADDED_K + (start + k)[None, :]
    tl.store(out_ptrs, unpack_e4m3(words, scale, ROWS), mask=is_row)


def unpack_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, padded K] bf16 of an e4m3 ``weight`` [N, K] and its block scales, divided by WEIGHT_SHIFT; exact."""
    num_out, depth = weight.shape
    width = padded_depth(depth)
    out = torch.empty((num_out, width), dtype=torch.bfloat16, device=weight.device)
    _unpack_weight_kernel[(triton.cdiv(num_out, tiling.UNPACK_ROWS), width // tiling.WORD_BLOCK_K)](
        weight.view(torch.int16),
        scale,
        out,
        num_out,
        K=depth,
        PADDED_K=width,
        ROWS=tiling.UNPACK_ROWS,
        BLOCK_K=tiling.WORD_BLOCK_K,
        num_warps=4,
    )
    return out
