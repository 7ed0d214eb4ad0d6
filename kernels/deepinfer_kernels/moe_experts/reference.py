"""The routed experts in plain PyTorch."""

from collections.abc import Callable, Sequence

import torch

from deepinfer_kernels.dense_cache import dense
from deepinfer_kernels.moe_experts.shares import Gather, all_columns
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant
from deepinfer_kernels.row_tiles import tiled_matmul
from deepinfer_kernels.swiglu import swiglu

# Up to this size the fp32 weights of all experts of a layer are made at once and remembered by ``dense_cache``;
# beyond it every call makes one expert's weights at a time, so that memory stays bounded by one expert.
DENSE_STACK_BYTES = 64 << 20

WeightOf = Callable[[int], torch.Tensor]


def _dense_weights(packed: torch.Tensor, scale: torch.Tensor) -> WeightOf:
    """A function from expert id to its fp32 weight [N, K]; the values do not depend on what is remembered."""
    if packed.numel() * 2 * 4 <= DENSE_STACK_BYTES:  # two values per byte, four bytes per value
        stack = dense(packed, lambda: mxfp4_dequant(packed, scale, torch.float32), depends_on=(scale,))
        return stack.__getitem__
    return lambda expert: mxfp4_dequant(packed[expert], scale[expert], torch.float32)


def _grouped_matmul(x: torch.Tensor, weight_of: WeightOf, counts: list[int]) -> torch.Tensor:
    """Multiply rows sorted by expert, ``counts[e]`` of expert e, with their weights: [M, K] fp32 -> [M, N] fp32.

    ``tiled_matmul`` cuts every expert's rows into row tiles of its own.
    """
    parts: list[torch.Tensor] = []
    start = 0
    for expert, count in enumerate(counts):
        if count > 0:
            parts.append(tiled_matmul(x[start : start + count], weight_of(expert)))
            start += count
    return torch.cat(parts)


def moe_experts_reference(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    quantize_input: bool,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Run arguments ``moe_experts`` has already checked; see there."""
    num_tokens, top_k = topk_idx.shape
    if num_tokens == 0:
        return x.new_zeros(0, top_k, w2.shape[1])
    experts = topk_idx.reshape(-1)
    order = torch.sort(experts, stable=True).indices  # (token, slot) pairs by ascending expert
    absent, *counts = torch.bincount(experts + 1, minlength=w13.shape[0] + 1).tolist()
    order = order[absent:]
    out = x.new_zeros(num_tokens * top_k, w2.shape[1])
    if order.shape[0] == 0:
        return out.view(num_tokens, top_k, w2.shape[1])
    intermediate_size = w13.shape[1] // 2

    rows = mxfp8_fake_quant(x) if quantize_input else x
    sorted_rows = rows.float().index_select(0, order // top_k)
    gate_up = _grouped_matmul(sorted_rows, _dense_weights(w13, w13_scale), counts).to(x.dtype)
    gate, up = gate_up[:, :intermediate_size], gate_up[:, intermediate_size:]
    h = swiglu(gate, up, limit, topk_weights.reshape(-1)[order])
    if gather is not None:
        h = all_columns(h, w2.shape[2] * 2, gather)
    if quantize_input:
        h = mxfp8_fake_quant(h)
    y = _grouped_matmul(h.float(), _dense_weights(w2, w2_scale), counts).to(x.dtype)
    out[order] = y
    return out.view(num_tokens, top_k, w2.shape[1])


def make_inputs(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: str,
) -> dict[str, torch.Tensor]:
    """Random arguments of ``moe_experts`` by name; every byte of the packed weights is valid."""

    def packed(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)

    def scale(*shape: int) -> torch.Tensor:
        return torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8).to(device)

    scores = torch.rand(num_tokens, num_experts, generator=generator)
    chosen = torch.sort(torch.sort(scores, dim=-1).indices[:, :top_k], dim=-1).values
    return {
        "x": torch.randn(num_tokens, hidden_size, generator=generator).to(device, dtype),
        "topk_idx": chosen.to(device, torch.int32),
        "topk_weights": torch.rand(num_tokens, top_k, generator=generator).to(device),
        "w13": packed(num_experts, 2 * intermediate_size, hidden_size // 2),
        "w13_scale": scale(num_experts, 2 * intermediate_size, hidden_size // 32),
        "w2": packed(num_experts, hidden_size, intermediate_size // 2),
        "w2_scale": scale(num_experts, hidden_size, intermediate_size // 32),
    }


def cut_weights(weights: Sequence[torch.Tensor], rank: int, num_ranks: int) -> list[torch.Tensor]:
    """One rank's share of w13, w13_scale, w2 and w2_scale: an equal run of the rows of w1, of w3 and of w2."""

    def share(part: torch.Tensor) -> torch.Tensor:
        return part.chunk(num_ranks, dim=1)[rank]

    w13, w13_scale, *second = weights
    first = [torch.cat([share(half) for half in part.chunk(2, dim=1)], dim=1) for part in (w13, w13_scale)]
    return [*first, *(share(part).contiguous() for part in second)]


def _side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def run_shares(
    run: Callable[..., torch.Tensor],
    arguments: dict[str, torch.Tensor],
    num_ranks: int,
    exchange: Callable[[list[torch.Tensor]], torch.Tensor] = _side_by_side,
) -> torch.Tensor:
    """What the ranks give, side by side: one after the other they hand out their hidden values, then get those of all.

    Args:
        run: ``moe_experts`` on arguments like ``arguments`` and ``gather``.
        arguments: of ``make_inputs``, with whole weights.
        num_ranks: equal shares of the outputs of both products.
        exchange: makes one tensor of the hidden values of all ranks.
    """
    names = ("w13", "w13_scale", "w2", "w2_scale")
    weights = [arguments[name] for name in names]
    shares = [
        arguments | dict(zip(names, cut_weights(weights, rank, num_ranks), strict=True)) for rank in range(num_ranks)
    ]
    handed_out: list[torch.Tensor] = []

    def hand_out(h: torch.Tensor) -> torch.Tensor:
        handed_out.append(h)
        return h.repeat(1, num_ranks)

    for share in shares:
        run(**share, gather=hand_out)
    return torch.cat([run(**share, gather=lambda h: exchange(handed_out)) for share in shares], dim=-1)
