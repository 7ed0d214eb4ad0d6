"""The sum in plain PyTorch, in integers."""

import torch

from deepinfer_kernels.elementary import exp_nonpositive
from deepinfer_kernels.restrict_logits.reference import WEIGHT_BITS
from deepinfer_kernels.tiling import SAMPLING_ELEMENTS


def sum_smaller_probs_reference(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """``sum_smaller_probs`` on checked arguments, some rows at a time to bound the memory."""
    found = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    rows_at_once = -(-SAMPLING_ELEMENTS // max(logits.shape[1], 1))
    for start in range(0, logits.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        found[rows] = _sum_rows(logits[rows], token_ids[rows])
    return found


def _sum_rows(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    clean = torch.where(logits.isnan(), -torch.inf, logits)
    largest = clean.amax(dim=1, keepdim=True)
    # where the largest logit is infinite the difference is NaN
    ratio = torch.where(clean == largest, 1.0, exp_nonpositive(clean - largest))
    weight = (ratio * 2.0**WEIGHT_BITS).long().masked_fill_(clean == -torch.inf, 0)
    chosen = clean.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_counted = (clean < chosen) | ((clean == chosen) & (ids <= token_ids[:, None]))
    counted = weight.masked_fill(~is_counted, 0).sum(dim=1)
    total = weight.sum(dim=1)
    return (counted.double() / total.clamp_min(1).double()).float()
