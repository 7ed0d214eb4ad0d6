"""What vLLM's dispatcher finds for a step whose requests verify different numbers of drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.speculative import ragged_graphs

pytestmark = pytest.mark.usefixtures("vllm_variables")

ROWS_OF_A_REQUEST = 6
VARIABLE = "DEEPINFER_ENABLE_MTP_VARLEN"


def _manager(monkeypatch: pytest.MonkeyPatch, model_type: str = "deepseek_v41") -> Any:
    """A manager as the runner of an engine with five drafts makes it, with graphs that count as captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24, 48], max_cudagraph_capture_size=48
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    ragged_graphs.install()
    found = cudagraph_utils.ModelCudaGraphManager(
        config, None, CUDAGraphMode.FULL_DECODE_ONLY, ROWS_OF_A_REQUEST, varlen_decode=False
    )
    found._graphs_captured = True
    return found


def _rows(manager: Any, *rows: int) -> tuple[str, int]:
    """Mode and padded rows of a decode step with so many rows a request."""
    uniform = rows[0] if len(set(rows)) == 1 else None
    found = manager.dispatch(len(rows), sum(rows), uniform, 0, max_query_len=max(rows))
    return found.cg_mode.name, found.num_tokens


def test_without_the_schedule_only_steps_of_full_requests_have_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = _manager(monkeypatch)
    assert _rows(manager, 6, 6, 6) == ("FULL", 18)
    assert _rows(manager, 6, 2, 6) == ("NONE", 14)
    assert _rows(manager, 3, 3, 3) == ("NONE", 9)
    assert _rows(manager, 1, 1, 1) == ("NONE", 3)


def test_with_the_schedule_every_decode_step_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    manager = _manager(monkeypatch)
    assert _rows(manager, 6, 6, 6) == ("FULL", 24)
    assert _rows(manager, 6, 2, 6) == ("FULL", 16)
    assert _rows(manager, 3, 3, 3) == ("FULL", 16)
    assert _rows(manager, 1, 1, 1) == ("FULL", 4)
    assert _rows(manager, 7, 1) == ("NONE", 8)  # more than all drafts: a prompt


def test_a_step_with_a_prompt_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert _manager(monkeypatch).dispatch(2, 8, None, 0, max_query_len=None).cg_mode.name == "NONE"


def test_other_models_keep_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert _rows(_manager(monkeypatch, "qwen3"), 3, 3, 3) == ("NONE", 9)
