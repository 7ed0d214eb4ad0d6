"""Sizes of the benches: the model's own, and small ones at which tests and the sanitizer run the same cases."""

from dataclasses import dataclass

import torch

from deepinfer_kernels.kv_store import RecordFormat, store_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Widths under the names of config.json, and the numbers of rows.

    Attributes:
        rows: few and many rows of an operation on hidden states.
        head_rows: rows that reach the head and the sampler: sampled ones only.
        entries: compressed entries of a request that the indexer scores.
        narrow_entries: (rows, entries of each, width of their buffer) of a captured graph.
        experts: (number of experts, tokens) of the routed experts.
    """

    hidden_size: int
    q_lora_rank: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    o_groups: int
    o_lora_rank: int
    intermediate_size: int
    num_experts: int
    top_k: int
    vocab_size: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_blocks: int
    sliding_window: int
    num_streams: int
    engram_rows: int
    engram_columns: int
    engram_width: int
    rows: tuple[int, ...]
    head_rows: tuple[int, ...]
    entries: tuple[tuple[int, int, int], ...]
    narrow_entries: tuple[tuple[int, int, int], ...]
    experts: tuple[tuple[int, tuple[int, ...]], ...]


# DeepSeek-V4.1-Flash. entries: (requests, rows of each, entries of each). Experts: all of a layer, and a twelfth of
# them: one of twelve ranks, or the slice of the peer comparison.
REAL = Sizes(
    hidden_size=5120,
    q_lora_rank=1280,
    num_heads=64,
    head_dim=512,
    rotary_dim=64,
    o_groups=8,
    o_lora_rank=1024,
    intermediate_size=2304,
    num_experts=384,
    top_k=6,
    vocab_size=129280,
    index_heads=32,
    index_dim=128,
    index_topk=512,
    candidate_blocks=2048,
    sliding_window=128,
    num_streams=4,
    engram_rows=1 << 20,
    engram_columns=24,
    engram_width=256,
    rows=(1, 64, 4096, 16, 256),
    head_rows=(1, 64, 256, 16),
    entries=((64, 1, 65536), (1, 1, 65536), (1, 4096, 4096), (64, 1, 4096), (1, 1, 1 << 20)),
    narrow_entries=((64, 2048, 1 << 18), (1, 2048, 1 << 18), (64, 65536, 1 << 18)),
    experts=((32, (64, 4096, 1, 16, 256, 1024, 8192)), (384, (64, 1, 8, 256, 4096))),
)

# Small, but past every edge that chooses another kernel: parts of K, the wide product, lists in chunks, full tiles.
TINY = Sizes(
    hidden_size=256,
    q_lora_rank=128,
    num_heads=16,
    head_dim=512,
    rotary_dim=64,
    o_groups=2,
    o_lora_rank=64,
    intermediate_size=128,
    num_experts=8,
    top_k=2,
    vocab_size=1200,
    index_heads=16,
    index_dim=128,
    index_topk=8,
    candidate_blocks=4,
    sliding_window=128,
    num_streams=4,
    engram_rows=1 << 15,
    engram_columns=24,
    engram_width=256,
    rows=(1, 16, 1040),
    head_rows=(1, 5),
    entries=((2, 1, 64), (1, 3, 128), (1, 1, 8256)),
    narrow_entries=((2, 64, 8256),),
    experts=((8, (3, 600)),),
)


def normal(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Standard normal values."""
    return torch.randn(shape, device=device).to(dtype)


def bf16(device: str, *shape: int) -> torch.Tensor:
    """Standard normal values in bf16."""
    return normal(device, torch.bfloat16, *shape)


def integers(device: str, low: int, high: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Integers from ``low`` to ``high`` - 1."""
    return torch.randint(low, high, shape, device=device, dtype=dtype)


def mxfp8_weight(device: str, num_out: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random MXFP8 weight [num_out, depth] and its scales, one for 32 x 32 codes."""
    scale = integers(device, 116, 124, torch.uint8, num_out // 32, depth // 32)
    return bf16(device, num_out, depth).to(torch.float8_e4m3fn), scale


def record_cache(device: str, num_records: int, block_size: int, width: int, fmt: RecordFormat) -> torch.Tensor:
    """A paged cache [blocks, block_size, record_bytes] of random vectors, at least ``num_records`` of them."""
    num_blocks = -(-num_records // block_size)
    cache = torch.empty((num_blocks, block_size, fmt.record_bytes(width)), dtype=torch.uint8, device=device)
    slots = torch.arange(num_blocks * block_size, device=device)
    for chunk in torch.split(slots, 1 << 17):
        store_records(cache, chunk, torch.randn(len(chunk), width, device=device), fmt)
    return cache
