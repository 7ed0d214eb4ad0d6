"""Logits that a decode graph computes along with its rows, so that a step launches nothing for them.

vLLM asks for logits behind the graph, of the rows that it picks by index. In a step of decoding or verification these
are all rows of the step in their order, and the graph has their logits already.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_ROWS = 128
"""Largest graph that keeps its logits: behind more rows a launch costs nothing, and 128 take 63 MiB as released."""


class GraphLogits:
    """One buffer for all graphs, which replay one at a time on one stream; behind each, the sampler reads it."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        """Memory for graphs of up to ``max_rows`` rows, on the default device; 0: no graph keeps its logits."""
        self._logits = torch.empty((max_rows, vocab_size), dtype=torch.float32)
        self._captured: set[int] = set()  # rows of the graphs that keep their logits
        self._ready = 0

    @classmethod
    def of_engine(cls, vllm_config: "VllmConfig", vocab_size: int) -> "GraphLogits":
        """For the graphs that an engine will capture."""
        compilation = vllm_config.compilation_config
        mode, largest = compilation.cudagraph_mode, compilation.max_cudagraph_capture_size
        has_graphs = mode is not None and mode.has_full_cudagraphs()
        return cls(min(largest or 0, MAX_ROWS) if has_graphs else 0, vocab_size)

    def capture(self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Within a capture: add the logits to the graph, if their rows fit.

        Args:
            hidden_states: [num_rows, hidden_size], after the final norm.
            head: gives [num_rows, vocab_size] fp32.
        """
        num_rows = hidden_states.shape[0]
        if 0 < num_rows <= self._logits.shape[0] and torch.cuda.is_current_stream_capturing():
            self._logits[:num_rows].copy_(head(hidden_states))
            self._captured.add(num_rows)

    def expect(self, num_rows: int, num_logits: int, graph_rows: int | None) -> None:
        """Before a step: note whether its graph gives the logits that vLLM will ask for.

        Args:
            num_rows: of the step, without those that fill up the graph.
            num_logits: rows whose logits are asked for, ascending and none twice.
            graph_rows: of the graph that computes the step, which may be many more than the step has: other replicas
                have a say in it. None: no graph does.
        """
        self._ready = num_rows if graph_rows in self._captured and num_logits == num_rows else 0

    def take(self, num_rows: int) -> torch.Tensor | None:
        """[num_rows, vocab_size] fp32 of the last step, once; None: they are to be computed."""
        found = self._logits[:num_rows] if num_rows == self._ready > 0 else None
        self._ready = 0
        return found
