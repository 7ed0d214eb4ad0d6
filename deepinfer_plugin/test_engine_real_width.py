"""Layers of the released width: several ranks and replicas answer with the bits of one.

Kernels choose tiles by the width of a layer, and on several ranks by a part of it; small checkpoints have neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.engine_child.gpus import lack_for, serving_gpus
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import run_engines
from deepinfer_plugin.settings import Arithmetic
from deepinfer_plugin.test_engine_replicas import free_port, replica

FLAGS = (
    "--max-model-len=1024",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=512",
    "--kv-cache-memory-bytes=1073741824",
    "--no-async-scheduling",
)
RANKS = {
    "tensor": ("--tensor-parallel-size=2",),
    "experts": ("--tensor-parallel-size=2", "--enable-expert-parallel"),
}
MAX_TOKENS = 6


def _requests(first: int, lengths: tuple[int, ...]) -> tuple[Request, ...]:
    generator = torch.Generator().manual_seed(first)
    return tuple(
        Request(
            name=f"r{first + number}",
            tokens=tuple(torch.randint(3, 32000, (length,), generator=generator).tolist()),
            max_tokens=MAX_TOKENS,
        )
        for number, length in enumerate(lengths)
    )


# Chunks, index selections above index_topk entries, and steps of 1 to 14 rows; those of two replicas in two halves.
HALVES = (_requests(0, (900, 7, 64, 300, 33, 128, 5)), _requests(10, (640, 200, 1, 90)))
EVERY = (*HALVES[0], *HALVES[1])


@pytest.mark.gpu
@pytest.mark.slow
def test_ranks_and_replicas_have_the_bits_of_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if not serving_gpus():
        pytest.skip("layers of the released width need a GPU")
    if lack := lack_for(2):
        pytest.skip(lack)
    model, port = str(checkpoint("slice", 0)), free_port()
    one = EngineRun(name="one", model=model, arithmetic=Arithmetic.REF, flags=FLAGS, actions=(Action(add=EVERY),))
    ranks = [replace(one, name=name, flags=(*FLAGS, *flags)) for name, flags in RANKS.items()]
    replicas = [
        replica("still", rank, model, port, arithmetic=Arithmetic.REF, flags=FLAGS, requests=HALVES[rank])
        for rank in range(2)
    ]
    found = run_engines([one, *ranks], tmp_path / "ranks")
    log = (tmp_path / "ranks" / "child-0" / "child.log").read_text(encoding="utf-8")
    assert "Worker_TP1 " in log
    assert "Worker_TP1_EP1 " in log
    found |= run_engines(replicas, tmp_path / "replicas", num_children=2)
    compared = 0
    for name, result in found.items():
        for request, got in result.requests.items():
            want = found["one"].requests[request]
            assert torch.equal(got.tokens[0], want.tokens[0]), f"{name}: {request}"
            assert_bitwise_equal(got.rows, want.rows, label=f"{name}: {request}")
            compared += len(got.rows)
    assert compared == 4 * len(EVERY) * MAX_TOKENS
