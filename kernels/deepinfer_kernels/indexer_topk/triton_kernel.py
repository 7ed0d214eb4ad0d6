"""Selection of a row that fits one program: its k-th largest key is found bit by bit, in registers.

A score becomes an unsigned integer that orders as the score does; 0 stands for -inf and NaN, which are never chosen.
The set is exact, so this kernel and the one for long rows give the same indices.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_topk.triton_long_rows import select_long_rows
from deepinfer_kernels.indexer_topk.triton_order import ordered_key


@triton.jit(do_not_specialize=["num_entries"])
def _topk_row_kernel(scores_ptr, out_ptr, num_entries, k, width, stride_t, stride_n, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    scores_ptr += token * stride_t + n.to(tl.int64) * stride_n
    key = ordered_key(tl.load(scores_ptr, mask=n < num_entries, other=-float("inf")))
    threshold = tl.zeros([], dtype=tl.uint32)
    for step in range(32):
        candidate = threshold | (tl.full([], 1, dtype=tl.uint32) << (31 - step).to(tl.uint32))
        count = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(count >= k, candidate, threshold)
    above = (key > threshold).to(tl.int32)
    equal = ((key == threshold) & (threshold > 0)).to(tl.int32)
    num_equal = k - tl.sum(above, axis=0)  # ties that still fit, lowest index first
    chosen = above | (equal & (tl.cumsum(equal, axis=0) <= num_equal).to(tl.int32))
    place = tl.cumsum(chosen, axis=0) - 1
    tl.store(out_ptr + token * width + place, n, mask=chosen > 0)
    num_chosen = tl.sum(chosen, axis=0)
    for start in range(0, width, BLOCK):
        tl.store(out_ptr + token * width + start + n, -1, mask=(start + n >= num_chosen) & (start + n < width))


def topk_indices_triton(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Launch the kernel for the width of ``scores``, on arguments ``topk_indices`` has checked."""
    num_tokens, num_entries = scores.shape
    if num_tokens == 0 or k == 0 or num_entries == 0:
        return torch.full((num_tokens, k), -1, dtype=torch.int32, device=scores.device)
    if num_entries > tiling.TOPK_ROW_LIMIT:
        return select_long_rows(scores, k)
    out = torch.empty((num_tokens, k), dtype=torch.int32, device=scores.device)
    block = max(32, triton.next_power_of_2(num_entries))
    _topk_row_kernel[(num_tokens,)](
        scores,
        out,
        num_entries,
        k,
        k,
        scores.stride(0),
        scores.stride(1),
        BLOCK=block,
        num_warps=16 if block > 4096 else 8 if block > 1024 else 4 if block > 256 else 1,
    )
    return out
