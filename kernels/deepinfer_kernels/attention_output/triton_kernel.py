"""Output projections of attention and update of the streams on an NVIDIA GPU: five launches."""

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.hc_post.triton_kernel import post_parts_triton
from deepinfer_kernels.linear.prepare_kernel import prepare_parts, prepare_rows
from deepinfer_kernels.linear.triton_kernel import grouped_linear_triton, prepared_parts
from deepinfer_kernels.linear.weights import Weight


def _low_rank_rows(out: torch.Tensor, wo_a: Weight, quantize: bool) -> torch.Tensor:
    """Rows for wo_b from the attention result [M, G, K]."""
    num_rows, num_groups, _ = out.shape
    if out.dtype == torch.float32:
        low = grouped_linear_triton(out, *wo_a, out.dtype).flatten(1)
        return prepare_rows(low, codes=tiling.E4M3_CODES, quantize=True) if quantize else low
    rows = prepare_rows(out, codes=tiling.E4M3_CODES, quantize=False)
    rows = rows.view(num_rows, num_groups * rows.shape[1])
    parts = prepared_parts(rows, *wo_a, out.dtype, num_groups)
    return prepare_parts(parts, dtype=out.dtype, codes=tiling.E4M3_CODES, quantize=quantize)


def attention_output_triton(
    out: torch.Tensor,
    wo_a: Weight,
    wo_b: Weight,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    quantize: bool,
) -> torch.Tensor:
    """Run arguments ``attention_output`` has already checked."""
    parts = prepared_parts(_low_rank_rows(out, wo_a, quantize), *wo_b, out.dtype)
    return post_parts_triton(parts, streams, post, comb, out.dtype)
