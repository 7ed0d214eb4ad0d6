"""Candidate blocks as Triton kernels: scores of blocks, and the copy of the entries inside chosen blocks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels.indexer_topk.triton_kernel import topk_indices_triton

_BLOCKS = 256  # blocks of one program


@triton.jit(do_not_specialize=["num_entries", "num_blocks"])
def _block_scores_kernel(
    scores_ptr,
    num_visible_ptr,
    out_ptr,
    num_entries,
    num_blocks,
    block_size,
    stride_t,
    stride_n,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    e = tl.arange(0, BLOCK_E)
    entry = b[:, None] * block_size + e[None, :]
    num_visible = tl.load(num_visible_ptr + token)
    if tl.program_id(1).to(tl.int64) * BLOCK_B * block_size >= num_visible:
        return  # the selection does not read these blocks
    mask = (e < block_size)[None, :] & (entry < tl.minimum(num_visible, num_entries))
    score_ptr = scores_ptr + token * stride_t + entry.to(tl.int64) * stride_n
    score = tl.load(score_ptr, mask=mask, other=-float("inf"))
    best = tl.max(score, axis=1)
    # A NaN drops its block, as it does in the reference.
    best = tl.where(tl.max((score != score).to(tl.int32), axis=1) > 0, -float("inf"), best)
    is_newest = (num_visible > 0) & (b == (num_visible - 1) // block_size)
    tl.store(out_ptr + token * num_blocks + b, tl.where(is_newest, float("inf"), best), mask=b < num_blocks)


@triton.jit(do_not_specialize=["num_entries", "length"])
def _copy_candidates_kernel(
    scores_ptr,
    blocks_ptr,
    out_ptr,
    num_entries,
    length,
    block_size,
    stride_t,
    stride_n,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    b = tl.load(blocks_ptr + token * length + place, mask=place < length, other=-1).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    entry = b[:, None] * block_size + e[None, :]
    mask = (b >= 0)[:, None] & (e < block_size)[None, :] & (entry < num_entries)
    score = tl.load(scores_ptr + token * stride_t + entry * stride_n, mask=mask, other=0.0)
    tl.store(out_ptr + token * num_entries + entry, score, mask=mask)


def candidate_blocks_triton(
    scores: torch.Tensor, num_visible: torch.Tensor, num_blocks: int, block_size: int
) -> torch.Tensor:
    """Launch the kernels on arguments ``candidate_blocks`` has checked."""
    num_tokens, num_entries = scores.shape
    num_score_blocks = triton.cdiv(num_entries, block_size)
    num_visible = num_visible.contiguous()
    block_scores = torch.empty((num_tokens, num_score_blocks), dtype=torch.float32, device=scores.device)
    if block_scores.numel() > 0:
        _block_scores_kernel[(num_tokens, triton.cdiv(num_score_blocks, _BLOCKS))](
            scores,
            num_visible,
            block_scores,
            num_entries,
            num_score_blocks,
            block_size,
            scores.stride(0),
            scores.stride(1),
            BLOCK_B=_BLOCKS,
            BLOCK_E=triton.next_power_of_2(block_size),
            num_warps=4,
        )
    return topk_indices_triton(block_scores, num_blocks, num_visible, block_size)


def mask_to_candidates_triton(scores: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Launch the kernel on arguments ``mask_to_candidates`` has checked."""
    num_tokens, num_entries = scores.shape
    out = torch.full((num_tokens, num_entries), -torch.inf, dtype=torch.float32, device=scores.device)
    length = blocks.shape[1]
    if out.numel() > 0 and length > 0:
        _copy_candidates_kernel[(num_tokens, triton.cdiv(length, _BLOCKS))](
            scores,
            blocks.contiguous(),
            out,
            num_entries,
            length,
            block_size,
            scores.stride(0),
            scores.stride(1),
            BLOCK_B=_BLOCKS,
            BLOCK_E=triton.next_power_of_2(block_size),
            num_warps=4,
        )
    return out
