"""Time of exchanges between ranks: on a communicator with the mode's pins, on one without, and over peer memory.

Run with ``torchrun --nproc-per-node 2 -m deepinfer_plugin.bench.exchanges``; the first rank prints JSON. It holds one
process to one communicator of each kind, as a served engine does: NCCL re-reads the pins for the second one only if it
knows NCCL_NO_CACHE (2.29.7 and later). Without a GPU it runs over gloo, which has no pins, and without peer memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_batch_invariant.pins import ENVIRONMENT_PINS
from deepinfer_plugin.cli.console import say

ROWS = (1, 16, 64, 1024, 4096)
COLUMNS = 4096  # of a rank: the grouped output projection of the released model on two ranks
PINS = {pin.name: pin.value for pin in ENVIRONMENT_PINS if pin.name.startswith("NCCL_")}


@contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _ranks(device: torch.device) -> Ranks:
    """A communicator of all ranks, made by its first exchange here, in the present environment."""
    group: Any = distributed.new_group()  # a process of no group does not come here
    ranks = Ranks(rank=distributed.get_rank(), size=distributed.get_world_size(), group=group)
    first = torch.zeros(ranks.size, 1, dtype=torch.uint8, device=device)
    ranks.gather(first)
    ranks.exchange(first)
    _wait(device)
    return ranks


def _with_peers(ranks: Ranks, device: torch.device) -> dict[str, Ranks]:
    """The ranks with memory of each other, if they can have it."""
    from deepinfer_plugin.model.peer_memory import peer_memory_of

    coordinator: Any = SimpleNamespace(
        world_size=ranks.size,
        rank_in_group=ranks.rank,
        device=device,
        cpu_group=distributed.new_group(backend="gloo"),
    )
    assert ranks.group is not None
    peers = peer_memory_of(coordinator, ranks.group)
    return {} if peers is None else {"peer": replace(ranks, peers=peers)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_graph(run: Callable[[], object], repeats: int) -> Callable[[], object]:
    """``repeats`` of ``run`` as one graph: a served decode step has them so, and the host's time is left out."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph.replay


def _time_us(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    def in_turn() -> None:
        for _ in range(repeats):
            run()

    for _ in range(3):
        run()
    _wait(device)
    whole = _in_graph(run, repeats) if device.type == "cuda" else in_turn
    whole()
    _wait(device)
    distributed.barrier()
    begin_s = time.perf_counter()
    whole()
    _wait(device)
    return (time.perf_counter() - begin_s) / repeats * 1e6


def measure(rows: tuple[int, ...] = ROWS, repeats: int = 50) -> list[dict[str, object]]:
    """Times in microseconds of one rank, by exchange, rows of bf16 and way.

    Every rank of the default process group must call it, before the process makes a communicator of NCCL.

    Args:
        rows: of 4096 columns of every rank.
        repeats: of every exchange.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", distributed.get_rank()) if is_gpu else torch.device("cpu")
    found: list[dict[str, object]] = []
    chosen = {name: os.environ.get(name) for name in PINS}  # by who started the bench
    with _environment({**PINS, "NCCL_NO_CACHE": ",".join(PINS)}):
        ways = {"pinned": _ranks(device)}
        with _environment(chosen):
            ways["free"] = _ranks(device)
        if is_gpu:
            ways |= _with_peers(ways["free"], device)
        for count in rows:
            x = torch.ones(count, COLUMNS, dtype=torch.bfloat16, device=device)
            owner = (torch.arange(count, device=device) % distributed.get_world_size()).int()
            for name, options in (("gather_columns", {}), ("merge_rows", {"owner": owner, "is_cut": True})):
                times = {}
                for way, ranks in ways.items():
                    run = partial(getattr(ranks, name), x, **options)
                    times[f"{way}_us"] = round(_time_us(run, device, repeats), 1)
                found.append({"exchange": name, "rows": count, **times})
    return found


def main() -> None:
    """Measure and print."""
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if is_gpu else "gloo")
    rows = measure() if is_gpu else measure((1, 64), repeats=3)
    if distributed.get_rank() == 0:
        version = ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else None  # type: ignore[no-untyped-call]
        say(json.dumps({"nccl": version, "ranks": distributed.get_world_size(), "times": rows}, indent=1))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
