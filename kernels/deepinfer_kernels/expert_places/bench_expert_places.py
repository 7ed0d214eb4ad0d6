"""Bench of the places of experts: ``python -m deepinfer_kernels.expert_places.bench_expert_places``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes
from deepinfer_kernels.expert_places import expert_places
from deepinfer_kernels.expert_places.reference import make_inputs

RANKS = 4
EXTRA_EXPERTS = 4
Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _case(num_rows: int, sizes: Sizes, num_extra: int) -> Case:
    num_experts, pairs, num_slots = sizes.num_experts, num_rows * sizes.top_k, sizes.num_experts + num_extra

    def make(device: str) -> partial[Places]:
        generator = torch.Generator().manual_seed(0)
        inputs = make_inputs(num_rows, sizes.top_k, num_experts, num_slots, generator, device)
        topk_idx, table, num_replicas, is_real = inputs
        call = partial(
            expert_places,
            topk_idx,
            slots_per_rank=num_slots // RANKS,
            rank=1,
            is_real=is_real,
            counts=torch.zeros(num_slots, dtype=torch.int32, device=device),
        )
        return partial(call, table=table, num_replicas=num_replicas) if num_extra > 0 else call

    table_bytes = 4 * num_experts * (num_extra + 2) if num_extra > 0 else 0
    return Case(
        op="expert_places",
        name=f"{num_rows} rows{', replicas' if num_extra > 0 else ''}",
        num_bytes=20 * pairs + 4 * num_slots + table_bytes,
        flops=4 * pairs,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows, experts at their first places, and replicas of some."""
    return [_case(rows, sizes, extra) for extra in (0, EXTRA_EXPERTS) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("expert_places", cases)
