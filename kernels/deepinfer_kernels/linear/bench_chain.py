"""Parts of a decode step between attention and experts, as single operations and as the fused ones the model calls.

``python -m deepinfer_kernels.linear.bench_chain --json FILE``: time of one part in a graph that runs it on weights in
turn, together larger than L2.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from deepinfer_kernels.attention_output import attention_output
from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.experts_output import experts_output
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.hc_norm import hc_norm
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.latent_projections import latent_projections
from deepinfer_kernels.linear import grouped_linear, mxfp8_linear, mxfp8_prepared_linear
from deepinfer_kernels.linear.weights import Weight
from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.shared_expert import shared_expert
from deepinfer_kernels.swiglu import swiglu

WIDTH, Q_RANK, HEADS, HEAD_DIM, INNER, GROUPS, O_RANK, STREAMS, TOP_K = 5120, 1280, 64, 512, 2304, 8, 1024, 4, 6
EPS, LIMIT, BF16 = 1e-20, 10.0, torch.bfloat16
Out = tuple[torch.Tensor, ...]
Calls = Sequence[Callable[[], object]]


def _weight(num_out: int, depth: int) -> Weight:
    codes = torch.randn((num_out, depth), device="cuda").to(torch.float8_e4m3fn)
    return codes, torch.randint(114, 120, (num_out // 32, depth // 32), device="cuda", dtype=torch.uint8)


def _rows(weight: Weight, low: int, high: int) -> Weight:
    return weight[0][low:high], weight[1][low // 32 : high // 32]


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def _linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return mxfp8_linear(x, *weight, out_dtype=BF16, quantize_input=True)


def front(is_fused: bool, w: tuple[Weight, ...], streams: torch.Tensor, pre: torch.Tensor, norms: Out) -> Out:
    """Streams to normed input, queries and keys."""
    wq_a, wkv = _rows(w[0], 0, Q_RANK), _rows(w[0], Q_RANK, Q_RANK + HEAD_DIM)
    if not is_fused:
        x = rms_norm(hc_collapse(streams, pre), norms[0], EPS)
        query = _linear(rms_norm(_linear(x, wq_a), norms[1], EPS), w[1])
        return x, query, rms_norm(_linear(x, wkv), norms[2], EPS)
    given = hc_norm(streams, pre, norms[0], EPS, quantize=True, for_experts=False)
    rows, key = latent_projections(given.rows, wq_a, wkv, norms[1], norms[2], EPS, out_dtype=BF16, quantize=True)
    return given.x, mxfp8_prepared_linear(rows, *w[1], out_dtype=BF16), key


def shared(
    is_fused: bool, w: tuple[Weight, ...], x: torch.Tensor, rows: torch.Tensor, routed: torch.Tensor, mix: Out
) -> Out:
    """Shared expert to streams; the rows come prepared where the norm did it."""
    w1, w3 = _rows(w[0], 0, INNER), _rows(w[0], INNER, 2 * INNER)
    if not is_fused:
        hidden = swiglu(_linear(x, w1), _linear(x, w3), LIMIT, None)
        return (hc_post(moe_combine(routed, _linear(hidden, w[1])), *mix),)
    out = shared_expert(rows, w1, w3, w[1], limit=LIMIT, out_dtype=BF16, quantize=True)
    return (experts_output(routed, out, *mix),)


def back(is_fused: bool, w: tuple[Weight, ...], out: torch.Tensor, mix: Out) -> Out:
    """Attention result to streams."""
    if not is_fused:
        low = grouped_linear(out, *w[0], out_dtype=BF16).flatten(1)
        return (hc_post(_linear(low, w[1]), *mix),)
    wo_a, wo_b = w
    return (attention_output(out, wo_a, wo_b, *mix, quantize=True),)


def _inputs(n: int) -> dict[str, tuple[Any, ...]]:
    streams, pre = _bf16(n, STREAMS, WIDTH), torch.rand(n, STREAMS, device="cuda")
    norms = (_bf16(WIDTH), _bf16(Q_RANK), _bf16(HEAD_DIM))
    given = hc_norm(streams, pre, norms[0], EPS, quantize=True, for_experts=False)
    mix = (streams, pre, torch.rand(n, STREAMS, STREAMS, device="cuda"))
    return {
        "front": (streams, pre, norms),
        "shared": (given.x, given.rows, _bf16(n, TOP_K, WIDTH), mix),
        "back": (_bf16(n, GROUPS, HEADS * HEAD_DIM // GROUPS), mix),
    }


CHAINS: dict[str, tuple[Callable[..., Out], tuple[tuple[int, int], ...]]] = {
    "front": (front, ((Q_RANK + HEAD_DIM, WIDTH), (HEADS * HEAD_DIM, Q_RANK))),
    "shared": (shared, ((2 * INNER, WIDTH), (WIDTH, INNER))),
    "back": (back, ((GROUPS * O_RANK, HEADS * HEAD_DIM // GROUPS), (WIDTH, GROUPS * O_RANK))),
}


def cases(ceilings: Ceilings) -> list[Record]:
    """All parts, separate and fused. Bytes are those of the weights."""
    records = []
    for name, (chain, shapes) in CHAINS.items():
        num_bytes = sum(num_out * depth for num_out, depth in shapes)
        sets = [tuple(_weight(*shape) for shape in shapes) for _ in range(rotation(num_bytes))]
        for n in (1, 16, 64, 256, 4096):
            given = _inputs(n)[name]
            for is_fused in (False, True):
                calls: Calls = [partial(chain, is_fused, weights, *given) for weights in sets]
                case = f"{name} M={n} {'fused' if is_fused else 'separate'}"
                flops = 2 * n * num_bytes
                records.append(measure("chain", case, calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings))
    return records


if __name__ == "__main__":
    run_bench("chain", cases)
