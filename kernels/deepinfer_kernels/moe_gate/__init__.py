"""Router: the experts of every token and their weights."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import UnsupportedError
from deepinfer_kernels.moe_gate.reference import moe_gate_reference


def _check_options(
    num_experts: int, top_k: int, bias_image: torch.Tensor | None, is_image: torch.Tensor | None
) -> None:
    if (bias_image is None) != (is_image is None):
        missing = "bias_image" if bias_image is None else "is_image"
        raise UnsupportedError(
            f"moe_gate: {missing} is None, expected bias_image and is_image together; pass both or neither"
        )
    if not 1 <= top_k <= num_experts:
        raise UnsupportedError(
            f"moe_gate: top_k is {top_k}, expected 1 ... {num_experts}, the rows of weight; correct num_experts_per_tok"
        )


def moe_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scaling: float,
    bias_image: torch.Tensor | None = None,
    is_image: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts by sqrt(softplus(x @ weight.T)) plus bias and weigh them by the score without bias.

    Args:
        x: [num_tokens, hidden_size], bf16 or fp32.
        weight: [num_experts, hidden_size], bf16 or fp32; the product accumulates in fp32.
        bias: [num_experts] fp32, added for the choice only.
        top_k: experts per token, 1 ... num_experts. With 1 the score is not normalised (REF).
        scaling: routed_scaling_factor, multiplied onto the normalised weights.
        bias_image: [num_experts] fp32 in place of ``bias`` for image tokens, or None.
        is_image: [num_tokens] bool, or None; used only together with ``bias_image``.

    Returns:
        topk_idx [num_tokens, top_k] int32, ascending expert id in every row, and topk_weights [num_tokens, top_k]
        fp32 in the same order. Equal biased scores go to the lower id. Sums run in ascending id.

    Raises:
        ShapeError: the shapes do not fit together.
        UnsupportedError: a dtype is not the one above, ``top_k`` is out of range, or only one of ``bias_image`` and
            ``is_image`` is given.

    Invariance: bitwise per row; a row depends on that row of ``x`` and ``is_image``, on the weights and biases only.
    Source: REF, class Gate; spec 2.10.
    """
    checks.require_activation("moe_gate", "x", x)
    checks.require_activation("moe_gate", "weight", weight)
    checks.require_rank("moe_gate", "x", x, 2, "[num_tokens, hidden_size]")
    checks.require_rank("moe_gate", "weight", weight, 2, "[num_experts, hidden_size]")
    num_tokens, hidden_size = x.shape
    num_experts = weight.shape[0]
    checks.require_shape("moe_gate", "weight", weight, (num_experts, hidden_size), "its columns are those of x")
    for name, tensor in (("bias", bias), ("bias_image", bias_image)):
        if tensor is not None:
            checks.require_dtype("moe_gate", name, tensor, (torch.float32,))
            checks.require_shape("moe_gate", name, tensor, (num_experts,), "one value per row of weight")
    if is_image is not None:
        checks.require_dtype("moe_gate", "is_image", is_image, (torch.bool,))
        checks.require_shape("moe_gate", "is_image", is_image, (num_tokens,), "one flag per row of x")
    _check_options(num_experts, top_k, bias_image, is_image)
    if use_triton(x):
        from deepinfer_kernels.moe_gate.triton_kernel import moe_gate_triton

        return moe_gate_triton(x, weight, bias, top_k=top_k, scaling=scaling, bias_image=bias_image, is_image=is_image)
    return moe_gate_reference(x, weight, bias, top_k=top_k, scaling=scaling, bias_image=bias_image, is_image=is_image)
