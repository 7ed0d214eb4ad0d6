"""Time of exchanges between ranks on a communicator with the mode's pins and on one without.

Run with ``torchrun --nproc-per-node 2 -m deepinfer_batch_invariant.bench_collectives``; the first rank prints JSON. It
holds one process to one communicator of each kind, as a served engine does: NCCL re-reads the pins for the second one
only if it knows NCCL_NO_CACHE (2.29.7 and later). Without a GPU it runs over gloo, which has no pins.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_batch_invariant.pins import ENVIRONMENT_PINS

ROWS = (1, 64, 1024, 4096)
COLUMNS = 4096  # hidden_size of the released model
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_us(ranks: Ranks, name: str, x: torch.Tensor, repeats: int) -> float:
    run = getattr(ranks, name)
    for _ in range(3):
        run(x)
    _wait(x.device)
    distributed.barrier()
    begin_s = time.perf_counter()
    for _ in range(repeats):
        run(x)
    _wait(x.device)
    return (time.perf_counter() - begin_s) / repeats * 1e6


def measure(rows: tuple[int, ...] = ROWS, repeats: int = 50) -> list[dict[str, object]]:
    """Times in microseconds of one rank, by exchange, rows of bf16 and kind of communicator.

    Every rank of the default process group must call it, before the process makes a communicator of NCCL.

    Args:
        rows: of 4096 columns.
        repeats: of every exchange.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", distributed.get_rank()) if is_gpu else torch.device("cpu")
    found: list[dict[str, object]] = []
    chosen = {name: os.environ.get(name) for name in PINS}  # by who started the bench
    with _environment({**PINS, "NCCL_NO_CACHE": ",".join(PINS)}):
        kinds = {"pinned": _ranks(device)}
        with _environment(chosen):
            kinds["free"] = _ranks(device)
        for count in rows:
            x = torch.ones(2, count, COLUMNS, dtype=torch.bfloat16, device=device)
            for name, given in (("gather", x[0]), ("exchange", x)):
                times = {kind: round(_time_us(ranks, name, given, repeats), 1) for kind, ranks in kinds.items()}
                found.append({"exchange": name, "rows": count, **{f"{kind}_us": us for kind, us in times.items()}})
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
        print(json.dumps({"nccl": version, "ranks": distributed.get_world_size(), "times": rows}, indent=1))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
