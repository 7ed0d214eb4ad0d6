"""The best tokens of a row as two Triton kernels: the best logit of every group of tokens, then the best of few groups.

A token among the k best lies in one of the k groups with the best first tokens: otherwise k tokens stand before it. The
second kernel, a program a row, finds these groups, then the k best of their tokens, and ranks them. Tokens are ordered
by (logit, -id), which is total: no other order of the work changes an answer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import from_table, last_axis_contiguous
from deepinfer_kernels.sample_tokens.reference import top_tokens_reference
from deepinfer_kernels.triton_elementary import ordered_key


@triton.jit(do_not_specialize=["vocab_size", "num_groups"])
def _best_of_groups_kernel(
    logits_ptr, best_ptr, vocab_size, num_groups, stride_t, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(logits_ptr + row * stride_t + token, mask=token < vocab_size, other=-float("inf"))
    best = tl.max(ordered_key(logit), axis=1)
    tl.store(best_ptr + row * num_groups + group, best.to(tl.int32, bitcast=True), mask=group < num_groups)


@triton.jit
def _places_of_best(key, is_entry, k):
    """Places of the best ``k`` entries of a vector, numbered in its order, -1 elsewhere; of a tie the first ones."""
    threshold = tl.zeros([], dtype=tl.uint32)
    bit = tl.full([], 0x80000000, dtype=tl.uint32)
    for _ in range(32):
        candidate = threshold | bit
        bit = bit >> 1
        count = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(count >= k, candidate, threshold)
    above = (key > threshold).to(tl.int32)
    equal = ((key == threshold) & is_entry).to(tl.int32)
    num_equal = k - tl.sum(above, axis=0)
    chosen = above | (equal & (tl.cumsum(equal, axis=0) <= num_equal).to(tl.int32))
    return tl.where(chosen > 0, tl.cumsum(chosen, axis=0) - 1, -1)


@triton.jit(do_not_specialize=["vocab_size", "num_groups", "num_tokens"])
def _best_of_rows_kernel(
    logits_ptr,
    best_ptr,
    held_ptr,
    out_ptr,
    vocab_size,
    num_groups,
    num_tokens,
    stride_t,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    held_ptr += row * 3 * LISTED  # groups, then tokens, then keys
    group = tl.arange(0, GROUPS)
    is_group = group < num_groups
    key = tl.load(best_ptr + row * num_groups + group, mask=is_group, other=0).to(tl.uint32, bitcast=True)
    place = _places_of_best(key, is_group, num_tokens)
    tl.store(held_ptr + place, group, mask=place >= 0)
    tl.debug_barrier()
    listed = tl.arange(0, LISTED)
    is_held = listed < tl.minimum(num_tokens, num_groups)
    group = tl.load(held_ptr + listed, mask=is_held, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_token = is_held[:, None] & (token < vocab_size)
    logit = tl.load(logits_ptr + row * stride_t + token, mask=is_token, other=-float("inf"))
    key = tl.reshape(ordered_key(logit), [LISTED * GROUP])
    place = _places_of_best(key, tl.reshape(is_token, [LISTED * GROUP]), num_tokens)
    tl.store(held_ptr + LISTED + place, tl.reshape(token, [LISTED * GROUP]), mask=place >= 0)
    tl.store(held_ptr + 2 * LISTED + place, key.to(tl.int32, bitcast=True), mask=place >= 0)
    tl.debug_barrier()
    is_listed = listed < num_tokens
    token = tl.load(held_ptr + LISTED + listed, mask=is_listed, other=0)
    key = tl.load(held_ptr + 2 * LISTED + listed, mask=is_listed, other=0).to(tl.uint32, bitcast=True)
    other = tl.arange(0, LISTED)
    is_other = other < num_tokens
    other_key = tl.load(held_ptr + 2 * LISTED + other, mask=is_other, other=0).to(tl.uint32, bitcast=True)
    is_first = (other_key[:, None] == key[None, :]) & (other[:, None] < listed[None, :])
    is_before = is_other[:, None] & ((other_key[:, None] > key[None, :]) | is_first)
    rank = tl.sum(is_before.to(tl.int32), axis=0)
    tl.store(out_ptr + row * num_tokens + rank, token.to(tl.int64), mask=is_listed)


def top_tokens_triton(logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Launch the kernels on arguments ``top_tokens`` has checked; a very long list is left to the reference."""
    num_rows, vocab_size = logits.shape
    if num_tokens > tiling.TOP_TOKENS_LISTS[-1][0]:
        return top_tokens_reference(logits, num_tokens)
    out = torch.empty((num_rows, num_tokens), dtype=torch.int64, device=logits.device)
    if out.numel() == 0:
        return out
    logits = last_axis_contiguous(logits)
    listed, num_warps = from_table(tiling.TOP_TOKENS_LISTS, num_tokens)
    num_groups = triton.cdiv(vocab_size, tiling.TOP_TOKENS_GROUP)
    groups_of_program = tiling.SAMPLING_TOKENS // tiling.TOP_TOKENS_GROUP
    best = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
    held = torch.empty((num_rows, 3, listed), dtype=torch.int32, device=logits.device)
    sizes = (vocab_size, num_groups)
    _best_of_groups_kernel[(num_rows, triton.cdiv(num_groups, groups_of_program))](
        logits,
        best,
        *sizes,
        logits.stride(0),
        GROUPS=groups_of_program,
        GROUP=tiling.TOP_TOKENS_GROUP,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _best_of_rows_kernel[(num_rows,)](
        logits,
        best,
        held,
        out,
        *sizes,
        num_tokens,
        logits.stride(0),
        GROUPS=max(32, triton.next_power_of_2(num_groups)),
        GROUP=tiling.TOP_TOKENS_GROUP,
        LISTED=listed,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out
