"""Random words and Gumbel noise as one Triton kernel; the draw of ``sample_tokens`` makes its noise from its parts.

A program owns some calls of the generator, four tokens each. Words and noise have the bits of the reference.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.triton_elementary import log_positive


@triton.jit
def words_of_groups(seed, prompt, position, first_group, GROUPS: tl.constexpr):
    """uint32 words [4 * GROUPS] of the tokens from 4 * ``first_group`` on; the three numbers are int64."""
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    none = tl.zeros([GROUPS], dtype=tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        group,
        none + position.to(tl.uint32),
        none + prompt.to(tl.uint32),
        none + (prompt >> 32).to(tl.uint32),
        none + seed.to(tl.uint32),
        none + (seed >> 32).to(tl.uint32),
        10,
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * GROUPS])


@triton.jit
def gumbel_of_words(words):
    """fp64 Gumbel noise of uint32 words."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10  # 2^-32
    return -log_positive(-log_positive(uniform))


@triton.jit(do_not_specialize=["vocab_size"])
def _noise_kernel(
    seeds_ptr, prompts_ptr, positions_ptr, out_ptr, vocab_size, IS_GUMBEL: tl.constexpr, GROUPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    seed, prompt = tl.load(seeds_ptr + row), tl.load(prompts_ptr + row)
    words = words_of_groups(seed, prompt, tl.load(positions_ptr + row), first, GROUPS)
    token = 4 * first + tl.arange(0, 4 * GROUPS)
    out = gumbel_of_words(words) if IS_GUMBEL else words.to(tl.int64)
    tl.store(out_ptr + row * vocab_size + token, out, mask=token < vocab_size)


def _launch(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty((seeds.shape[0], vocab_size), dtype=dtype, device=seeds.device)
    if out.numel() > 0:
        groups = tiling.SAMPLING_TOKENS // 4
        _noise_kernel[(seeds.shape[0], triton.cdiv(vocab_size, tiling.SAMPLING_TOKENS))](
            seeds.contiguous(),
            prompt_hashes.contiguous(),
            positions.contiguous(),
            out,
            vocab_size,
            IS_GUMBEL=dtype == torch.float64,
            GROUPS=groups,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def random_words_triton(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Launch the kernel on arguments ``random_words`` has checked."""
    return _launch(seeds, prompt_hashes, positions, vocab_size, torch.int64)


def gumbel_noise_triton(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Launch the kernel on arguments ``gumbel_noise`` has checked."""
    return _launch(seeds, prompt_hashes, positions, vocab_size, torch.float64)
