"""Rotation of the last dimensions as one Triton kernel: a program copies one vector and rotates its end."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.launching import last_axis_contiguous

# Vectors of one program: with 512 columns of bf16 a warp moves two vectors with 16-byte accesses.
_VECTORS = 8


@triton.jit
def rotate_pairs(first, second, cos, sin, INVERSE: tl.constexpr):
    """Rotate fp32 pairs by the angle, or back; products and sums are rounded separately, as in the reference."""
    if INVERSE:
        return first * cos + second * sin, second * cos - first * sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_vectors,
    stride_t,
    stride_v,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    is_value = (v < num_vectors)[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + token * stride_t + v[:, None] * stride_v + d[None, :], mask=is_value, other=0.0)
    first, second = tl.split(tl.reshape(x.to(tl.float32), [BLOCK_V, BLOCK_D // 2, 2]))
    pair = tl.arange(0, BLOCK_D // 2) - (HEAD_DIM // 2 - NUM_PAIRS)
    is_rotated = (pair >= 0) & (pair < NUM_PAIRS)
    cos = tl.load(cos_ptr + token * NUM_PAIRS + pair, mask=is_rotated, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * NUM_PAIRS + pair, mask=is_rotated, other=0.0)[None, :]
    turned_first, turned_second = rotate_pairs(first, second, cos, sin, INVERSE)
    first = tl.where(is_rotated[None, :], turned_first, first)
    second = tl.where(is_rotated[None, :], turned_second, second)
    out = tl.reshape(tl.join(first, second), [BLOCK_V, BLOCK_D])
    tl.store(out_ptr + (token * num_vectors + v[:, None]) * HEAD_DIM + d[None, :], out, mask=is_value)


def rope_triton(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Launch the kernel on arguments ``rope`` has checked; head_dim is even."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        vectors = last_axis_contiguous(x.reshape(x.shape[0], -1, x.shape[-1]))
        num_tokens, num_vectors, head_dim = vectors.shape
        block_v = min(_VECTORS, triton.next_power_of_2(num_vectors))
        _rope_kernel[(num_tokens, triton.cdiv(num_vectors, block_v))](
            vectors,
            cos.contiguous(),
            sin.contiguous(),
            out,
            num_vectors,
            vectors.stride(0),
            vectors.stride(1),
            HEAD_DIM=head_dim,
            NUM_PAIRS=cos.shape[1],
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_V=block_v,
            INVERSE=inverse,
            num_warps=4 if block_v > 1 else 1,
            enable_fp_fusion=False,
        )
    return out
