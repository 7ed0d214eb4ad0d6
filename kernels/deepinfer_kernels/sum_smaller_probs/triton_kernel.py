"""The sum as one Triton kernel: a program owns a row. Weights are integers, so lanes change no bit of a sum."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.restrict_logits.triton_kernel import extent_of_row, weight_of

_AT_ONCE = 2  # blocks whose loads are in flight together


@triton.jit(do_not_specialize=["vocab_size"])
def _sum_smaller_kernel(
    logits_ptr, token_ids_ptr, out_ptr, vocab_size, stride_t, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    largest, _, _ = extent_of_row(row_ptr, vocab_size, BLOCK, AT_ONCE)
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
        logits = last_axis_contiguous(logits)
        block = min(tiling.RESTRICT_BLOCK, max(32, triton.next_power_of_2(vocab_size)))
        _sum_smaller_kernel[(num_rows,)](
            logits,
            token_ids.contiguous(),
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=block,
            AT_ONCE=_AT_ONCE,
            num_warps=max(1, block // 256),
            enable_fp_fusion=False,
        )
    return out
