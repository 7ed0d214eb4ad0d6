"""Row hashes inside a captured CUDA graph; also a program, for machines without pytest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer_determinism import graph_probe
from deepinfer_determinism.row_hashes import Recorder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
def test_hashes_follow_a_captured_graph_and_change_no_bit() -> None:
    assert graph_probe.check() == []


@pytest.mark.gpu
@needs_gpu
def test_a_hash_taken_outside_the_graph_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the hash is computed when Python runs and not when the graph does."""
    original: Callable[..., None] = Recorder.write

    def write(self: Recorder, operation: str, result: object) -> None:
        if not torch.cuda.is_current_stream_capturing():
            original(self, operation, result)

    monkeypatch.setattr(Recorder, "write", write)
    assert any("are not those of an eager run" in problem for problem in graph_probe.check())


def test_without_a_device_the_program_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert graph_probe.main() == 2
    assert "no CUDA device was found" in capsys.readouterr().err
