"""A replica with few requests beside one with many: its steps replay a graph of the other one's size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.engine_child.gpus import lack_for, serving_gpus
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import run_engines
from deepinfer_plugin.settings import Arithmetic
from deepinfer_plugin.test_engine_replicas import free_port, replica

FLAGS = ("--max-num-seqs=160", "--kv-cache-memory-bytes=268435456", "--no-async-scheduling")
COUNTS = (10, 140)  # the larger one is above model.graph_logits.MAX_ROWS


def _requests(rank: int) -> tuple[Request, ...]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randint(3, 250, (4 + i % 5,), generator=generator).tolist() for i in range(COUNTS[rank])]
    return tuple(Request(name=f"r{rank}-{i}", tokens=tuple(ids), max_tokens=8) for i, ids in enumerate(drawn))


@pytest.mark.slow
def test_a_small_replica_beside_a_large_one_keeps_its_bits(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if not serving_gpus():
        pytest.skip("without graphs both replicas compute their own rows only")
    if lack := lack_for(2):
        pytest.skip(lack)
    model, port = str(checkpoint("nano", 0)), free_port()
    runs = [
        replica("still", rank, model, port, arithmetic=Arithmetic.REF, flags=FLAGS, requests=_requests(rank))
        for rank in range(2)
    ]
    shared = run_engines(runs, tmp_path / "replicas", num_children=2)
    every = (*_requests(0), *_requests(1))
    one = EngineRun(name="one", model=model, arithmetic=Arithmetic.REF, flags=FLAGS, actions=(Action(add=every),))
    alone = run_engines([one], tmp_path / "one")["one"]
    for rank in range(2):
        for request in _requests(rank):
            got, want = shared[f"still {rank}"].requests[request.name], alone.requests[request.name]
            assert torch.equal(got.tokens[0], want.tokens[0]), request.name
            assert_bitwise_equal(got.rows, want.rows, label=request.name)
