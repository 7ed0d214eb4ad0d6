"""Two data-parallel replicas that share the routed experts answer with the bits of one engine that has them all.

They do so while the experts move between them, too: replicas move together, be they busy or not.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.engine_child.gpus import lack_for
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import run_engines
from deepinfer_plugin.settings import Arithmetic

# Each process is a replica and asks the other one before every step whether it works, too: a step that is planned ahead
# on one side only would have no partner.
FLAGS = (
    "--max-num-seqs=4",
    "--max-num-batched-tokens=24",
    "--kv-cache-memory-bytes=33554432",
    "--no-async-scheduling",
)
# The replicas have unlike rows in every step, and one goes on alone when the other is done.
REQUESTS = (
    (Request(name="long", tokens=tuple(range(3, 60)), max_tokens=3), Request(name="short", tokens=(7,), max_tokens=2)),
    (Request(name="other", tokens=tuple(range(20, 50)), max_tokens=9),),
)
WAYS = ("still", "moved")
EPLB = {"window_size": 2, "step_interval": 2, "num_redundant_experts": 2}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def replica(
    way: str,
    rank: int,
    model: str,
    port: int,
    *,
    arithmetic: Arithmetic = Arithmetic.S32,
    flags: tuple[str, ...] = FLAGS,
    requests: tuple[Request, ...] | None = None,
) -> EngineRun:
    """One of two replicas that share experts; without ``requests`` it has its own of ``REQUESTS``."""
    moves = ("--enable-eplb", f"--eplb-config={json.dumps(EPLB)}") if way == "moved" else ()
    return EngineRun(
        name=f"{way} {rank}",
        model=model,
        arithmetic=arithmetic,
        flags=(*flags, "--enable-expert-parallel", *moves),
        actions=(Action(add=REQUESTS[rank] if requests is None else requests),),
        variables={
            "VLLM_DP_SIZE": "2",
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),  # also which of the visible GPUs it takes
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
            "DEEPINFER_EPLB_POLICY": "rotate",
        },
    )


@pytest.mark.slow
def test_replicas_that_share_experts_have_the_bits_of_one_engine(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if lack := lack_for(2):
        pytest.skip(lack)
    model, ports = str(checkpoint("nano", 0)), {way: free_port() for way in WAYS}
    replicas = [replica(way, rank, model, ports[way]) for way in WAYS for rank in range(2)]
    shared = run_engines(replicas, tmp_path / "replicas", num_children=2)
    for rank in range(2):
        log = (tmp_path / "replicas" / f"child-{rank}" / "child.log").read_text(encoding="utf-8")
        assert f"Worker_DP{rank}_EP{rank} " in log, f"replica {rank} did not share its experts"
        moves = re.findall(r"Experts moved \(rotate, move \d+\): \d+ of 70 slots", log)
        assert (len(moves) >= 2) is (rank == 0), f"rank {rank} has told of {len(moves)} moves"
    every = tuple(request for requests in REQUESTS for request in requests)
    one = EngineRun(name="one", model=model, arithmetic=Arithmetic.S32, flags=FLAGS, actions=(Action(add=every),))
    alone = run_engines([one], tmp_path / "one")["one"]
    for name, result in shared.items():
        for request in REQUESTS[int(name[-1])]:
            want, got = alone.requests[request.name], result.requests[request.name]
            assert got.tokens[0].tolist() == want.tokens[0].tolist(), f"{name}: {request.name}"
            assert_bitwise_equal(got.rows, want.rows, label=f"{name}: {request.name}")
