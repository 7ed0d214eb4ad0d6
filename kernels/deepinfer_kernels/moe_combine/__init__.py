"""Combine: add the outputs of a token's experts and of the shared expert."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.moe_combine.reference import moe_combine_reference


def moe_combine(expert_out: torch.Tensor, shared_out: torch.Tensor) -> torch.Tensor:
    """Add the slots of ``expert_out`` in ascending order, then ``shared_out``.

    Args:
        expert_out: [num_tokens, top_k, hidden_size], bf16 or fp32, top_k >= 1; slots in ascending expert id, routing
            weights already applied.
        shared_out: [num_tokens, hidden_size], dtype of ``expert_out``.

    Returns:
        [num_tokens, hidden_size], dtype of ``expert_out``, a new tensor; summed in fp32, rounded once.

    Raises:
        ShapeError: the shapes do not fit together.
        UnsupportedError: a dtype is not the one above.

    Invariance: bitwise per row; a row depends on that row of both arguments only.
    Source: REF, class MoE; spec 2.10.
    """
    checks.require_activation("moe_combine", "expert_out", expert_out)
    checks.require_dtype("moe_combine", "shared_out", shared_out, (expert_out.dtype,))
    checks.require_rank("moe_combine", "expert_out", expert_out, 3, "[num_tokens, top_k, hidden_size]")
    num_tokens, top_k, hidden_size = expert_out.shape
    if top_k == 0:
        raise ShapeError(
            f"moe_combine: expert_out is {list(expert_out.shape)}, expected at least one slot; pass moe_experts' result"
        )
    checks.require_shape(
        "moe_combine", "shared_out", shared_out, (num_tokens, hidden_size), "run the shared expert on the same tokens"
    )
    if use_triton(expert_out):
        from deepinfer_kernels.moe_combine.triton_kernel import moe_combine_triton

        return moe_combine_triton(expert_out, shared_out)
    return moe_combine_reference(expert_out, shared_out)
