"""Update of the residual streams in TileLang: every stream is read once and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="valid-type, name-defined, index, misc, no-any-return"
import tilelang
import tilelang.language as T
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.tilelang_options import PASSES, type_of

_THREADS = 128


@tilelang.jit(pass_configs=PASSES)
def hc_post_kernel(num_streams, width, dtype, out_dtype):
    """The kernel of one shape; dtypes by name."""
    num_tokens = T.dynamic("num_tokens")
    block = tiling.ELEMENTWISE_BLOCK

    @T.prim_func
    def hc_post_block(
        y: T.Tensor((num_tokens, width), dtype),
        streams: T.Tensor((num_tokens, num_streams, width), dtype),
        post: T.Tensor((num_tokens, num_streams), T.float32),
        comb: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        out: T.Tensor((num_tokens, num_streams, width), out_dtype),
    ):
        with T.Kernel(num_tokens, T.ceildiv(width, block), threads=_THREADS) as (token, part):
            sources = T.alloc_fragment((num_streams, block), T.float32)
            added = T.alloc_fragment((block,), T.float32)
            total = T.alloc_fragment((block,), T.float32)
            first = part * block
            for h in T.Parallel(block):
                if first + h < width:
                    added[h] = T.Cast(T.float32, y[token, first + h])
            for i, h in T.Parallel(num_streams, block):
                if first + h < width:
                    sources[i, h] = T.Cast(T.float32, streams[token, i, first + h])
            for j in T.unroll(num_streams):
                for h in T.Parallel(block):
                    total[h] = sources[0, h] * comb[token, 0, j]
                for i in T.unroll(1, num_streams):
                    for h in T.Parallel(block):
                        total[h] = total[h] + sources[i, h] * comb[token, i, j]
                for h in T.Parallel(block):
                    total[h] = total[h] + added[h] * post[token, j]
                for h in T.Parallel(block):
                    if first + h < width:
                        out[token, j, first + h] = T.Cast(out_dtype, total[h])

    return hc_post_block


def hc_post_tilelang(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments ``hc_post`` has checked."""
    num_streams, width = streams.shape[1:]
    out = torch.empty(streams.shape, dtype=out_dtype or y.dtype, device=streams.device)
    if out.numel() > 0:
        kernel = hc_post_kernel(num_streams, width, type_of(y.dtype), type_of(out.dtype))
        kernel(y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), out)
    return out
