"""``interpreted_layouts`` for operations on rows: products, norms, streams, formats, n-grams and the sampler.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.interpreted_layouts_rows``.
"""

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.attention_output.reference import make_inputs as make_attention_output
from deepinfer_kernels.attention_output.triton_kernel import attention_output_triton
from deepinfer_kernels.dense_attention.reference import make_inputs as make_dense
from deepinfer_kernels.dense_attention.triton_kernel import dense_attention_triton
from deepinfer_kernels.engram_gate.reference import make_inputs as make_gate
from deepinfer_kernels.engram_gate.triton_kernel import engram_gate_triton
from deepinfer_kernels.engram_hash.reference import make_inputs as make_ngrams
from deepinfer_kernels.engram_hash.triton_kernel import engram_rows_triton
from deepinfer_kernels.engram_lookup.reference import make_inputs as make_table
from deepinfer_kernels.engram_lookup.triton_kernel import engram_lookup_triton
from deepinfer_kernels.expert_places.reference import make_inputs as make_places
from deepinfer_kernels.expert_places.triton_kernel import expert_places_triton
from deepinfer_kernels.experts_output.reference import make_inputs as make_experts_output
from deepinfer_kernels.experts_output.triton_kernel import experts_output_triton
from deepinfer_kernels.hc_collapse.triton_kernel import hc_collapse_triton
from deepinfer_kernels.hc_mix.reference import make_inputs as make_mix
from deepinfer_kernels.hc_mix.triton_kernel import hc_mix_triton
from deepinfer_kernels.hc_norm.reference import make_inputs as make_streams
from deepinfer_kernels.hc_norm.triton_kernel import hc_norm_triton
from deepinfer_kernels.hc_sinkhorn.reference import make_inputs as make_sinkhorn
from deepinfer_kernels.hc_sinkhorn.triton_kernel import hc_sinkhorn_triton
from deepinfer_kernels.interpreted_layouts import ROWS, generator, run
from deepinfer_kernels.latent_projections.reference import make_inputs as make_latents
from deepinfer_kernels.latent_projections.triton_kernel import latent_projections_triton
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.linear.reference import make_inputs as make_linear
from deepinfer_kernels.linear.triton_kernel import grouped_linear_triton, linear_triton, mxfp8_linear_triton
from deepinfer_kernels.log_softmax.triton_kernel import log_softmax_triton, log_sum_exp_triton, token_log_softmax_triton
from deepinfer_kernels.moe_combine.triton_kernel import moe_combine_triton
from deepinfer_kernels.moe_gate.reference import make_inputs as make_router
from deepinfer_kernels.moe_gate.triton_kernel import moe_gate_triton
from deepinfer_kernels.mxfp4_quant.triton_kernel import mxfp4_fake_quant_triton, mxfp4_quant_triton
from deepinfer_kernels.mxfp8_quant.triton_kernel import mxfp8_fake_quant_triton, mxfp8_quant_triton
from deepinfer_kernels.nvfp4_quant.triton_kernel import nvfp4_fake_quant_triton, nvfp4_quant_triton
from deepinfer_kernels.peer_exchange import PeerMemory, gather_columns, merge_rows
from deepinfer_kernels.restrict_logits.rows_kernel import restrict_rows_triton
from deepinfer_kernels.restrict_logits.triton_kernel import restrict_few_rows_triton
from deepinfer_kernels.rms_norm.triton_kernel import rms_norm_triton
from deepinfer_kernels.rope.triton_kernel import rope_triton
from deepinfer_kernels.sample_tokens.reference import make_inputs as make_draw
from deepinfer_kernels.sample_tokens.top_tokens_kernel import top_tokens_triton
from deepinfer_kernels.sample_tokens.triton_kernel import sample_tokens_triton
from deepinfer_kernels.sampling_noise.reference import make_inputs as make_noise
from deepinfer_kernels.sampling_noise.triton_kernel import gumbel_noise_triton, random_words_triton
from deepinfer_kernels.shared_expert.reference import make_inputs as make_shared
from deepinfer_kernels.shared_expert.triton_kernel import shared_expert_triton
from deepinfer_kernels.sum_smaller_probs.triton_kernel import sum_smaller_probs_triton
from deepinfer_kernels.swiglu.triton_kernel import swiglu_triton

_BF16, _FP32 = torch.bfloat16, torch.float32
_DTYPES = (_BF16, _FP32)


