"""Index scores in plain PyTorch.

Rows of the result keep their bits because every product has one shape, [heads, head_dim] x [head_dim, 64 keys],
whatever the number of rows, of requests and of entries; the sum over heads is a chain of elementwise additions.
"""

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.kv_store import RecordFormat, gather_records, store_records

# Elements of the keys laid out for products at one time. Bounds memory and fits a CPU cache; changes no bit.
_KEY_ELEMENTS = 1 << 18


def make_inputs(
    lengths: list[int],
    num_heads: int,
    head_dim: int,
    fmt: RecordFormat,
    entries_per_block: int,
    generator: torch.Generator,
    device: str,
    rows_per_request: int = 3,
) -> dict[str, torch.Tensor]:
    """Requests of ``lengths`` entries; each has ``rows_per_request`` rows that see 0 ... ``lengths[i]`` entries.

    Queries and keys have few significant bits, as after quantisation; slots that hold no entry hold 0xFF bytes.
    """
    num_reqs, max_blocks = len(lengths), max(1, -(-max(lengths) // entries_per_block))
    req_idx = torch.arange(num_reqs, dtype=torch.int32).repeat_interleave(rows_per_request)
    num_visible = torch.cat([torch.linspace(0, n, rows_per_request).long() for n in lengths])
    num_visible[rows_per_request - 1 :: rows_per_request] = torch.tensor(lengths)
    block_table = torch.randperm(num_reqs * max_blocks, generator=generator).view(num_reqs, max_blocks)
    key_cache = torch.full((num_reqs * max_blocks, entries_per_block, fmt.record_bytes(head_dim)), 255).byte()
    for block_ids, length in zip(block_table, lengths, strict=True):
        entry = torch.arange(length)
        slots = block_ids[entry // entries_per_block] * entries_per_block + entry % entries_per_block
        store_records(key_cache, slots, torch.randn(length, head_dim, generator=generator), fmt)
    inputs = {
        "q": torch.randint(-6, 7, (len(req_idx), num_heads, head_dim), generator=generator) / 4,
        "weights": torch.randn(len(req_idx), num_heads, generator=generator) / 64,
        "key_cache": key_cache,
        "block_table": block_table.to(torch.int32),
        "req_idx": req_idx,
        "num_visible": num_visible,
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def indexer_logits_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_idx: torch.Tensor,
    num_visible: torch.Tensor,
    max_entries: int,
    *,
    fmt: RecordFormat,
    entries_per_block: int,
    round_bf16: bool,
) -> torch.Tensor:
    """``indexer_logits`` on checked arguments."""
    num_tokens, _, head_dim = q.shape
    key_tile = tiling.REFERENCE_KEY_TILE
    num_tiles = -(-max_entries // key_tile)
    logits = torch.empty((num_tokens, num_tiles * key_tile), dtype=torch.float32, device=q.device)
    rows_per_chunk = max(1, min(num_tokens, _KEY_ELEMENTS // (key_tile * head_dim)))
    tiles_per_chunk = max(1, _KEY_ELEMENTS // (rows_per_chunk * key_tile * head_dim))
    q = q.to(torch.float32)
    weights = weights.to(torch.bfloat16 if round_bf16 else torch.float32)
    # Keys are unpacked once per request, not once per row.
    reqs, req_of_row = torch.unique(req_idx.clamp(min=0), return_inverse=True)
    tables = block_table.index_select(0, reqs)
    for tile in range(0, num_tiles if num_tokens > 0 else 0, tiles_per_chunk):
        first, last = tile * key_tile, min(tile + tiles_per_chunk, num_tiles) * key_tile
        entries = torch.arange(first, last, device=q.device)
        keys = _keys(key_cache, tables, entries, entries_per_block, fmt, head_dim)
        keys = keys.view(len(reqs), -1, key_tile, head_dim)
        for row in range(0, num_tokens, rows_per_chunk):
            rows = slice(row, min(row + rows_per_chunk, num_tokens))
            # The rows of a lone prompt share one set of keys without a copy of it.
            row_keys = keys.index_select(0, req_of_row[rows]) if len(reqs) > 1 else keys
            logits[rows, first:last] = _scores(q[rows], weights[rows], row_keys, round_bf16)
    logits = logits[:, :max_entries]
    is_hidden = torch.arange(max_entries, device=q.device) >= num_visible.unsqueeze(1)
    return logits.masked_fill(is_hidden, -torch.inf)


def _keys(
    key_cache: torch.Tensor,
    tables: torch.Tensor,
    entries: torch.Tensor,
    entries_per_block: int,
    fmt: RecordFormat,
    head_dim: int,
) -> torch.Tensor:
    """Keys of the same ``entries`` of several requests, [num_reqs, num_entries, head_dim] fp32."""
    page = (entries // entries_per_block).clamp_(max=tables.shape[1] - 1)
    # Table entries past the end of a request may hold anything; their scores are masked later.
    blocks = tables.index_select(1, page).long().clamp_(0, key_cache.shape[0] - 1)
    slots = blocks * entries_per_block + entries % entries_per_block
    return gather_records(key_cache, slots, head_dim, fmt, torch.float32)


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, round_bf16: bool) -> torch.Tensor:
    """Scores of rows [R, Hi, Di] against keys [R or 1, tiles, 64, Di]: [R, tiles * 64] fp32."""
    num_rows, num_heads, head_dim = q.shape
    num_tiles, key_tile = keys.shape[1:3]
    # repeat always copies: BLAS may take another path on operands that do not start on 64 bytes.
    q = q.unsqueeze(1).repeat(1, num_tiles, 1, 1).view(num_rows * num_tiles, num_heads, head_dim)
    keys = keys.expand(num_rows, -1, -1, -1).reshape(num_rows * num_tiles, key_tile, head_dim)
    dots = torch.bmm(q, keys.transpose(1, 2))
    if round_bf16:
        dots = dots.to(torch.bfloat16)
    products = dots.view(num_rows, num_tiles, num_heads, key_tile).clamp_(min=0) * weights[:, None, :, None]
    # Starting from 0, as REF's sum does: a key that no head matches scores +0 even if every weight is negative.
    total = torch.zeros((num_rows, num_tiles, key_tile), dtype=torch.float32, device=q.device)
    for head in range(num_heads):
        total += products[:, :, head]
    if round_bf16:
        total = total.to(torch.bfloat16).to(torch.float32)
    return total.view(num_rows, num_tiles * key_tile)
