"""The CPU worker starts as any replica, on a host of one NUMA node, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("vllm_variables")


def test_a_replica_is_bound_to_no_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.cpu_resource_utils import get_visible_memory_node
    from vllm.v1.worker.cpu_worker import CPUWorker

    from deepinfer_plugin.worker.cpu_worker import DeepInferCpuWorker

    nodes = get_visible_memory_node()
    seen: list[list[int]] = []

    def started(worker: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        seen.append(get_visible_memory_node(vllm_config.parallel_config.assigned_physical_gpu_ids))

    monkeypatch.setattr(CPUWorker, "__init__", started)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(assigned_physical_gpu_ids=[max(nodes) + 1]))
    assert get_visible_memory_node(config.parallel_config.assigned_physical_gpu_ids) == []
    DeepInferCpuWorker(config, local_rank=0, rank=0, distributed_init_method="")
    assert seen == [nodes]
