"""The draw as two Triton kernels: the best token of every chunk of a row, and the best of these.

The noise is made in registers, and only for rows that draw. A maximum has no order, so chunks change no result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.sampling_noise.triton_kernel import gumbel_of_words, words_of_groups

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["vocab_size"])
def _best_of_chunks_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    prompts_ptr,
    positions_ptr,
    score_ptr,
    token_ptr,
    vocab_size,
    stride_t,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * (4 * GROUPS) + tl.arange(0, 4 * GROUPS)
    logit = tl.load(logits_ptr + row * stride_t + token, mask=token < vocab_size, other=-float("inf"))
    temperature = tl.load(temperature_ptr + row)
    score = logit.to(tl.float64)
    if temperature != 0.0:
        seed, prompt, position = tl.load(seeds_ptr + row), tl.load(prompts_ptr + row), tl.load(positions_ptr + row)
        words = words_of_groups(seed, prompt, position, chunk * GROUPS, GROUPS)
        score = tl.div_rn(logit, temperature + tl.zeros_like(logit)).to(tl.float64) + gumbel_of_words(words)
    score = tl.where(score == score, score, -float("inf"))
    best = tl.max(score, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(score_ptr + place, best)
    tl.store(token_ptr + place, tl.min(tl.where(score == best, token, _NO_TOKEN), axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def _best_of_rows_kernel(score_ptr, token_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    score = tl.load(score_ptr + row * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
    token = tl.load(token_ptr + row * num_chunks + chunk, mask=is_chunk, other=_NO_TOKEN)
    best = tl.max(score, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(score == best, token, _NO_TOKEN), axis=0).to(tl.int64))


def sample_tokens_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    prompt_hashes: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernels on arguments ``sample_tokens`` has checked."""
    num_rows, vocab_size = logits.shape
    if logits.numel() == 0:
        return torch.zeros((num_rows,), dtype=torch.int64, device=logits.device)
    logits = last_axis_contiguous(logits)
    num_chunks = triton.cdiv(vocab_size, tiling.SAMPLING_TOKENS)
    score = torch.empty((num_rows, num_chunks), dtype=torch.float64, device=logits.device)
    token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    _best_of_chunks_kernel[(num_rows, num_chunks)](
        logits,
        temperature.contiguous(),
        seeds.contiguous(),
        prompt_hashes.contiguous(),
        positions.contiguous(),
        score,
        token,
        vocab_size,
        logits.stride(0),
        GROUPS=tiling.SAMPLING_TOKENS // 4,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _best_of_rows_kernel[(num_rows,)](
        score, token, out, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return out
