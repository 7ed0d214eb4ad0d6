"""Logits of a graph stand for those of the rows that vLLM asks for, once, and only where they are all rows."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from deepinfer_plugin.model.graph_logits import MAX_ROWS, GraphLogits

ROWS = torch.arange(12.0).view(4, 3)


def double(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows, rows), dim=1)


def captured(rows: torch.Tensor = ROWS, *, max_rows: int = 4) -> GraphLogits:
    logits = GraphLogits(max_rows, 6)
    logits._logits.fill_(-1.0)
    with patch("torch.cuda.is_current_stream_capturing", lambda: True):
        logits.capture(rows, double)
    return logits


def test_the_logits_of_a_graph_are_taken_once() -> None:
    logits = captured()
    logits.expect(3, 3, 4)  # the fourth row fills up the graph
    found = logits.take(3)
    assert found is not None
    assert found.tolist() == double(ROWS[:3]).tolist()
    assert logits.take(3) is None, "prompt scores ask for other rows behind the sampler"


@pytest.mark.parametrize(
    ("num_rows", "num_logits", "graph_rows"),
    [(4, 3, 4), (4, 4, None), (5, 5, 5), (4, 4, 8), (1, 1, 3), (0, 0, 4)],
    ids=["a prompt row", "eager", "more than fit", "few rows in a large graph", "a graph not captured", "no row"],
)
def test_other_steps_compute_theirs(num_rows: int, num_logits: int, graph_rows: int | None) -> None:
    logits = captured()
    logits.expect(4, 4, 4)
    logits.expect(num_rows, num_logits, graph_rows)
    assert logits.take(num_logits) is None


def test_a_step_of_few_rows_in_a_graph_that_keeps_none_computes_its_own() -> None:
    """126 rows of 21 requests with 5 drafts run in a graph of 132, which does not fit; one of 64 did before."""
    logits = GraphLogits(128, 6)
    with patch("torch.cuda.is_current_stream_capturing", lambda: True):
        for rows in (132, 64):
            logits.capture(torch.zeros(rows, 3), double)
    logits.expect(126, 126, 132)
    assert logits.take(126) is None
    logits.expect(10, 10, 132)
    assert logits.take(10) is None
    logits.expect(10, 10, 64)
    assert logits.take(10) is not None


def test_rows_of_another_number_are_computed() -> None:
    logits = captured()
    logits.expect(4, 4, 4)
    assert logits.take(2) is None


def test_a_graph_of_more_rows_and_eager_steps_keep_none() -> None:
    assert (captured(ROWS, max_rows=2)._logits == -1.0).all()
    logits = GraphLogits(4, 6)
    with patch("torch.cuda.is_current_stream_capturing", lambda: False):
        logits.capture(ROWS, lambda rows: pytest.fail("an eager step computes logits twice"))


@pytest.mark.parametrize(
    ("mode", "largest", "rows"),
    [
        (CUDAGraphMode.FULL_DECODE_ONLY, 64, 64),
        (CUDAGraphMode.FULL_DECODE_ONLY, 512, MAX_ROWS),
        (CUDAGraphMode.NONE, 512, 0),
        (CUDAGraphMode.NONE, None, 0),
    ],
)
def test_memory_is_taken_for_graphs_only(mode: CUDAGraphMode, largest: int | None, rows: int) -> None:
    compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=largest)
    logits = GraphLogits.of_engine(SimpleNamespace(compilation_config=compilation), 6)
    assert logits._logits.shape == (rows, 6)
