"""Without a GPU: kernels of attention, index and the elementwise family compile for SM90 and SM100."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.compiling import compile_launch, launches_of
from deepinfer_kernels.dense_attention.triton_kernel import dense_attention_triton
from deepinfer_kernels.engram_gate.triton_kernel import engram_gate_triton
from deepinfer_kernels.engram_hash.triton_kernel import engram_rows_triton
from deepinfer_kernels.engram_lookup.triton_kernel import engram_lookup_triton
from deepinfer_kernels.hc_collapse.triton_kernel import hc_collapse_triton
from deepinfer_kernels.hc_mix.triton_kernel import hc_mix_triton
from deepinfer_kernels.hc_post.triton_kernel import hc_post_triton
from deepinfer_kernels.hc_sinkhorn.triton_kernel import hc_sinkhorn_triton
from deepinfer_kernels.indexer_logits.triton_kernel import indexer_logits_triton
from deepinfer_kernels.indexer_logits.triton_kernel_fp32 import indexer_logits_fp32_triton
from deepinfer_kernels.indexer_topk.triton_candidates import candidate_blocks_triton, mask_to_candidates_triton
from deepinfer_kernels.indexer_topk.triton_kernel import topk_indices_triton
from deepinfer_kernels.kv_compress.triton_kernel import compress_pairs_triton
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.kv_store.triton_kernel import gather_records_triton, store_records_triton
from deepinfer_kernels.log_softmax.triton_kernel import (
    log_softmax_triton,
    log_sum_exp_triton,
    token_log_softmax_triton,
)
from deepinfer_kernels.lookback_ids.triton_kernel import lookback_ids_triton
from deepinfer_kernels.restrict_logits.rows_kernel import restrict_rows_triton
from deepinfer_kernels.restrict_logits.triton_kernel import restrict_few_rows_triton
from deepinfer_kernels.rms_norm.triton_kernel import rms_norm_triton
from deepinfer_kernels.rope.triton_kernel import rope_triton
from deepinfer_kernels.sample_tokens.top_tokens_kernel import top_tokens_triton
from deepinfer_kernels.sample_tokens.triton_kernel import sample_tokens_triton
from deepinfer_kernels.sampling_noise.triton_kernel import gumbel_noise_triton, random_words_triton
from deepinfer_kernels.sparse_attention.hopper_kernel import sparse_attention_hopper
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.sparse_attention.triton_kernel import sparse_attention_triton
from deepinfer_kernels.sparse_attention.triton_kernel_fp32 import sparse_attention_fp32_triton
from deepinfer_kernels.sum_smaller_probs.triton_kernel import sum_smaller_probs_triton
from deepinfer_kernels.swa_indices.triton_kernel import entry_slots_triton, window_slots_triton

ROWS, WIDTH, STREAMS, HEADS, HEAD_DIM, VOCAB = 3, 5120, 4, 64, 512, 129280
INDEX_HEADS, INDEX_DIM, PAGE = 32, 128, 64


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _fp32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _int64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _cache(width: int, fmt: RecordFormat) -> torch.Tensor:
    return torch.zeros((4, PAGE, fmt.record_bytes(width)), dtype=torch.uint8)


def _store_and_gather(width: int, fmt: RecordFormat) -> None:
    cache, slots = _cache(width, fmt), _int64(ROWS)
    store_records_triton(cache, slots, _bf16(ROWS, width), fmt)
    gather_records_triton(cache, slots, width, fmt, torch.bfloat16)


def _lists(*formats: RecordFormat) -> list[SlotList]:
    lengths = (128, 512)
    return [
        SlotList(kv_cache=_cache(HEAD_DIM, fmt), slots=_int64(ROWS, length), fmt=fmt)
        for fmt, length in zip(formats, lengths, strict=False)
    ]


def _attend(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, formats: list[RecordFormat], **options: object
) -> None:
    angles = _fp32(ROWS, 32)
    attend(q, _lists(*formats), _fp32(HEADS), HEAD_DIM**-0.5, cos=angles, sin=angles, **options)


def _score(fmt: RecordFormat, round_bf16: bool, rows: int | None) -> None:
    cache, table = _cache(INDEX_DIM, fmt), _int32(ROWS, 9)
    rest = (cache, table, _int32(ROWS), _int64(ROWS), 300)
    if rows is None:
        q, weights = _fp32(ROWS, INDEX_HEADS, INDEX_DIM), _fp32(ROWS, INDEX_HEADS)
        indexer_logits_fp32_triton(q, weights, *rest, fmt=fmt, round_bf16=round_bf16)
    else:
        q, weights = _bf16(ROWS, INDEX_HEADS, INDEX_DIM), _bf16(ROWS, INDEX_HEADS)
        indexer_logits_triton(q, weights, *rest, round_bf16=round_bf16, rows=rows)


def _select(num_entries: int) -> None:
    scores, num_visible = _fp32(ROWS, num_entries), _int64(ROWS)
    blocks = candidate_blocks_triton(scores, num_visible, 2048, 8)
    mask_to_candidates_triton(scores, blocks, 8)
    topk_indices_triton(scores, 512)
    topk_indices_triton(scores, 512, num_visible)


def _gate() -> None:
    streams, weight = _bf16(ROWS, STREAMS, WIDTH), _bf16(STREAMS, WIDTH)
    is_image = torch.zeros(ROWS, dtype=torch.bool)
    engram_gate_triton(streams, streams, _bf16(ROWS, WIDTH), weight, weight, 1e-20, is_image)


def _engram() -> None:
    constants = _int64(24)
    rows = engram_rows_triton(_int64(ROWS, 4), _int64(4), constants, constants)
    table = torch.zeros((100, 256), dtype=torch.float8_e4m3fn)
    engram_lookup_triton(table, torch.zeros((100, 8), dtype=torch.uint8), rows, torch.bfloat16)


def _compress() -> None:
    rows, state = _fp32(ROWS, 512), _fp32(4, 8, 1024)
    compress_pairs_triton(rows, rows, _int64(ROWS), _int32(ROWS), state, _int32(ROWS), out_dtype=torch.bfloat16)


def _slots() -> None:
    table = _int32(ROWS, 9)
    window_slots_triton(_int64(ROWS), _int32(ROWS), table, PAGE, 128, _int64(ROWS))
    entry_slots_triton(_int32(ROWS, 512), _int32(ROWS), table, PAGE)


def _lookback() -> None:
    history, out = _int32(4, 1 << 20), _int64(ROWS, 3)
    lookback_ids_triton(_int32(ROWS), _int64(ROWS), _int32(ROWS + 1), _int64(ROWS), history, out)


def _sampler() -> None:
    logits, limits = _fp32(ROWS, VOCAB), _fp32(ROWS)
    numbers = _int64(ROWS), _int64(ROWS), _int64(ROWS)
    random_words_triton(*numbers, VOCAB)
    gumbel_noise_triton(*numbers, VOCAB)
    sample_tokens_triton(logits, limits, *numbers)
    restrict_few_rows_triton(logits, _int32(ROWS), limits, limits)
    restrict_rows_triton(logits, _int32(ROWS), limits, limits)
    sum_smaller_probs_triton(logits, numbers[0])
    top_tokens_triton(logits, 20)
    top_tokens_triton(logits, 128)


def _log_softmax() -> None:
    logits = _fp32(ROWS, VOCAB)
    log_softmax_triton(logits)
    token_log_softmax_triton(logits, _int64(ROWS, 2))
    log_sum_exp_triton(logits)


def _image_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv = torch.empty((1521, 3, 16, 64), dtype=dtype)
    return qkv[:, 0], qkv[:, 1], qkv[:, 2]


NATIVE = [RecordFormat.MXFP8, RecordFormat.NVFP4]
CALLS: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: rms_norm_triton(_bf16(ROWS, WIDTH), _bf16(WIDTH), 1e-20),
    "hc_collapse": lambda: hc_collapse_triton(_bf16(ROWS, STREAMS, WIDTH), _fp32(ROWS, STREAMS)),
    "hc_post": lambda: hc_post_triton(
        _bf16(ROWS, WIDTH), _bf16(ROWS, STREAMS, WIDTH), _fp32(ROWS, STREAMS), _fp32(ROWS, STREAMS, STREAMS)
    ),
    "hc_sinkhorn": lambda: hc_sinkhorn_triton(_fp32(ROWS, 24), _fp32(3), _fp32(24), STREAMS, 20, 1e-6),
    "hc_mix fp32": lambda: hc_mix_triton(_fp32(ROWS, STREAMS, WIDTH), _fp32(24, STREAMS * WIDTH), 1e-20),
    **{
        f"hc_mix {tile[0]} rows": partial(
            hc_mix_triton, _bf16(ROWS, STREAMS, WIDTH), _fp32(24, STREAMS * WIDTH), 1e-20, tile
        )
        for _, tile in tiling.HC_MIX_TILES
    },
    "rope": lambda: rope_triton(_bf16(ROWS, HEADS, HEAD_DIM), _fp32(ROWS, 32), _fp32(ROWS, 32), False),
    "engram": _engram,
    "engram_gate": _gate,
    "swa_indices": _slots,
    "lookback_ids": _lookback,
    "kv_compress": _compress,
    "log_softmax": _log_softmax,
    "sampler": _sampler,
    "store mxfp8": partial(_store_and_gather, HEAD_DIM, RecordFormat.MXFP8),
    "store nvfp4": partial(_store_and_gather, HEAD_DIM, RecordFormat.NVFP4),
    "store mxfp4": partial(_store_and_gather, INDEX_DIM, RecordFormat.MXFP4),
    "store fp32": partial(_store_and_gather, HEAD_DIM, RecordFormat.FP32),
    "select short rows": partial(_select, tiling.TOPK_CHUNK),
    "select long rows": partial(_select, tiling.TOPK_CHUNK + 1),
    "score decode": partial(_score, RecordFormat.MXFP4, True, 1),
    "score prefill": partial(_score, RecordFormat.MXFP4, True, 8),
    "score fp32": partial(_score, RecordFormat.FP32, False, None),
    "dense attention bf16": lambda: dense_attention_triton(*_image_rows(torch.bfloat16), 64**-0.5),
    "dense attention fp32": lambda: dense_attention_triton(*_image_rows(torch.float32), 64**-0.5),
    "attention portable": partial(_attend, sparse_attention_triton, _bf16(ROWS, HEADS, HEAD_DIM), NATIVE),
    "attention fp32": partial(
        _attend, sparse_attention_fp32_triton, _fp32(ROWS, HEADS, HEAD_DIM), NATIVE, round_p=False
    ),
}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_kernels_compile_for_the_card(name: str, capability: int) -> None:
    launches = launches_of(CALLS[name])
    assert launches
    for launch in launches:
        assert compile_launch(launch, capability).asm["cubin"], launch.name


@pytest.mark.parametrize("capability", [90, 100])
def test_the_sampler_fuses_and_approximates_nothing(capability: int) -> None:
    launches = launches_of(_sampler)
    assert len(launches) == 14
    for launch in launches:
        text = compile_launch(launch, capability).asm["ptx"]
        found = [word for word in ("fma.rn", ".approx", ".ftz", "div.full") if word in text]
        assert not found, f"{launch.name}: {found}"


def test_the_hopper_kernel_multiplies_asynchronously_and_fits_shared_memory() -> None:
    (launch,) = launches_of(partial(_attend, sparse_attention_hopper, _bf16(ROWS, HEADS, HEAD_DIM), NATIVE))
    compiled = compile_launch(launch, 90)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
