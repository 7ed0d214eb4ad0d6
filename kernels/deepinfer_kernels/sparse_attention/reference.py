"""Attention over listed cache slots in plain PyTorch.

Rows keep their bits because every product has one shape per row, [heads, head_dim] x [head_dim, 64 slots] and back;
the list is cut into blocks of 64 by slot of the list, so -1 at its end changes nothing.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from deepinfer_kernels import tiling
from deepinfer_kernels.kv_store import RecordFormat, gather_records, store_records
from deepinfer_kernels.rope import rope

_FIRST_MAXIMUM = -1e30  # REF-K: finite, so that a block without valid slots gives exp(-inf) and no NaN
# Elements of the gathered keys at one time. Bounds memory and fits a CPU cache; changes no bit.
_KEY_ELEMENTS = 1 << 19
_UNIQUE_FROM = 1024  # slots from which it pays to unpack every record once; rows of a prompt share most of theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotList:
    """One part of the list: slots [num_tokens, length] of a cache."""

    kv_cache: torch.Tensor
    slots: torch.Tensor
    fmt: RecordFormat


def make_inputs(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    list_lengths: tuple[int, int],
    formats: tuple[RecordFormat, RecordFormat],
    generator: torch.Generator,
    device: str,
) -> dict[str, torch.Tensor]:
    """Queries, sinks and two caches with random slot lists; row t lists valid slots first, then -1.

    Row 0 lists nothing. Slots of the caches that no row lists hold 0xFF bytes.
    """
    num_blocks, block_size = 24, 8
    inputs = {
        "q": torch.randn(num_tokens, num_heads, head_dim, generator=generator),
        "sink": torch.randn(num_heads, generator=generator),
    }
    for name, length, fmt in zip(("window", "compressed"), list_lengths, formats, strict=True):
        num_slots = num_blocks * block_size
        kv_cache = torch.full((num_blocks, block_size, fmt.record_bytes(head_dim)), 255).byte()
        listed = torch.randperm(num_slots, generator=generator)[: num_slots // 2]
        store_records(kv_cache, listed, torch.randn(len(listed), head_dim, generator=generator), fmt)
        slots = listed[torch.randint(0, len(listed), (num_tokens, length), generator=generator)]
        num_valid = torch.randint(1, length + 1, (num_tokens, 1), generator=generator)
        num_valid[:1] = 0
        inputs[f"{name}_cache"] = kv_cache
        inputs[f"{name}_slots"] = slots.masked_fill(torch.arange(length) >= num_valid, -1)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def sparse_attention_reference(
    q: torch.Tensor,
    parts: list[SlotList],
    sink: torch.Tensor,
    scale: float,
    *,
    round_p: bool,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """``sparse_attention`` on checked arguments; the list is the parts one after the other."""
    num_tokens, _, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows_per_chunk = max(1, _KEY_ELEMENTS // (tiling.REFERENCE_KEY_TILE * head_dim))
    for row in range(0, num_tokens, rows_per_chunk):
        rows = slice(row, min(row + rows_per_chunk, num_tokens))
        # Always a fresh copy: BLAS may take another path on operands that do not start on 64 bytes.
        q_rows = q[rows].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        out[rows] = _attend_in_tiles(q_rows, parts, rows, sink, scale, round_p)
    if cos is None or sin is None:
        return out
    return rope(out, cos, sin, inverse=True)


def _attend_in_tiles(
    q: torch.Tensor, parts: list[SlotList], rows: slice, sink: torch.Tensor, scale: float, round_p: bool
) -> torch.Tensor:
    """Attention of a few rows [R, H, D] fp32, a tile of heads at a time: BLAS sums by the number of heads."""
    tile, num_heads = tiling.REFERENCE_HEAD_TILE, q.shape[1]
    missing = -num_heads % tile
    q, sink = pad(q, (0, 0, 0, missing)), pad(sink, (0, missing))
    attended = [
        _attend(q[:, start : start + tile].contiguous(), parts, rows, sink[start : start + tile], scale, round_p)
        for start in range(0, num_heads, tile)
    ]
    return torch.cat(attended, dim=1)[:, :num_heads]


def _attend(
    q: torch.Tensor, parts: list[SlotList], rows: slice, sink: torch.Tensor, scale: float, round_p: bool
) -> torch.Tensor:
    """Attention of a few rows and one tile of heads, [R, H, D] fp32, not yet rounded."""
    num_rows, num_heads, _ = q.shape
    maximum = q.new_full((num_rows, num_heads, 1), _FIRST_MAXIMUM)
    denominator = torch.zeros_like(maximum)
    total = torch.zeros_like(q)
    list_length = sum(part.slots.shape[1] for part in parts)
    for start in range(0, list_length, tiling.REFERENCE_KEY_TILE):
        keys, is_none = _block(parts, rows, start, q)
        scores = torch.bmm(q, keys.transpose(1, 2)).mul_(scale).masked_fill_(is_none.unsqueeze(1), -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(dim=2, keepdim=True))
        p = scores.sub_(new_maximum).exp_()
        rescale = (maximum - new_maximum).exp_()
        denominator = denominator * rescale + p.sum(dim=2, keepdim=True)
        if round_p:
            p = p.to(torch.bfloat16).to(torch.float32)
        total = total * rescale + torch.bmm(p, keys)
        maximum = new_maximum
    # A row without valid slots still has the first maximum: the sink term is inf and the result 0.
    return total / (denominator + (sink.view(1, -1, 1) - maximum).exp_())


def _block(parts: list[SlotList], rows: slice, start: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [R, 64, D] fp32 of list slots ``start`` ... ``start + 63``, and which of them hold none [R, 64]."""
    num_rows, _, head_dim = q.shape
    tile = tiling.REFERENCE_KEY_TILE
    keys = q.new_zeros((num_rows, tile, head_dim))
    is_none = torch.ones((num_rows, tile), dtype=torch.bool, device=q.device)
    part_start = 0
    for part in parts:
        length = part.slots.shape[1]
        low, high = max(start - part_start, 0), min(start + tile - part_start, length)
        if low < high:
            slots = part.slots[rows, low:high]
            place = slice(part_start + low - start, part_start + high - start)
            keys[:, place] = _gather(part, slots, head_dim)
            is_none[:, place] = slots < 0
        part_start += length
    return keys, is_none


def _gather(part: SlotList, slots: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Vectors [R, n, D] fp32 of slots [R, n]; zeros where there is none."""
    if slots.numel() < _UNIQUE_FROM:
        return gather_records(part.kv_cache, slots, head_dim, part.fmt, torch.float32)
    different, place = torch.unique(slots, return_inverse=True)
    vectors = gather_records(part.kv_cache, different, head_dim, part.fmt, torch.float32)
    return vectors.index_select(0, place.view(-1)).view(*slots.shape, head_dim)
