"""Which caches share a block table: as many windows as fit into a block of the growing caches."""

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def cache_groups(vllm_config: "VllmConfig", specs: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Split the caches into groups; all groups take blocks of one pool, as wide as the widest group.

    The growing caches (compressed entries, index keys) are one group, whose block sets the width of the pool. Other
    caches of equal specification are spread evenly over as few groups as that width allows. vLLM's own grouping gives
    each window a group, and so a whole block, where every kind of growing cache occurs equally often.

    Args:
        vllm_config: of the engine. Where its pipeline has several stages, a group of equal caches carries their one
            specification: vLLM would else place caches on a stage that has no layer of the group.
        specs: specification of every cache, by layer name, in the order of the layers.

    Returns:
        Groups that hold every cache once: the growing ones first, the others in the order of their first layer.
    """
    has_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    growing = {name: spec for name, spec in specs.items() if type(spec) is MLAAttentionSpec}
    width = sum(spec.page_size_bytes for spec in growing.values())
    groups = [_group(growing)] if growing else []
    others: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        if name not in growing:
            others.setdefault(spec, []).append(name)
    for spec, names in others.items():
        most = max(width // spec.page_size_bytes, 1)
        num_groups = -(-len(names) // most)
        shares = [names[i::num_groups] for i in range(num_groups)]
        groups += [KVCacheGroupSpec(each, spec) if has_stages else _group(dict.fromkeys(each, spec)) for each in shares]
    return groups


def _group(specs: dict[str, KVCacheSpec]) -> KVCacheGroupSpec:
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None, f"caches of one group need one kind of block: {specs}"
    return KVCacheGroupSpec(list(specs), uniform)
