"""Two data-parallel replicas that share the routed experts answer with the bits of one engine that has them all."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import run_engines
from deepinfer_plugin.settings import Arithmetic

FLAGS = ("--max-num-seqs=4", "--max-num-batched-tokens=24", "--kv-cache-memory-bytes=33554432")
# The replicas have unlike rows in every step, and one goes on alone when the other is done.
REQUESTS = (
    (Request(name="long", tokens=tuple(range(3, 60)), max_tokens=3), Request(name="short", tokens=(7,), max_tokens=2)),
    (Request(name="other", tokens=tuple(range(20, 50)), max_tokens=9),),
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.slow
def test_replicas_that_share_experts_have_the_bits_of_one_engine(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, port = str(checkpoint("nano", 0)), str(free_port())
    replicas = [
        EngineRun(
            name=f"replica {rank}",
            model=model,
            arithmetic=Arithmetic.S32,
            flags=(*FLAGS, "--enable-expert-parallel"),
            actions=(Action(add=requests),),
            variables={
                "VLLM_DP_SIZE": "2",
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": port,
            },
        )
        for rank, requests in enumerate(REQUESTS)
    ]
    shared = run_engines(replicas, tmp_path / "replicas", num_children=2)
    for rank in range(2):
        log = (tmp_path / "replicas" / f"child-{rank}" / "child.log").read_text(encoding="utf-8")
        assert f"Worker_DP{rank}_EP{rank} " in log, f"replica {rank} did not share its experts"
    every = tuple(request for requests in REQUESTS for request in requests)
    one = EngineRun(name="one", model=model, arithmetic=Arithmetic.S32, flags=FLAGS, actions=(Action(add=every),))
    alone = run_engines([one], tmp_path / "one")["one"]
    for replica, requests in zip(shared.values(), REQUESTS, strict=True):
        for request in requests:
            want, got = alone.requests[request.name], replica.requests[request.name]
            assert got.tokens[0].tolist() == want.tokens[0].tolist(), request.name
            assert_bitwise_equal(got.rows, want.rows, label=request.name)
