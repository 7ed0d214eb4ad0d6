"""Selection as one Triton kernel: a program finds the k-th largest key of a chunk bit by bit, in registers.

A score becomes an unsigned integer that orders as the score does; 0 stands for -inf and NaN, which are never chosen.
A row longer than a chunk takes several passes: every chunk keeps its best k in ascending order, and the next pass
chooses among those. What a chunk drops has k better entries before it, so the last pass sees every entry of the
answer, and places keep the order of indices. The order is total: the answer does not depend on the passes.
The passes follow the width of the scores, which a graph fixes; the work follows what each row sees.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_topk.reference import topk_indices_reference
from deepinfer_kernels.launching import from_table
from deepinfer_kernels.triton_elementary import ordered_key

# (entries of a chunk up to, warps): 16 entries of a thread, or a warp for a short row.
_WARPS = ((256, 1), (1024, 4), (4096, 8), (tiling.TOPK_CHUNK, 16))


@triton.jit(do_not_specialize=["num_entries", "per_score"])
def _topk_kernel(
    scores_ptr,
    index_ptr,
    num_visible_ptr,
    out_ptr,
    out_scores_ptr,
    num_entries,
    k,
    per_score,
    stride_t,
    stride_n,
    PASS: tl.constexpr,
    IS_LAST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    n = chunk * BLOCK + lane
    num_live = num_entries.to(tl.int64)
    if num_visible_ptr is not None:
        # Chunks beyond what the row sees were left out in the passes before.
        num_live = tl.cdiv(tl.load(num_visible_ptr + token).to(tl.int64), per_score)
        for _ in tl.static_range(PASS):
            num_live = tl.cdiv(num_live, CHUNK) * k
        num_live = tl.minimum(num_live, num_entries)
        if not IS_LAST:  # noqa: SIM102  one of them is a constant, which "and" would make a tensor
            if chunk * BLOCK >= num_live:
                return
    is_entry = n < num_live
    score = tl.load(scores_ptr + token * stride_t + n.to(tl.int64) * stride_n, mask=is_entry, other=-float("inf"))
    key = ordered_key(score)
    # Scores rounded to bf16 have no low bits: half of the search, with the low bits of the keys cleared.
    is_short = tl.max(score.to(tl.int32, bitcast=True) & 0xFFFF, axis=0) == 0
    key = tl.where(is_short, (key >> 16) << 16, key)
    threshold = tl.zeros([], dtype=tl.uint32)
    bit = tl.full([], 0x80000000, dtype=tl.uint32)
    for _ in range(tl.where(is_short, 16, 32)):
        candidate = threshold | bit
        bit = bit >> 1
        count = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(count >= k, candidate, threshold)
    above = (key > threshold).to(tl.int32)
    equal = ((key == threshold) & (threshold > 0)).to(tl.int32)
    num_equal = k - tl.sum(above, axis=0)  # ties that still fit, lowest index first
    chosen = above | (equal & (tl.cumsum(equal, axis=0) <= num_equal).to(tl.int32))
    place = tl.cumsum(chosen, axis=0) - 1
    num_chosen = tl.sum(chosen, axis=0)
    index = n
    if PASS > 0:
        index = tl.load(index_ptr + token * num_entries + n, mask=is_entry, other=-1)
    first = (token * tl.num_programs(1) + chunk) * k
    tl.store(out_ptr + first + place, index, mask=chosen > 0)
    if not IS_LAST:
        tl.store(out_scores_ptr + first + place, score, mask=chosen > 0)
    for start in range(0, k, BLOCK):
        rest = start + lane
        is_rest = (rest >= num_chosen) & (rest < k)
        tl.store(out_ptr + first + rest, -1, mask=is_rest)
        if not IS_LAST:
            tl.store(out_scores_ptr + first + rest, -float("inf"), mask=is_rest)


def _choose(
    scores: torch.Tensor,
    index: torch.Tensor | None,
    k: int,
    is_last: bool,
    num_visible: torch.Tensor | None = None,
    per_score: int = 1,
    pass_number: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The best ``k`` of every chunk: indices [num_tokens, chunks * k], and before the last pass their scores."""
    num_tokens, num_entries = scores.shape
    block = min(tiling.TOPK_CHUNK, max(32, triton.next_power_of_2(num_entries)))
    num_chunks = triton.cdiv(num_entries, block)
    out = torch.empty((num_tokens, num_chunks * k), dtype=torch.int32, device=scores.device)
    kept = None if is_last else torch.empty(out.shape, dtype=torch.float32, device=scores.device)
    _topk_kernel[(num_tokens, num_chunks)](
        scores,
        index,
        num_visible,
        out,
        kept,
        num_entries,
        k,
        per_score,
        scores.stride(0),
        scores.stride(1),
        PASS=pass_number,
        IS_LAST=is_last,
        CHUNK=tiling.TOPK_CHUNK,
        BLOCK=block,
        num_warps=from_table(_WARPS, block),
    )
    return out, kept


def topk_indices_triton(
    scores: torch.Tensor, k: int, num_visible: torch.Tensor | None = None, per_score: int = 1
) -> torch.Tensor:
    """Launch the passes for the width of ``scores``, on arguments ``topk_indices`` has checked.

    A row has ceil(num_visible / per_score) scores; columns from there on are not read, and chunks of them not visited.
    """
    num_tokens, num_entries = scores.shape
    if num_tokens == 0 or k == 0 or num_entries == 0:
        return torch.full((num_tokens, k), -1, dtype=torch.int32, device=scores.device)
    if k > tiling.TOPK_LARGEST and num_entries > tiling.TOPK_CHUNK:
        # larger than any selection of the model
        counts = None if num_visible is None else -(-num_visible // per_score)
        return topk_indices_reference(scores, k, counts)
    index: torch.Tensor | None = None
    pass_number = 0
    num_visible = None if num_visible is None else num_visible.contiguous()
    while scores.shape[1] > tiling.TOPK_CHUNK:
        index, kept = _choose(scores, index, k, False, num_visible, per_score, pass_number)
        assert kept is not None
        scores, pass_number = kept, pass_number + 1
    return _choose(scores, index, k, True, num_visible, per_score, pass_number)[0]
