"""``exact_inputs`` for attention, index scores and experts: several rounding points in a row."""

import torch

from deepinfer_kernels.exact_inputs import Case, Pair, integers, rounded
from deepinfer_kernels.indexer_logits import indexer_logits
from deepinfer_kernels.kv_store import RecordFormat, gather_records, store_records
from deepinfer_kernels.microscaling import pack_e2m1
from deepinfer_kernels.moe_experts import moe_experts
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant
from deepinfer_kernels.mxfp8_quant.reference import mxfp8_fake_quant_reference
from deepinfer_kernels.sparse_attention import sparse_attention

_HEADS, _SLOTS, _PAGE = 16, 192, 64
# How many of the listed vectors a row sees: every sum of weights, the sink's 1 included, is count + 1.
_COUNTS = (0, 1, 2, 6, 48, 63, 64, 100, 127)


def _attention_cache(generator: torch.Generator, head_dim: int, fmt: RecordFormat, is_large: bool) -> torch.Tensor:
    """Vectors whose first column is 1 and whose others are integers that the format holds.

    Large ones average above 256, where quotients that are odd integers are ties of bf16.
    """
    vectors = integers(generator, 6, _SLOTS, head_dim)
    vectors[vectors.abs() == 5] = 4.0
    vectors[:, 1::16] = 6.0  # the largest value of every group of 16: scales are 1 or a power of two
    if is_large:
        large = torch.randint(4, 8, vectors.shape, generator=generator) * 64.0
        vectors = torch.where(torch.rand(vectors.shape, generator=generator) < 0.9, large, vectors)
    vectors[:, 0] = 1.0
    cache = torch.zeros(_SLOTS // _PAGE, _PAGE, fmt.record_bytes(head_dim), dtype=torch.uint8)
    store_records(cache, torch.arange(_SLOTS), vectors, fmt)
    return cache


def _slots(generator: torch.Generator, length: int) -> torch.Tensor:
    """[rows, length] int64 slots: as many as ``_COUNTS`` says, in as far as the list holds them, then -1."""
    counts = torch.tensor(_COUNTS)[:, None].clamp(max=length)
    chosen = torch.randint(0, _SLOTS, (len(_COUNTS), length), generator=generator)
    return chosen.masked_fill(torch.arange(length) >= counts, -1)


def _attention(head_dim: int, has_entries: bool, window_format: RecordFormat, entry_format: RecordFormat) -> Case:
    def case(device: str, dtype: torch.dtype) -> Pair:
        generator = torch.Generator().manual_seed(31)
        window = _attention_cache(generator, head_dim, window_format, is_large=not has_entries)
        entries = _attention_cache(generator, head_dim, entry_format, is_large=False)
        window_slots, entry_slots = _slots(generator, 128), _slots(generator, 64)
        q = torch.zeros(len(_COUNTS), _HEADS, head_dim)
        q[:, :, 0] = 16.0  # every score is 16 * scale, so every weight is 1
        angles = torch.zeros(len(_COUNTS), 32)
        got = sparse_attention(
            q.to(device, dtype),
            window.to(device),
            window_slots.to(device),
            entries.to(device) if has_entries else None,
            entry_slots.to(device) if has_entries else None,
            torch.full((_HEADS,), 1.0, device=device),
            1 / 16,
            window_format=window_format,
            compressed_format=entry_format,
            round_p=dtype == torch.bfloat16,
            cos=(angles + 1).to(device),
            sin=angles.to(device),
        )
        values = gather_records(window, window_slots, head_dim, window_format, torch.float32).double().sum(1)
        count = (window_slots >= 0).sum(1)
        if has_entries:
            values += gather_records(entries, entry_slots, head_dim, entry_format, torch.float32).double().sum(1)
            count = count + (entry_slots >= 0).sum(1)
        # One IEEE division of exact numbers, one rounding.
        quotient = rounded(values, torch.float32) / (count + 1).float()[:, None]
        return got, quotient.to(dtype)[:, None].expand(-1, _HEADS, -1).contiguous()

    return case


def _index(round_bf16: bool) -> Case:
    def case(device: str, dtype: torch.dtype) -> Pair:
        generator = torch.Generator().manual_seed(32)
        num_rows, heads, head_dim, num_keys = 5, 32, 128, 128
        fmt = RecordFormat.MXFP4
        keys = integers(generator, 6, num_keys, head_dim)
        keys[keys.abs() == 5] = 6.0
        keys[:, ::32] = 6.0
        cache = torch.zeros(num_keys // _PAGE, _PAGE, fmt.record_bytes(head_dim), dtype=torch.uint8)
        store_records(cache, torch.arange(num_keys), keys, fmt)
        q = integers(generator, 12, num_rows, heads, head_dim) / 2
        weights = integers(generator, 15, num_rows, heads) / 16
        got = indexer_logits(
            q.to(device, dtype),
            weights.to(device, dtype),
            cache.to(device),
            torch.arange(num_keys // _PAGE, dtype=torch.int32, device=device)[None],
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.full((num_rows,), num_keys, device=device),
            num_keys,
            fmt=fmt,
            entries_per_block=_PAGE,
            round_bf16=round_bf16,
        )
        between = torch.bfloat16 if round_bf16 else torch.float32
        dots = rounded(torch.einsum("thd,kd->thk", q.double(), keys.double()), between).clamp(min=0)
        products = rounded(dots.double() * weights[:, :, None].double(), between)
        return got, rounded(products.double().sum(1), between).float()

    return case


def _expert_weights(generator: torch.Generator, *shape: int, is_positive: bool) -> Pair:
    """Packed e2m1 values [..., K] with the scale 1/2: random ones, or only 0.5, 1 and 2."""
    values = torch.tensor([0.5, 1.0, 2.0]) if is_positive else torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    weight = values[torch.randint(0, len(values), shape, generator=generator)]
    return pack_e2m1(weight), torch.full((*shape[:-1], shape[-1] // 32), 126, dtype=torch.uint8)


def _experts(num_tokens: int) -> Case:
    def case(device: str, dtype: torch.dtype) -> Pair:
        generator = torch.Generator().manual_seed(33)
        hidden, inner, num_experts, top_k = 64, 128, 4, 2
        gate, gate_scale = _expert_weights(generator, num_experts, inner, hidden, is_positive=True)
        up, up_scale = _expert_weights(generator, num_experts, inner, hidden, is_positive=False)
        w2, w2_scale = _expert_weights(generator, num_experts, hidden, inner, is_positive=False)
        x = integers(generator, 3, num_tokens, hidden).abs() + 1  # gates far above 17: there silu is the identity
        first = torch.randint(0, num_experts - 1, (num_tokens, 1), generator=generator)
        chosen = torch.cat((first, first + 1), dim=1)
        weights = torch.randint(1, 3, (num_tokens, top_k), generator=generator) / 2
        w13, w13_scale = torch.cat((gate, up), dim=1), torch.cat((gate_scale, up_scale), dim=1)
        tensors = (chosen.int(), weights, w13, w13_scale, w2, w2_scale)
        arguments = (x.to(device, dtype), *(tensor.to(device) for tensor in tensors))
        got = moe_experts(*arguments, limit=0.0, quantize_input=True)

        dense13 = mxfp4_dequant(w13, w13_scale, torch.float32).double()[chosen]  # [T, k, 2 * inner, hidden]
        dense2 = mxfp4_dequant(w2, w2_scale, torch.float32).double()[chosen]
        rows = mxfp8_fake_quant_reference(x).double()
        both = rounded(torch.einsum("td,tknd->tkn", rows, dense13), dtype).double()
        h = rounded(both[..., :inner] * both[..., inner:] * weights[:, :, None].double(), dtype)
        h = mxfp8_fake_quant_reference(h.float()).double()
        return got, rounded(torch.einsum("tkn,tkdn->tkd", h, dense2), dtype)

    return case


_NATIVE = (RecordFormat.MXFP8, RecordFormat.NVFP4)
PLAIN_PATHS: dict[str, Case] = {
    "attention, mixed lists": _attention(96, True, *_NATIVE),
    "attention, window only": _attention(96, False, *_NATIVE),
}
PACKED_PATHS: dict[str, Case] = {
    "attention, 64 columns": _attention(64, True, *_NATIVE),
    "attention, 512 columns": _attention(512, True, *_NATIVE),
    "attention, 512 columns, window only": _attention(512, False, *_NATIVE),
    "index scores, fp32": _index(False),
    "index scores, bf16": _index(True),
    "experts, few tokens": _experts(9),
    "experts, many tokens": _experts(400),
}
