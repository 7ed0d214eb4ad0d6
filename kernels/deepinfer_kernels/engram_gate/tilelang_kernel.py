"""The Engram gate in TileLang: a program owns one stream of one token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="valid-type, name-defined, index, misc, no-any-return"
import tilelang
import tilelang.language as T
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.engram_gate.reference import SCORE_FLOOR
from deepinfer_kernels.launching import from_table
from deepinfer_kernels.tilelang_formats import as_int
from deepinfer_kernels.tilelang_options import PASSES, type_of


@T.macro
def _gate_of(dot, x_squares, k_squares, width, eps):
    """The gate of one row from its three sums; a NaN stays one, and the sign of a zero counts."""
    x_rstd = T.ieee_fdiv(1.0, T.ieee_fsqrt(T.ieee_fdiv(x_squares, T.float32(width)) + eps))
    k_rstd = T.ieee_fdiv(1.0, T.ieee_fsqrt(T.ieee_fdiv(k_squares, T.float32(width)) + eps))
    u = T.alloc_var(T.float32)
    size = T.alloc_var(T.float32)
    u = dot * (x_rstd * k_rstd) * T.float32(width**-0.5)
    size = T.abs(u)
    size = T.ieee_fsqrt(T.if_then_else(size < T.float32(SCORE_FLOOR), T.float32(SCORE_FLOOR), size))
    root = T.if_then_else(as_int(u) < 0, -size, size)
    return T.ieee_fdiv(1.0, T.exp(-root) + 1.0)


@tilelang.jit(pass_configs=PASSES)
def engram_gate_kernel(num_streams, width, dtype, weight_dtypes, out_dtype, has_images, threads):
    """The kernel of one shape; dtypes by name, ``weight_dtypes`` of both weights."""
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def engram_gate_row(
        streams: T.Tensor((num_tokens, num_streams, width), dtype),
        key: T.Tensor((num_tokens, num_streams, width), dtype),
        value: T.Tensor((num_tokens, width), dtype),
        q_weight: T.Tensor((num_streams, width), weight_dtypes[0]),
        k_weight: T.Tensor((num_streams, width), weight_dtypes[1]),
        is_image: T.Tensor((num_tokens,), T.uint8),
        out: T.Tensor((num_tokens, num_streams, width), out_dtype),
        eps: T.float32,
    ):
        with T.Kernel(num_tokens, num_streams, threads=threads) as (token, s):
            x = T.alloc_fragment((width,), T.float32)
            k = T.alloc_fragment((width,), T.float32)
            terms = T.alloc_fragment((width,), T.float32)
            sums = T.alloc_fragment((1,), T.float32)
            dot = T.alloc_var(T.float32)
            x_squares = T.alloc_var(T.float32)
            for h in T.Parallel(width):
                x[h] = T.Cast(T.float32, streams[token, s, h])
                k[h] = T.Cast(T.float32, key[token, s, h])
            for h in T.Parallel(width):
                weight = T.Cast(T.float32, q_weight[s, h]) * T.Cast(T.float32, k_weight[s, h])
                terms[h] = x[h] * k[h] * weight
            T.reduce_sum(terms, sums, dim=0, clear=True)
            dot = sums[0]
            for h in T.Parallel(width):
                terms[h] = x[h] * x[h]
            T.reduce_sum(terms, sums, dim=0, clear=True)
            x_squares = sums[0]
            for h in T.Parallel(width):
                terms[h] = k[h] * k[h]
            T.reduce_sum(terms, sums, dim=0, clear=True)
            gate = _gate_of(dot, x_squares, sums[0], width, eps)
            for h in T.Parallel(width):
                added = x[h] + gate * T.Cast(T.float32, value[token, h])
                if has_images:
                    out[token, s, h] = T.Cast(out_dtype, T.if_then_else(is_image[token] != T.uint8(0), x[h], added))
                else:
                    out[token, s, h] = T.Cast(out_dtype, added)

    return engram_gate_row


def engram_gate_tilelang(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    is_image: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments ``engram_gate`` has checked."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=out_dtype or streams.dtype, device=streams.device)
    if out.numel() == 0:
        return out
    threads = 32 * from_table(tiling.NORM_WARPS_BY_WIDTH, width)
    weight_types = (type_of(q_weight.dtype), type_of(k_weight.dtype))
    kernel = engram_gate_kernel(
        num_streams, width, type_of(streams.dtype), weight_types, type_of(out.dtype), is_image is not None, threads
    )
    flags = is_image.contiguous() if is_image is not None else streams.new_zeros(num_tokens, dtype=torch.bool)
    kernel(
        streams.contiguous(),
        key.contiguous(),
        value.contiguous(),
        q_weight.detach().contiguous(),
        k_weight.detach().contiguous(),
        flags.view(torch.uint8),
        out,
        eps,
    )
    return out
