"""The shared expert on an NVIDIA GPU: two products, with the sum of the first one's parts inside the SwiGLU."""

import torch

from deepinfer_kernels.linear.triton_kernel import mxfp8_prepared_triton, prepared_parts
from deepinfer_kernels.linear.weights import Weight, stacked
from deepinfer_kernels.shared_expert.hidden_kernel import swiglu_rows


def shared_expert_triton(
    rows: torch.Tensor,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    out_dtype: torch.dtype,
    quantize: bool,
    num_shards: int = 1,
) -> torch.Tensor:
    """Run arguments ``shared_expert`` has already checked."""
    gate_up = prepared_parts(rows, stacked(w1[0], w3[0]), stacked(w1[1], w3[1]), out_dtype)
    hidden = swiglu_rows(gate_up, limit, dtype=out_dtype, quantize=quantize)
    return mxfp8_prepared_triton(hidden, *w2, out_dtype, num_shards)
