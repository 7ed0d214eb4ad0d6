"""Attention back end of our caches: it addresses them; the arithmetic is in the kernels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMetadata(AttentionMetadata):
    """Where the rows of one step find and put the records of one cache.

    Attributes:
        query_start_loc: [num_reqs + 1] int32, first row of each request.
        seq_lens: [num_reqs] int32, tokens of the request once this step is done.
        block_table: [num_reqs, max_num_blocks] int32.
        slot_mapping: [num_tokens] int64 token slots, -1: do not write. Meaningless for a pair ring.
        block_size: tokens in a block.
        max_seq_len: upper bound of ``seq_lens``, known on the host.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    max_seq_len: int


class CacheMetadataBuilder(AttentionMetadataBuilder[CacheMetadata]):
    """Collects references to the runner's buffers; plans nothing from host-side lengths.

    A full CUDA graph can therefore replay any batch: what follows from the buffers is computed inside the graph.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: "KVCacheSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **extra: Any,
    ) -> CacheMetadata:
        del common_prefix_len, fast_build, extra
        return CacheMetadata(
            query_start_loc=common_attn_metadata.query_start_loc,
            seq_lens=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
            slot_mapping=common_attn_metadata.slot_mapping,
            block_size=self.kv_cache_spec.block_size,
            max_seq_len=common_attn_metadata.max_seq_len,
        )


class DeepInferCacheBackend(AttentionBackend):
    """One back end for all four caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "DEEPINFER_V41"

    @staticmethod
    def get_impl_cls() -> NoReturn:
        raise NotImplementedError("DEEPINFER_V41 has no separate implementation class: its layers call the kernels")

    @staticmethod
    def get_builder_cls() -> type[CacheMetadataBuilder]:
        return CacheMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block outermost: caches of different record size then share one pool of blocks without padding."""
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Every operation behind these caches keeps the bits of a row in any batch; its tests show it."""
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return False
