"""Bench of the routed experts on random routes: ``python -m deepinfer_kernels.moe_experts.bench_moe_experts``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, integers
from deepinfer_kernels.moe_experts import moe_experts

LIMIT = 10.0


def _routes(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """[num_tokens, top_k] int32 ascending experts, the same in every run."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return scores.topk(top_k, dim=1).indices.sort(dim=1).values.int()


def _weights(device: str, num_experts: int, num_out: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = integers(device, 0, 256, torch.uint8, num_experts, num_out, depth // 2)
    return packed, integers(device, 114, 120, torch.uint8, num_experts, num_out, depth // 32)


def _case(num_experts: int, num_tokens: int, sizes: Sizes) -> Case:
    hidden, inner, top_k = sizes.hidden_size, sizes.intermediate_size, sizes.top_k
    routes = _routes(num_tokens, num_experts, top_k)
    num_chosen = int(torch.bincount(routes.flatten()).count_nonzero())
    expert_weights = 3 * hidden * inner

    def make(device: str) -> partial[torch.Tensor]:
        return partial(
            moe_experts,
            bf16(device, num_tokens, hidden),
            routes.to(device),
            torch.rand(num_tokens, top_k, device=device),
            *_weights(device, num_experts, 2 * inner, hidden),
            *_weights(device, num_experts, hidden, inner),
            limit=LIMIT,
            quantize_input=True,
        )

    expert_bytes = expert_weights // 2 + expert_weights // 32
    return Case(
        op="moe_experts",
        name=f"{num_experts} experts {num_tokens} tokens",
        num_bytes=num_chosen * expert_bytes + num_tokens * (2 * hidden * (1 + top_k) + 8 * top_k),
        flops=2 * num_tokens * top_k * expert_weights,
        make=make,
        is_gather=num_chosen < num_experts,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Bytes count the experts that rows chose, once; operations count real rows, not the filling of tiles."""
    return [_case(num_experts, tokens, sizes) for num_experts, counts in sizes.experts for tokens in counts]


if __name__ == "__main__":
    run_bench("moe_experts", cases)
