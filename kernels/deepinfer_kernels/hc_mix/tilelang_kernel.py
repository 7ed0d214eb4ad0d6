"""Mix logits of bf16 streams in TileLang: products over parts of K on tensor cores, then the parts in ascending order.

fp32 weights are split exactly into three bf16 values, so that every product is exact. As in the Triton kernel a sum on
the tensor cores starts anew every block of columns, and an fp32 addition takes it in.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="valid-type, name-defined, index, misc, no-any-return"
import tilelang
import tilelang.language as T
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import as_rows
from deepinfer_kernels.tilelang_options import PASSES

_ROWS = tiling.HC_MIX_TILELANG_ROWS
_BLOCK_K, _PART_K = tiling.HC_MIX_BLOCK_K, tiling.HC_MIX_PART_K
_THREADS = 128


def _padded(num_logits: int) -> int:
    """Logits of one product: a multiple of 16."""
    return -(-num_logits // 16) * 16


@T.macro
def _split_weights(fn, high, middle, low, start, num_logits, depth):
    """Three bf16 values that add up to each fp32 value; zeros beside the weight."""
    for n, k in T.Parallel(_padded(num_logits), _BLOCK_K):
        if n < num_logits and start + k < depth:
            rest = fn[n, start + k] - T.Cast(T.float32, T.Cast(T.bfloat16, fn[n, start + k]))
            high[n, k] = T.Cast(T.bfloat16, fn[n, start + k])
            middle[n, k] = T.Cast(T.bfloat16, rest)
            low[n, k] = T.Cast(T.bfloat16, rest - T.Cast(T.float32, T.Cast(T.bfloat16, rest)))
        else:
            high[n, k] = T.bfloat16(0)
            middle[n, k] = T.bfloat16(0)
            low[n, k] = T.bfloat16(0)


@tilelang.jit(pass_configs=PASSES)
def hc_mix_parts_kernel(depth, num_logits):
    """Logits and squares of one part of K for a tile of rows."""
    num_tokens, num_parts = T.dynamic("num_tokens"), -(-depth // _PART_K)
    columns = _padded(num_logits)

    @T.prim_func
    def hc_mix_part(
        x: T.Tensor((num_tokens, depth), T.bfloat16),
        fn: T.Tensor((num_logits, depth), T.float32),
        logits: T.Tensor((num_parts, num_tokens, columns), T.float32),
        squares: T.Tensor((num_parts, num_tokens), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, _ROWS), num_parts, threads=_THREADS) as (tile, part):
            x_shared = T.alloc_shared((_ROWS, _BLOCK_K), T.bfloat16)
            high = T.alloc_shared((columns, _BLOCK_K), T.bfloat16)
            middle = T.alloc_shared((columns, _BLOCK_K), T.bfloat16)
            low = T.alloc_shared((columns, _BLOCK_K), T.bfloat16)
            block_sum = T.alloc_fragment((_ROWS, columns), T.float32)
            part_sum = T.alloc_fragment((_ROWS, columns), T.float32)
            terms = T.alloc_fragment((_ROWS, _BLOCK_K), T.float32)
            row_squares = T.alloc_fragment((_ROWS,), T.float32)
            first = tile * _ROWS
            T.clear(part_sum)
            T.clear(terms)
            for block in T.serial(_PART_K // _BLOCK_K):
                start = part * _PART_K + block * _BLOCK_K
                for m, k in T.Parallel(_ROWS, _BLOCK_K):
                    if first + m < num_tokens and start + k < depth:
                        x_shared[m, k] = x[first + m, start + k]
                    else:
                        x_shared[m, k] = T.bfloat16(0)
                _split_weights(fn, high, middle, low, start, num_logits, depth)
                T.fence_proxy_async()
                T.clear(block_sum)
                T.gemm(x_shared, low, block_sum, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(x_shared, middle, block_sum, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(x_shared, high, block_sum, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for m, n in T.Parallel(_ROWS, columns):
                    part_sum[m, n] = part_sum[m, n] + block_sum[m, n]
                for m, k in T.Parallel(_ROWS, _BLOCK_K):
                    wide = T.Cast(T.float32, x_shared[m, k])
                    terms[m, k] = terms[m, k] + wide * wide
            T.reduce_sum(terms, row_squares, dim=1, clear=True)
            for m, n in T.Parallel(_ROWS, columns):
                if first + m < num_tokens:
                    logits[part, first + m, n] = part_sum[m, n]
            for m in T.Parallel(_ROWS):
                if first + m < num_tokens:
                    squares[part, first + m] = row_squares[m]

    return hc_mix_part


@tilelang.jit(pass_configs=PASSES)
def hc_mix_sum_kernel(depth, num_logits):
    """Add the parts of one row in ascending order, and divide by the root mean square."""
    num_tokens, num_parts = T.dynamic("num_tokens"), -(-depth // _PART_K)
    columns = _padded(num_logits)

    @T.prim_func
    def hc_mix_sum(
        logits: T.Tensor((num_parts, num_tokens, columns), T.float32),
        squares: T.Tensor((num_parts, num_tokens), T.float32),
        out: T.Tensor((num_tokens, num_logits), T.float32),
        eps: T.float32,
    ):
        with T.Kernel(num_tokens, threads=32) as token:
            total = T.alloc_var(T.float32)
            square_sum = T.alloc_var(T.float32)
            n = T.get_thread_binding(0)
            for turn in T.serial(T.ceildiv(num_logits, 32)):
                if turn * 32 + n < num_logits:
                    total = 0.0
                    square_sum = 0.0
                    for part in T.serial(num_parts):
                        total = total + logits[part, token, turn * 32 + n]
                        square_sum = square_sum + squares[part, token]
                    root = T.ieee_fsqrt(T.ieee_fdiv(square_sum, T.float32(depth)) + eps)
                    out[token, turn * 32 + n] = total * T.ieee_fdiv(1.0, root)

    return hc_mix_sum


def hc_mix_tilelang(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch the kernels on arguments ``hc_mix`` has checked; ``streams`` bf16."""
    rows = as_rows(streams.flatten(1)).contiguous()
    num_tokens, depth = rows.shape
    num_logits, num_parts = fn.shape[0], -(-depth // _PART_K)
    out = torch.empty((num_tokens, num_logits), dtype=torch.float32, device=streams.device)
    if num_tokens > 0:
        logits = torch.empty((num_parts, num_tokens, _padded(num_logits)), dtype=torch.float32, device=out.device)
        squares = torch.empty((num_parts, num_tokens), dtype=torch.float32, device=out.device)
        hc_mix_parts_kernel(depth, num_logits)(rows, fn.detach().contiguous(), logits, squares)
        hc_mix_sum_kernel(depth, num_logits)(logits, squares, out, eps)
    return out
