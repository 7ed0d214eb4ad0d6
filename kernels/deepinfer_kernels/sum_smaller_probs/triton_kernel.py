"""The sum as one Triton kernel: a program owns a row. Weights are integers, so lanes change no bit of a sum."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import sampler_rows
from deepinfer_kernels.restrict_logits.triton_search import weight_of

_AT_ONCE = 2  # blocks whose loads are in flight together


@triton.jit
def _largest_of_row(row_ptr, vocab_size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Largest logit that is not NaN; -inf where there is none."""
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            v = start + step * BLOCK + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            highest = tl.where(logit > highest, logit, highest)
    return tl.max(highest, axis=0)


@triton.jit(do_not_specialize=["vocab_size"])
def _sum_smaller_kernel(
    logits_ptr, token_ids_ptr, out_ptr, vocab_size, stride_t, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    largest = _largest_of_row(row_ptr, vocab_size, BLOCK, AT_ONCE)
    chosen_id = tl.load(token_ids_ptr + row)
    chosen = tl.load(row_ptr + chosen_id)
    chosen = tl.where(chosen == chosen, chosen, -float("inf"))
    lane = tl.arange(0, BLOCK)
    counted = tl.zeros([BLOCK], dtype=tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            v = start + step * BLOCK + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            weight = tl.where(logit > -float("inf"), weight_of(logit, largest), 0)
            total += weight
            counted += tl.where((logit < chosen) | ((logit == chosen) & (v <= chosen_id)), weight, 0)
    whole = tl.maximum(tl.sum(total, axis=0), 1).to(tl.float64)
    tl.store(out_ptr + row, (tl.sum(counted, axis=0).to(tl.float64) / whole).to(tl.float32))


def sum_smaller_probs_triton(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on arguments ``sum_smaller_probs`` has checked."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows,), dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        rows = sampler_rows(logits, tiling.RESTRICT_BLOCK)
        _sum_smaller_kernel[(num_rows,)](
            rows.logits,
            token_ids.contiguous(),
            out,
            vocab_size,
            rows.logits.stride(0),
            BLOCK=rows.block,
            AT_ONCE=_AT_ONCE,
            num_warps=rows.num_warps,
            enable_fp_fusion=False,
        )
    return out