def _products() -> None:
    """Depths with and without whole blocks of words, outputs behind a tile, parts of K, every product."""
    for num_rows, depth, num_out in ((1, 96, 40), (17, 160, 96), (33, 256, 64)):
        for dtype in _DTYPES:
            x, weight, scale = make_linear(num_rows, num_out, depth, dtype, "cpu", generator())
            linear_triton(x[:, ::2], weight.to(dtype)[:, ::2], dtype)
            mxfp8_linear_triton(x, weight, scale, dtype, True)
    with patch.object(tiling, "SPLIT_K_BY_SHAPE", ((1 << 62, 1 << 62, 128),)):  # parts, the last one cut
        for num_rows, wide in product((3, 33), (1, 1 << 62)):
            with patch.object(tiling, "NARROW_ROWS_BY_OUTPUTS", ((1 << 62, wide),)):
                x, weight, scale = make_linear(num_rows, 96, 320, _BF16, "cpu", generator())
                linear_triton(x, weight.bfloat16(), _BF16)
                mxfp8_linear_triton(x, weight, scale, _BF16, True)
                grouped_linear_triton(
                    x.view(num_rows, 2, 160), weight[:, :160].clone().view(96, 160), scale[:, :5], _BF16
                )


def _fused_products() -> None:
    for num_rows in (1, 17):
        x, wq, wq_scale, wkv, wkv_scale, q_norm, kv_norm = make_latents(
            num_rows, 96, 40, 160, _BF16, "cpu", generator()
        )
        rows = prepare_rows(x, codes=tiling.E4M3_CODES, quantize=True)
        weights = ((wq, wq_scale), (wkv, wkv_scale))
        latent_projections_triton(rows, *weights, q_norm, kv_norm, 1e-6, out_dtype=_BF16, quantize=True)
        x, w1, w1_scale, w3, w3_scale, w2, w2_scale = make_shared(num_rows, 160, 96, _BF16, "cpu", generator())
        pairs = ((w1, w1_scale), (w3, w3_scale), (w2, w2_scale))
        shared_expert_triton(rows, *pairs, limit=7.0, out_dtype=_BF16, quantize=True)
        out, wo_a, wo_a_scale, wo_b, wo_b_scale, streams, post, comb = make_attention_output(
            num_rows, 2, 32, 96, _BF16, "cpu", generator()
        )
        attention_output_triton(out, (wo_a, wo_a_scale), (wo_b, wo_b_scale), streams, post, comb, True)
        routed, shared, streams, post, comb = make_experts_output(num_rows, 96, _BF16, "cpu", generator())
        experts_output_triton(routed, shared, streams, post, comb)


def _router() -> None:
    for num_rows, (num_experts, top_k) in product((1, 3, 17), ((1, 1), (33, 6))):
        x, weight, bias, bias_image = make_router(num_rows, 40, num_experts, _FP32, generator(), "cpu")
        for value in (1.0, 0.0, torch.nan):
            is_image = torch.arange(num_rows) % 2 == 0
            moe_gate_triton(x * value, weight, bias, top_k=top_k, scaling=1.0, bias_image=bias_image, is_image=is_image)
        moe_combine_triton(torch.zeros(num_rows, top_k, 40), torch.zeros(num_rows, 40))


def _places() -> None:
    """Blocks that end at a row and within one, fewer and more rows that may count, the first rows of no expert."""
    for num_rows, max_num_rows in product((1, 17, 86), (0, 1, 100)):
        ids, table, num_replicas, _ = make_places(num_rows, 3, 9, 15, generator(), "cpu")
        for rows in (ids, ids.masked_fill(torch.arange(num_rows)[:, None] < 5, -1)):
            counts, is_real = torch.zeros(2, 15, dtype=torch.int32), torch.ones(max_num_rows, 3, dtype=torch.int32)
            expert_places_triton(rows, 5, 2, table, num_replicas, is_real, counts[1])
            expert_places_triton(rows, 5, 0, None, None, None, None)


def _streams() -> None:
    for num_rows, dtype in product((1, 3, 17), _DTYPES):
        streams, pre, weight = make_streams(num_rows, 4, 96, dtype, "cpu", generator())
        hc_norm_triton(streams, pre, weight, 1e-6, quantize=True, for_experts=True)
        hc_collapse_triton(streams[:, :, ::3], pre)
        rms_norm_triton(streams[:, 1], weight, 1e-6)
        hc_sinkhorn_triton(*make_sinkhorn(num_rows, 4, "cpu", generator()), 4, 2, 1e-6)
        rope_triton(streams[:, :, :40], torch.zeros(num_rows, 6), torch.zeros(num_rows, 6), False)
        swiglu_triton(streams[:, 0], streams[:, 1], 7.0, pre[:, 0])
    for num_rows, is_split in product((1, 17), (True, False)):
        with patch.object(tiling, "HC_MIX_TILES", ((1 << 62, (16, 1, is_split)),)):
            hc_mix_triton(*make_mix(num_rows, 4, 160, _BF16, "cpu", generator()), 1e-6)


