"""Host memory and time of loading a checkpoint.

    python -m deepinfer_plugin.model.bench_load [--gigabytes 2] [--shards 8] [--reader plugin|vllm] [--dir DIR]

Writes a synthetic checkpoint, loads it in a fresh process, and prints one JSON object. ``overhead_ratio`` is the peak
of resident memory above the process before loading and above the parameters, over the size of the largest shard.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.shards import read_header
from deepinfer_plugin.model.weights import ALONE, check_checkpoint, iterate_tensors, load_into, parameter_specs
from deepinfer_plugin.reference.synthetic import write_synthetic

READERS = ("plugin", "vllm")
_RESET_PEAK = "5"  # /proc/self/clear_refs: set the peak of resident memory back to its present value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """What one load took; bytes, seconds."""

    reader: str
    num_tensors: int
    num_shards: int
    largest_shard_bytes: int
    before_bytes: int
    parameter_bytes: int
    peak_bytes: int
    check_s: float
    load_s: float

    @property
    def overhead_ratio(self) -> float:
        """Peak above the process and the parameters, in units of the largest shard."""
        return (self.peak_bytes - self.before_bytes - self.parameter_bytes) / self.largest_shard_bytes


def make_parameters(config: ModelConfig, parallel: Parallel = ALONE) -> nn.Module:
    """A tree of plain modules with exactly this rank's parameters of the text model, not initialised."""
    root = nn.Module()
    for name, (shape, dtype) in parameter_specs(config, parallel=parallel).items():
        *path, leaf = name.split(".")
        module = root
        for word in path:
            if word not in module._modules:
                module.add_module(word, nn.Module())
            module = module.get_submodule(word)
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
    return root


def measure_load(model_dir: Path, reader: str) -> LoadFigures:
    """Check and load a checkpoint in this process, which should be a fresh one, and read its memory peak (Linux)."""
    config = ModelConfig.from_model_dir(model_dir)
    tensors = _vllm_tensors(model_dir) if reader == "vllm" else iterate_tensors(model_dir, config)
    shards = sorted(model_dir.glob("*.safetensors"))
    headers = [read_header(shard) for shard in shards]
    started = time.perf_counter()
    check_checkpoint(model_dir, config)
    checked = time.perf_counter()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_bytes("VmRSS")
    model = make_parameters(config)
    load_into(model, tensors, config)
    return LoadFigures(
        reader=reader,
        num_tensors=sum(map(len, headers)),
        num_shards=len(shards),
        largest_shard_bytes=max(shard.stat().st_size for shard in shards),
        before_bytes=before,
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        peak_bytes=_status_bytes("VmHWM"),
        check_s=checked - started,
        load_s=time.perf_counter() - checked,
    )


def measure_in_fresh_process(model_dir: Path, reader: str) -> LoadFigures:
    """``measure_load`` in a new process, whose memory no earlier work has touched."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_load, model_dir, reader).result()


def _vllm_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The iterator that vLLM hands to ``load_weights``; it maps the shards."""
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    files = [str(shard) for shard in sorted(model_dir.glob("*.safetensors"))]
    return iter(safetensors_weights_iterator(files, use_tqdm_on_load=False))


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None, f"/proc/self/status has no {field}"
    return int(match[1]) * 1024


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint, 10**9 bytes")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--reader", choices=READERS, default="plugin", help="who reads the shards")
    parser.add_argument("--dir", type=Path, default=None, help="where to make a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        written = write_synthetic(Path(folder), int(arguments.gigabytes * 1e9), arguments.shards)
        figures = measure_in_fresh_process(Path(folder), arguments.reader)
    print(
        json.dumps(
            asdict(figures) | {"overhead_ratio": figures.overhead_ratio, "total_bytes": written.total_bytes}, indent=1
        )
    )


if __name__ == "__main__":
    main()
