"""vLLM's plan of the KV cache for a config.json, without weights: ``python -m ….planning MODEL_DIR OUT.json``.

The model is built on torch's meta device, so the released size fits anywhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer_plugin.platforms.detect import platform_class

PLANNED_BLOCKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCache:
    """One cache: what its specification says and where vLLM puts it.

    ``offset`` and ``block_stride`` are bytes in the pool that all groups share. ``is_prefix_cacheable``: whether its
    blocks are kept with their prefix, and every hit needs them.
    """

    name: str
    kind: str
    group: int
    block_size: int
    page_bytes: int
    offset: int
    block_stride: int
    is_prefix_cacheable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The plan for ``num_blocks`` blocks of one pool of ``pool_bytes``."""

    layout: str
    num_blocks: int
    pool_bytes: int
    caches: tuple[PlannedCache, ...]


def plan_cache(model_dir: Path, flags: Sequence[str] = ()) -> CachePlan:
    """Do what vLLM's engine does between building the model and allocating the cache."""
    import torch
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args([f"--model={model_dir}", "--load-format=dummy", "--max-model-len=4096", *flags])
    vllm_config = EngineArgs.from_cli_args(arguments).create_engine_config()
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        initialize_model(vllm_config)
    register_all_kvcache_specs(vllm_config)
    specs = get_kv_cache_spec(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    supported = [layout.name for layout in layers[min(specs)].get_attn_backend().supported_kv_cache_layouts()]
    layout = resolve_kv_cache_layout(vllm_config, [supported], list(specs.values()))
    groups = get_global_kv_cache_groups(vllm_config, [specs])
    bytes_of_one = _pool_bytes(vllm_config, groups)
    (config,) = get_kv_cache_configs(vllm_config, [specs], [PLANNED_BLOCKS * bytes_of_one], groups)
    group_of = {name: number for number, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    caches = [
        PlannedCache(
            name=name,
            kind=type(specs[name]).__name__,
            group=group_of[name],
            block_size=specs[name].block_size,
            page_bytes=specs[name].page_size_bytes,
            offset=tensor.offset + index * tensor.layer_stride,
            block_stride=tensor.block_stride,
            is_prefix_cacheable=specs[name].prefix_cacheable,
        )
        for tensor in config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    ]
    return CachePlan(
        layout=layout.name,
        num_blocks=config.num_blocks,
        pool_bytes=config.kv_cache_tensors[0].size,
        caches=tuple(caches),
    )


def _pool_bytes(vllm_config: object, groups: list[object]) -> int:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups

    probe = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    return int(probe.kv_cache_tensors[0].block_stride)


def main(model_dir: Path, out: Path) -> None:
    """Write the plan as JSON."""
    platform_class()  # before torch, Triton and vLLM are imported
    out.write_text(json.dumps(asdict(plan_cache(model_dir))), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