def _formats() -> None:
    quantisers = (mxfp4_quant_triton, mxfp4_fake_quant_triton, mxfp8_quant_triton, mxfp8_fake_quant_triton)
    for num_rows in (1, 22):  # 66 and 198 blocks of 32
        x = torch.randn(num_rows, 3, 96, generator=generator())
        for quantise in (*quantisers, nvfp4_quant_triton, nvfp4_fake_quant_triton):
            quantise(x)
            quantise(x[:, 1])


def _ngrams() -> None:
    for num_rows in ROWS:
        primes = torch.tensor([7, 11, 13, 17, 19, 23])
        offsets = primes.cumsum(0) - primes
        ids = make_ngrams(num_rows, 99, 4, generator(), "cpu")
        rows = engram_rows_triton(ids, torch.tensor([3, 5, 7, 9]), primes, offsets)
        table, scale, _ = make_table(1, 1, int(primes.sum()), 32, generator(), "cpu")
        engram_lookup_triton(table, scale, rows, _FP32)
        engram_lookup_triton(table, scale, torch.full_like(rows, table.shape[0] - 1), _FP32)
    gate = make_gate(3, 4, 40, _FP32, generator(), "cpu")
    engram_gate_triton(*gate, 1e-6, torch.tensor([True, False, True]))
    for count in (1, 63, 65):
        dense_attention_triton(*make_dense(count, count, 2, 16, _FP32, generator(), "cpu"), 0.25)


def _draws() -> None:
    for num_rows, vocab_size in ((1, 1), (2, 1025), (17, 5)):
        arguments = make_draw(num_rows, vocab_size, generator(), "cpu")
        sample_tokens_triton(*arguments)
        logits = torch.full((num_rows, vocab_size), torch.nan)
        tokens = sample_tokens_triton(logits, *arguments[1:])
        for count in sorted({1, min(33, vocab_size), min(128, vocab_size)}):
            for scores in (logits, torch.zeros_like(logits)):
                top_tokens_triton(scores[:2], count)
        ids = torch.stack((tokens, torch.full_like(tokens, vocab_size - 1)), dim=1)
        with patch.object(tiling, "LOGSUM_CHUNK", 256), patch.object(tiling, "LOGSUM_BLOCK", 64):
            log_softmax_triton(arguments[0])
            token_log_softmax_triton(arguments[0], ids)
            log_sum_exp_triton(logits)
        numbers = make_noise(num_rows, generator(), "cpu")
        random_words_triton(*numbers, vocab_size)
        gumbel_noise_triton(*numbers, vocab_size)


def _restrictions() -> None:
    """Every kind of limit on equal logits, whose list is the whole row, on one logit, and on none."""
    with patch.object(tiling, "RESTRICT_CHUNK", 64), patch.object(tiling, "RESTRICT_BLOCK", 32):
        for vocab_size in (1, 200):
            one = torch.full((vocab_size,), -torch.inf)
            one[-1] = 3.0
            logits = torch.stack((torch.zeros(vocab_size), one, torch.full_like(one, torch.nan)))
            for top_k, top_p, min_p in ((1, 1.0, 0.0), (vocab_size, 0.5, 0.0), (2, 0.01, 0.5)):
                limits = (torch.full((3,), top_k, dtype=torch.int32), torch.full((3,), top_p), torch.full((3,), min_p))
                restrict_few_rows_triton(logits, *limits)
                restrict_rows_triton(logits, *limits)
            sum_smaller_probs_triton(logits, torch.full((3,), vocab_size - 1))


def _exchanges() -> None:
    """A rank without others: its memory is no argument. ``peer_exchange.interpreted_ranks`` guards that of two."""
    peers = PeerMemory(
        rank=0,
        size=1,
        addresses=torch.zeros(1, dtype=torch.int64),
        epochs=torch.zeros(tiling.PEER_PROGRAMS, dtype=torch.int32),
        half_bytes=1 << 20,
    )
    for num_rows, columns in product((1, 3, 33), (2, 34, 4096)):
        x = torch.zeros(num_rows, columns, dtype=_BF16)
        gather_columns(peers, x)
        for is_cut in (False, True):
            merge_rows(peers, x, torch.zeros(num_rows, dtype=torch.int32), is_cut=is_cut)


LAYOUTS: tuple[Callable[[], None], ...] = (
    _products,
    _fused_products,
    _router,
    _places,
    _streams,
    _formats,
    _ngrams,
    _draws,
    _restrictions,
    _exchanges,
)


if __name__ == "__main__":
    print(*sorted(run(LAYOUTS)))  # noqa: T201
