"""Bench of the norms, mHC, RoPE and Engram: ``python -m deepinfer_kernels.hc_post.bench_hc_post``.

One module for the whole elementwise family, all at the width of the model: every kernel is bound by memory.
"""

from collections.abc import Callable
from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.engram_gate import engram_gate
from deepinfer_kernels.engram_lookup import engram_lookup
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.hc_mix import hc_mix
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.hc_sinkhorn import hc_sinkhorn
from deepinfer_kernels.kv_compress import compress_pairs
from deepinfer_kernels.kv_store import RecordFormat, store_records
from deepinfer_kernels.log_softmax import log_softmax
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.rope import rope

WIDTH, STREAMS, HEADS, HEAD_DIM, VOCAB = 5120, 4, 64, 512, 129280
ROWS = (1, 64, 4096)
VOCAB_ROWS_LIMIT = 256
Made = tuple[Callable[[], object], int]


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _norm(n: int, width: int) -> Made:
    return partial(rms_norm, _bf16(n, width), _bf16(width), 1e-20), 4 * n * width


def _mix(n: int) -> Made:
    fn = torch.randn(24, STREAMS * WIDTH, device="cuda")
    return partial(hc_mix, _bf16(n, STREAMS, WIDTH), fn, 1e-20), 2 * n * STREAMS * WIDTH + fn.numel() * 4


def _sinkhorn(n: int) -> Made:
    logits, scale, base = (torch.randn(*shape, device="cuda") for shape in ((n, 24), (3,), (24,)))
    return partial(hc_sinkhorn, logits, scale, base, iters=20, eps=1e-6), n * 48 * 4


def _collapse(n: int) -> Made:
    pre = torch.rand(n, STREAMS, device="cuda")
    return partial(hc_collapse, _bf16(n, STREAMS, WIDTH), pre), 2 * n * WIDTH * (STREAMS + 1)


def _post(n: int) -> Made:
    post, comb = torch.rand(n, STREAMS, device="cuda"), torch.rand(n, STREAMS, STREAMS, device="cuda")
    return partial(hc_post, _bf16(n, WIDTH), _bf16(n, STREAMS, WIDTH), post, comb), 2 * n * WIDTH * (2 * STREAMS + 1)


def _rope(n: int) -> Made:
    angles = torch.rand(n, 32, device="cuda")
    return partial(rope, _bf16(n, HEADS, HEAD_DIM), angles.cos(), angles.sin()), 4 * n * HEADS * HEAD_DIM


def _gate(n: int) -> Made:
    weight = _bf16(STREAMS, WIDTH)
    streams, key = _bf16(n, STREAMS, WIDTH), _bf16(n, STREAMS, WIDTH)
    call = partial(engram_gate, streams, key, _bf16(n, WIDTH), weight, weight, 1e-20)
    return call, 2 * n * WIDTH * (3 * STREAMS + 1)


def _lookup(n: int) -> Made:
    table = torch.randint(0, 120, (1 << 20, 256), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((1 << 20, 8), 127, device="cuda", dtype=torch.uint8)
    rows = torch.randint(0, 1 << 20, (n, 24), device="cuda", dtype=torch.int32)
    return partial(engram_lookup, table, scale, rows, torch.bfloat16), n * 24 * (264 + 512)


def _store(n: int, width: int, fmt: RecordFormat) -> Made:
    cache = torch.zeros((n // 64 + 1, 64, fmt.record_bytes(width)), device="cuda", dtype=torch.uint8)
    slots = torch.randperm(n, device="cuda")
    return partial(store_records, cache, slots, _bf16(n, width), fmt), n * (2 * width + fmt.record_bytes(width))


def _compress(n: int) -> Made:
    latent, score = torch.randn(n, 512, device="cuda"), torch.randn(n, 512, device="cuda")
    positions, req_idx = torch.arange(n, device="cuda"), torch.zeros(n, device="cuda", dtype=torch.int32)
    state, block = torch.zeros(2, 8, 1024, device="cuda"), torch.zeros(1, device="cuda", dtype=torch.int32)
    call = partial(compress_pairs, latent, score, positions, req_idx, state, block, out_dtype=torch.bfloat16)
    return call, n * 512 * (4 + 4 + 2)


def _log_softmax(n: int) -> Made:
    return partial(log_softmax, torch.randn(n, VOCAB, device="cuda")), 8 * n * VOCAB


CASES: dict[str, Callable[[int], Made]] = {
    "rms_norm 5120": partial(_norm, width=WIDTH),
    "rms_norm 1280": partial(_norm, width=1280),
    "rms_norm 512": partial(_norm, width=512),
    "hc_mix": _mix,
    "hc_sinkhorn": _sinkhorn,
    "hc_collapse": _collapse,
    "hc_post": _post,
    "rope q": _rope,
    "engram_gate": _gate,
    "engram_lookup": _lookup,
    "store mxfp8": partial(_store, width=512, fmt=RecordFormat.MXFP8),
    "store nvfp4": partial(_store, width=512, fmt=RecordFormat.NVFP4),
    "store mxfp4": partial(_store, width=128, fmt=RecordFormat.MXFP4),
    "compress_pairs": _compress,
    "log_softmax": _log_softmax,
}


def cases(ceilings: Ceilings) -> list[Record]:
    """Every kernel at few and many rows."""
    records = []
    for name, make in CASES.items():
        for num_rows in ROWS:
            rows = min(num_rows, VOCAB_ROWS_LIMIT) if name == "log_softmax" else num_rows
            call, num_bytes = make(rows)
            calls = [call] + [make(rows)[0] for _ in range(rotation(num_bytes) - 1)]
            op, _, rest = name.partition(" ")
            case = f"{rest} {rows} rows".strip()
            records.append(measure(op, case, calls, num_bytes=num_bytes, flops=0, ceilings=ceilings))
    return records


if __name__ == "__main__":
    run_bench("hc_post", cases)
