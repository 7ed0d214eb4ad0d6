"""``python -m deepinfer_kernels.moe_experts.bench_moe_experts``: the experts at the width of DeepSeek-V4.1-Flash.

With 384 experts (the model) and with 32 (a twelfth of them: one of twelve ranks, or the slice of the peer comparison).
Bytes count the experts that rows chose, once; operations count real rows only, not the filling of tiles.
"""

from collections.abc import Callable
from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.moe_experts import moe_experts

HIDDEN_SIZE, INTERMEDIATE_SIZE, TOP_K, LIMIT = 5120, 2304, 6, 10.0
EXPERT_WEIGHTS = 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
EXPERT_BYTES = EXPERT_WEIGHTS // 2 + EXPERT_WEIGHTS // 32
CASES = ((384, (1, 8, 64, 256, 4096)), (32, (1, 16, 64, 256, 1024, 4096, 8192)))


def _weights(num_experts: int) -> tuple[torch.Tensor, ...]:
    def packed(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)

    def scale(*shape: int) -> torch.Tensor:
        return torch.randint(114, 120, shape, device="cuda", dtype=torch.uint8)

    return (
        packed(num_experts, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE // 2),
        scale(num_experts, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE // 32),
        packed(num_experts, HIDDEN_SIZE, INTERMEDIATE_SIZE // 2),
        scale(num_experts, HIDDEN_SIZE, INTERMEDIATE_SIZE // 32),
    )


def _case(num_tokens: int, weights: tuple[torch.Tensor, ...]) -> tuple[list[Callable[[], object]], int]:
    num_experts = weights[0].shape[0]
    calls: list[Callable[[], object]] = []
    num_chosen = 0
    sets = rotation(min(num_experts, num_tokens * TOP_K) * EXPERT_BYTES)
    for _ in range(sets):
        x = torch.randn(num_tokens, HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16)
        chosen = torch.rand(num_tokens, num_experts, device="cuda").argsort(dim=1)[:, :TOP_K].sort(dim=1).values.int()
        topk_weights = torch.rand(num_tokens, TOP_K, device="cuda")
        num_chosen += int(torch.bincount(chosen.flatten(), minlength=num_experts).count_nonzero())
        calls.append(partial(moe_experts, x, chosen, topk_weights, *weights, limit=LIMIT, quantize_input=True))
    return calls, num_chosen // sets * EXPERT_BYTES + 2 * num_tokens * HIDDEN_SIZE * (1 + TOP_K)


def cases(ceilings: Ceilings) -> list[Record]:
    """Both numbers of experts, few and many tokens."""
    records = []
    for num_experts, sizes in CASES:
        weights = _weights(num_experts)
        for num_tokens in sizes:
            calls, num_bytes = _case(num_tokens, weights)
            flops = 2 * num_tokens * TOP_K * EXPERT_WEIGHTS
            name = f"{num_experts} experts T={num_tokens}"
            records.append(measure("moe_experts", name, calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings))
    return records


if __name__ == "__main__":
    run_bench("moe_experts", cases)
