"""``python -m deepinfer_determinism.graph_probe``: do row hashes follow a captured CUDA graph? Needs torch and Triton.

A few operations of ``deepinfer_kernels`` are captured in a graph with the hash probes inside, and replayed on inputs
that the capture has not seen. Exit code 0: the hashes are those of eager runs and the probes change no bit; 1: not so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from deepinfer_determinism.row_hashes import Recorder, Target
from deepinfer_kernels.linear import linear
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.swiglu import swiglu
from deepinfer_plugin.cli.console import say

NUM_ROWS, NUM_REAL = 8, 6  # rows of the graph, and of the requests; the others pad it
WIDTH = 256
OPERATIONS = ("sampler/rms_norm", "sampler/linear", "sampler/swiglu")
Write = Callable[[str, torch.Tensor], None]


@dataclass(slots=True)
class _Layer:
    """Three operations of the model on a buffer that a graph reads at every replay."""

    x: torch.Tensor
    norm_weight: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def make(cls, device: str) -> _Layer:
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(2 * WIDTH, WIDTH, generator=generator) / 16
        return cls(
            x=torch.zeros(NUM_ROWS, WIDTH, dtype=torch.bfloat16, device=device),
            norm_weight=torch.ones(WIDTH, dtype=torch.bfloat16, device=device),
            weight=weight.to(torch.bfloat16).to(device),
        )

    def forward(self, write: Write) -> torch.Tensor:
        h = rms_norm(self.x, self.norm_weight, 1e-6)
        write("rms_norm", h)
        h = linear(h, self.weight, out_dtype=torch.bfloat16)
        write("linear", h)
        h = swiglu(h[:, :WIDTH], h[:, WIDTH:], 10.0)
        write("swiglu", h)
        return h


def check(device: str = "cuda") -> list[str]:
    """What is wrong with the hashes of a captured graph, one line each; empty where nothing is."""
    layer, recorder = _Layer.make(device), Recorder(target=Target("r0", 0, "sampler/linear"))
    silent = _capture(layer, lambda operation, result: None, Recorder())
    probed = _capture(layer, recorder.write, recorder)
    problems: list[str] = []
    for number in range(3):
        x = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
        layer.x.copy_(x)
        problems += _compare(layer, recorder, silent, probed, f"replay {number}")
    problems += _follows_one_row(layer, recorder, probed)
    if recorder.replayed == 0:
        problems.append("no row was read from a replayed graph")
    if recorder.captured is None:
        problems.append("the values of the target's row were not kept")
    return problems


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor


def _capture(layer: _Layer, write: Write, recorder: Recorder) -> _Captured:
    """Warm up on a stream of its own, then capture; the recorder is told as vLLM's runner would tell it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        recorder.begin_dummy(NUM_ROWS, NUM_ROWS)
        layer.forward(write)
    torch.cuda.current_stream().wait_stream(stream)
    recorder.begin_dummy(NUM_ROWS, NUM_ROWS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.forward(write)
    return _Captured(graph, out)


def _step(recorder: Recorder, run: Callable[[], object]) -> list[dict[str, int]]:
    """Hashes of one step in which every request has one row; ``run`` computes it."""
    device = next(iter(recorder.buffers.values())).device if recorder.buffers else torch.device("cuda")
    seen = len(recorder.found)
    recorder.begin(
        SimpleNamespace(
            req_ids=[f"r{row}-00000000" for row in range(NUM_REAL)],
            num_reqs=NUM_REAL,
            query_start_loc_np=np.arange(NUM_REAL + 1),
            positions=torch.zeros(NUM_ROWS, dtype=torch.int64, device=device),
            num_tokens_after_padding=NUM_ROWS,
            logits_indices=torch.arange(NUM_REAL, device=device),
        ),
        NUM_ROWS,
    )
    run()
    recorder.collect()
    return [hashes for _, hashes in recorder.found[seen:]]


def _compare(layer: _Layer, recorder: Recorder, silent: _Captured, probed: _Captured, label: str) -> Iterator[str]:
    """A replay with probes against one without and against an eager run."""
    silent.graph.replay()
    want = silent.out.clone()
    replayed = _step(recorder, probed.graph.replay)
    eager_recorder = Recorder()
    eager = _step(eager_recorder, lambda: layer.forward(eager_recorder.write))
    if not torch.equal(want.view(torch.int16), probed.out.view(torch.int16)):
        yield f"{label}: the probes change bits of the graph's result"
    if len(replayed) != NUM_REAL or any(set(row) != set(OPERATIONS) for row in replayed):
        yield f"{label}: {[sorted(row) for row in replayed]}, expected {OPERATIONS} in {NUM_REAL} rows"
    if replayed != eager:
        rows = [row for row, (a, b) in enumerate(zip(replayed, eager, strict=False)) if a != b]
        yield f"{label}: hashes of rows {rows} are not those of an eager run"


def _follows_one_row(layer: _Layer, recorder: Recorder, probed: _Captured) -> Iterator[str]:
    """One bit of one input row changes the hashes of that row and of no other."""
    before = _step(recorder, probed.graph.replay)
    layer.x.view(torch.int16)[2, 17] ^= 1 << 6  # a high bit of the fraction
    after = _step(recorder, probed.graph.replay)
    changed = [row for row in range(NUM_REAL) if before[row] != after[row]]
    if changed != [2]:
        yield f"a bit of row 2 changed the hashes of rows {changed}, expected [2]"


def main() -> int:
    """Say what was found."""
    if not torch.cuda.is_available():
        sys.stderr.write("error: graph_probe: no CUDA device was found, expected one\n")
        return 2
    problems = check()
    for problem in problems:
        say(problem)
    if not problems:
        name = torch.cuda.get_device_name()
        say(f"row hashes follow a captured graph bit by bit, and the probes change none: {name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
