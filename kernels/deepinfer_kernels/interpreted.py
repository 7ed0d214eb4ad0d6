"""Small fp32 cases of the Triton kernels in Triton's interpreter against the references; no GPU.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.interpreted`` raises on the first difference. A test starts it in a
process of its own, because the interpreter is chosen when Triton is imported. Its bits are never golden values.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.engram_gate import reference as engram_gate_reference
from deepinfer_kernels.engram_gate.triton_kernel import engram_gate_triton
from deepinfer_kernels.engram_hash import reference as engram_hash_reference
from deepinfer_kernels.engram_hash.triton_kernel import engram_rows_triton
from deepinfer_kernels.hc_collapse import reference as hc_collapse_reference
from deepinfer_kernels.hc_collapse.triton_kernel import hc_collapse_triton
from deepinfer_kernels.hc_mix import reference as hc_mix_reference
from deepinfer_kernels.hc_mix.triton_kernel import hc_mix_triton
from deepinfer_kernels.hc_post import reference as hc_post_reference
from deepinfer_kernels.hc_post.triton_kernel import hc_post_triton
from deepinfer_kernels.hc_sinkhorn import reference as hc_sinkhorn_reference
from deepinfer_kernels.hc_sinkhorn.triton_kernel import hc_sinkhorn_triton
from deepinfer_kernels.indexer_topk import reference as indexer_topk_reference
from deepinfer_kernels.indexer_topk.triton_candidates import candidate_blocks_triton, mask_to_candidates_triton
from deepinfer_kernels.indexer_topk.triton_kernel import topk_indices_triton
from deepinfer_kernels.kv_compress import reference as kv_compress_reference
from deepinfer_kernels.kv_compress.triton_kernel import compress_pairs_triton
from deepinfer_kernels.log_softmax import reference as log_softmax_reference
from deepinfer_kernels.log_softmax.triton_kernel import log_softmax_triton
from deepinfer_kernels.lookback_ids import reference as lookback_ids_reference
from deepinfer_kernels.lookback_ids.triton_kernel import lookback_ids_triton
from deepinfer_kernels.restrict_logits import reference as restrict_logits_reference
from deepinfer_kernels.restrict_logits.rows_kernel import restrict_rows_triton
from deepinfer_kernels.restrict_logits.triton_kernel import restrict_few_rows_triton
from deepinfer_kernels.rms_norm import reference as rms_norm_reference
from deepinfer_kernels.rms_norm.triton_kernel import rms_norm_triton
from deepinfer_kernels.rope import reference as rope_reference
from deepinfer_kernels.rope.triton_kernel import rope_triton
from deepinfer_kernels.sample_tokens import reference as sample_tokens_reference
from deepinfer_kernels.sample_tokens.top_tokens_kernel import top_tokens_triton
from deepinfer_kernels.sample_tokens.triton_kernel import sample_tokens_triton
from deepinfer_kernels.sampling_noise import reference as sampling_noise_reference
from deepinfer_kernels.sampling_noise.triton_kernel import gumbel_noise_triton, random_words_triton
from deepinfer_kernels.sum_smaller_probs.reference import sum_smaller_probs_reference
from deepinfer_kernels.sum_smaller_probs.triton_kernel import sum_smaller_probs_triton
from deepinfer_kernels.swa_indices import reference as swa_indices_reference
from deepinfer_kernels.swa_indices.triton_kernel import entry_slots_triton, window_slots_triton
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close

_NEAR = 1e-5


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(21)


def _norms() -> None:
    x, weight = rms_norm_reference.make_inputs(5, 33, torch.float32, "cpu", _generator())
    assert_close(
        rms_norm_triton(x, weight, 1e-20), rms_norm_reference.rms_norm_reference(x, weight, 1e-20), _NEAR, "rms_norm"
    )
    vectors, _ = rope_reference.make_inputs(3, 2, 24, torch.float32, "cpu", _generator())
    cos, sin = torch.rand(3, 8), torch.rand(3, 8)
    for inverse in (False, True):
        want = rope_reference.rope_reference(vectors, cos, sin, inverse)
        assert_bitwise_equal(rope_triton(vectors, cos, sin, inverse), want, "rope")


def _hyper_connections() -> None:
    y, streams, post, comb = hc_post_reference.make_inputs(3, 4, 21, torch.float32, "cpu", _generator())
    want = hc_post_reference.hc_post_reference(y, streams, post, comb)
    assert_bitwise_equal(hc_post_triton(y, streams, post, comb), want, "hc_post")
    want = hc_collapse_reference.hc_collapse_reference(streams, post)
    assert_bitwise_equal(hc_collapse_triton(streams, post), want, "hc_collapse")
    fn = torch.randn(24, 84, generator=_generator())
    want = hc_mix_reference.hc_mix_reference(streams, fn, 1e-20)
    assert_close(hc_mix_triton(streams, fn, 1e-20), want, 1e-4, "hc_mix")
    logits, scale, base = hc_sinkhorn_reference.make_inputs(3, 4, "cpu", _generator())
    wanted = hc_sinkhorn_reference.hc_sinkhorn_reference(logits, scale, base, 4, 20, 1e-6)
    for got, part in zip(hc_sinkhorn_triton(logits, scale, base, 4, 20, 1e-6), wanted, strict=True):
        assert_close(got, part, _NEAR, "hc_sinkhorn")


def _engram() -> None:
    arguments = engram_gate_reference.make_inputs(3, 2, 21, torch.float32, _generator(), "cpu")
    is_image = torch.tensor([False, True, False])
    want = engram_gate_reference.engram_gate_reference(*arguments, 1e-20, is_image)
    assert_close(engram_gate_triton(*arguments, 1e-20, is_image), want, _NEAR, "engram_gate")
    ids = engram_hash_reference.make_inputs(5, 99092, 4, _generator(), "cpu")
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    primes, offsets = torch.arange(16000057, 16000063), torch.arange(6) * 16000057
    want = engram_hash_reference.engram_rows_reference(ids, multipliers, primes, offsets)
    assert_bitwise_equal(engram_rows_triton(ids, multipliers, primes, offsets), want, "engram_rows")


def _indices() -> None:
    positions, req_idx, table = swa_indices_reference.make_inputs(5, 2, 9, 4, _generator(), "cpu")
    floor = torch.zeros_like(positions)
    want = swa_indices_reference.window_slots_reference(positions, req_idx, table, 4, 7, floor)
    assert_bitwise_equal(window_slots_triton(positions, req_idx, table, 4, 7, floor), want, "window_slots")
    indices = torch.randint(-1, 18, (5, 3), generator=_generator(), dtype=torch.int32)
    want = swa_indices_reference.entry_slots_reference(indices, req_idx, table, 2)
    assert_bitwise_equal(entry_slots_triton(indices, req_idx, table, 2), want, "entry_slots")
    scores = indexer_topk_reference.make_inputs(4, 50, _generator(), "cpu")
    want = indexer_topk_reference.topk_indices_reference(scores, 8)
    assert_bitwise_equal(topk_indices_triton(scores, 8), want, "topk_indices")
    wide = torch.randn(2, 9000, generator=_generator())  # two passes, scores with all bits
    want = indexer_topk_reference.topk_indices_reference(wide, 300)
    assert_bitwise_equal(topk_indices_triton(wide, 300), want, "topk_indices of a long row")
    num_visible = (scores > -torch.inf).sum(dim=1)
    blocks = indexer_topk_reference.candidate_blocks_reference(scores, num_visible, 3, 4)
    assert_bitwise_equal(candidate_blocks_triton(scores, num_visible, 3, 4), blocks, "candidate_blocks")
    want = indexer_topk_reference.mask_to_candidates_reference(scores, blocks, 4)
    assert_bitwise_equal(mask_to_candidates_triton(scores, blocks, 4), want, "mask_to_candidates")


def _lookback() -> None:
    """More rows and requests than a block, with and without a past, and padding."""
    contexts = [index % 30 for index in range(150)]
    for lengths, padding in (([1] * 150, 0), ([3, 1, 40], 7)):
        step = lookback_ids_reference.make_inputs(lengths, contexts[: len(lengths)], padding, 40, _generator())
        out = torch.empty((2, sum(lengths) + padding, 3), dtype=torch.int64)
        want = lookback_ids_reference.lookback_ids_reference(**step, out=out[0])
        assert_bitwise_equal(lookback_ids_triton(**step, out=out[1]), want, "lookback_ids")


def _state() -> None:
    inputs = kv_compress_reference.make_inputs([3, 9], [1, 4], 12, 8, _generator(), "cpu")
    other = {name: tensor.clone() for name, tensor in inputs.items()}
    got = compress_pairs_triton(**inputs, out_dtype=torch.float32)
    want = kv_compress_reference.compress_pairs_reference(**other, out_dtype=torch.float32)
    assert_close(got, want, _NEAR, "compress_pairs")
    assert_bitwise_equal(inputs["state_cache"], other["state_cache"], "state")


def _logits() -> None:
    logits = log_softmax_reference.make_inputs(2, 9000, _generator(), "cpu")
    want = log_softmax_reference.log_softmax_reference(logits)
    assert_close(log_softmax_triton(logits), want, log_softmax_reference.ABSOLUTE_TOLERANCE, "log_softmax")


def _sampler() -> None:
    """To the bit: integers and single IEEE operations, in which the interpreter is right."""
    for vocab_size in (1, 5, 1030):
        numbers = sampling_noise_reference.make_inputs(3, _generator(), "cpu")
        words = sampling_noise_reference.random_words_reference(*numbers, vocab_size)
        assert_bitwise_equal(random_words_triton(*numbers, vocab_size), words, "random_words")
        noise = sampling_noise_reference.gumbel_noise_reference(*numbers, vocab_size)
        assert_bitwise_equal(gumbel_noise_triton(*numbers, vocab_size), noise, "gumbel_noise")
        draw = sample_tokens_reference.make_inputs(7, vocab_size, _generator(), "cpu")
        want = sample_tokens_reference.sample_tokens_reference(*draw)
        assert_bitwise_equal(sample_tokens_triton(*draw), want, "sample_tokens")
    for vocab_size, num_tokens in ((1, 1), (70, 33), (3000, 20)):
        logits = sample_tokens_reference.make_inputs(2, vocab_size, _generator(), "cpu")[0]
        want = sample_tokens_reference.top_tokens_reference(logits, num_tokens)
        assert_bitwise_equal(top_tokens_triton(logits, num_tokens), want, "top_tokens")


def _restrictions() -> None:
    """With small chunks and blocks: passes of several programs, a search over a list, then one over what it left."""
    with patch.object(tiling, "RESTRICT_CHUNK", 64), patch.object(tiling, "RESTRICT_BLOCK", 32):
        for vocab_size in (1, 200):
            logits, *limits = restrict_logits_reference.make_inputs(8, vocab_size, _generator(), "cpu")
            for row in (logits, torch.randn(8, vocab_size, generator=_generator()) * 3)[: 1 + vocab_size // 200]:
                want = restrict_logits_reference.restrict_logits_reference(row, *limits)
                assert_bitwise_equal(restrict_few_rows_triton(row, *limits), want, "restrict_logits, few rows")
                assert_bitwise_equal(restrict_rows_triton(row, *limits), want, "restrict_logits, a program a row")
                ids = torch.arange(8) % vocab_size
                want = sum_smaller_probs_reference(row, ids)
                assert_bitwise_equal(sum_smaller_probs_triton(row, ids), want, "sum_smaller_probs")


CHECKS: tuple[Callable[[], None], ...] = (
    _norms,
    _hyper_connections,
    _engram,
    _indices,
    _lookback,
    _state,
    _logits,
    _sampler,
    _restrictions,
)


if __name__ == "__main__":
    for check in CHECKS:
        check()
