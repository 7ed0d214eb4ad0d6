"""Places of experts on an NVIDIA GPU, every (row, expert) pair in one launch; integers only."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs


@triton.jit(do_not_specialize=["num_pairs", "num_counted", "first_slot"])
def _expert_places_kernel(
    topk_idx_ptr,
    table_ptr,
    num_replicas_ptr,
    is_real_ptr,
    counts_ptr,
    slots_ptr,
    here_ptr,
    owner_ptr,
    num_pairs,
    num_counted,
    first_slot,
    counts_stride,
    TOP_K: tl.constexpr,
    MAX_REPLICAS: tl.constexpr,
    SLOTS_PER_RANK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_inputs(IS_EARLY)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pair < num_pairs
    expert = tl.load(topk_idx_ptr + pair, mask=is_pair, other=-1)
    is_some = expert >= 0
    slot = expert
    if HAS_TABLE:
        count = tl.load(num_replicas_ptr + expert, mask=is_some, other=1)
        replica = (pair // TOP_K) % count
        slot = tl.load(table_ptr + expert * MAX_REPLICAS + replica, mask=is_some, other=-1)
    slot = tl.where(is_some, slot, -1)
    here = slot - first_slot
    is_here = (here >= 0) & (here < SLOTS_PER_RANK)
    tl.store(slots_ptr + pair, slot, mask=is_pair)
    tl.store(here_ptr + pair, tl.where(is_here, here, -1), mask=is_pair)
    tl.store(owner_ptr + pair, tl.where(is_some, slot // SLOTS_PER_RANK, -1), mask=is_pair)
    if HAS_COUNTS:
        real = tl.load(is_real_ptr + pair, mask=is_some & (pair < num_counted), other=0)
        tl.atomic_add(counts_ptr + slot * counts_stride, real, mask=real != 0, sem="relaxed")


def expert_places_triton(
    topk_idx: torch.Tensor,
    slots_per_rank: int,
    rank: int,
    table: torch.Tensor | None,
    num_replicas: torch.Tensor | None,
    is_real: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel on arguments ``expert_places`` has checked."""
    topk_idx = topk_idx.contiguous()
    slots, here, owner = (torch.empty(topk_idx.shape, dtype=torch.int32, device=topk_idx.device) for _ in range(3))
    num_pairs = topk_idx.numel()
    if num_pairs > 0:
        early = starts_early(topk_idx.device)
        _expert_places_kernel[(triton.cdiv(num_pairs, tiling.PLACES_BLOCK),)](
            topk_idx,
            topk_idx if table is None else table.contiguous(),
            topk_idx if num_replicas is None else num_replicas.contiguous(),
            topk_idx if is_real is None else is_real.contiguous(),
            topk_idx if counts is None else counts,
            slots,
            here,
            owner,
            num_pairs,
            0 if is_real is None else is_real.numel(),
            rank * slots_per_rank,
            1 if counts is None else counts.stride(0),
            TOP_K=topk_idx.shape[1],
            MAX_REPLICAS=1 if table is None else table.shape[1],
            SLOTS_PER_RANK=slots_per_rank,
            HAS_TABLE=table is not None,
            HAS_COUNTS=counts is not None,
            BLOCK=tiling.PLACES_BLOCK,
            IS_EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
    return slots, here, owner
