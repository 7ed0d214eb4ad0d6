"""Engram gate: add the looked-up value to every residual stream, gated by how well its key matches."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_tilelang, use_triton
from deepinfer_kernels.engram_gate.reference import engram_gate_reference
from deepinfer_kernels.engram_gate.triton_kernel import engram_gate_triton


def engram_gate(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    is_image: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``streams + sigmoid(copysign(sqrt(max(|u|, 1e-6)), u)) * value`` per token and stream.

    ``u`` is the product of the normalised stream and the normalised key, summed over the hidden axis, times
    hidden_size ** -0.5; each of the two is scaled by its own weight and root mean square.

    Args:
        streams: [num_tokens, hc_mult, hidden_size], bf16 or fp32.
        key: [num_tokens, hc_mult, hidden_size], dtype of ``streams``.
        value: [num_tokens, hidden_size], dtype of ``streams``.
        q_weight: [hc_mult, hidden_size] bf16 or fp32.
        k_weight: [hc_mult, hidden_size] bf16 or fp32.
        eps: added to both mean squares; > 0. The text model uses 1e-20.
        is_image: [num_tokens] bool or None; rows of image tokens are returned unchanged.

    Returns:
        [num_tokens, hc_mult, hidden_size], dtype of ``streams``, a new tensor; fp32 inside, rounded once.

    Raises:
        ShapeError: the shapes do not fit together.
        UnsupportedError: a dtype is not the one above.

    Invariance: bitwise per row; a row depends on that row of ``streams``, ``key``, ``value`` and ``is_image``, on
    the weights and ``eps`` only.
    Source: REF, class Engram; spec 2.9.
    """
    checks.require_activation("engram_gate", "streams", streams)
    checks.require_rank("engram_gate", "streams", streams, 3, "[num_tokens, hc_mult, hidden_size]")
    num_tokens, num_streams, hidden_size = streams.shape
    for name, tensor in (("key", key), ("value", value)):
        checks.require_dtype("engram_gate", name, tensor, (streams.dtype,))
    checks.require_shape("engram_gate", "key", key, streams.shape, "key has the shape of streams")
    checks.require_shape("engram_gate", "value", value, (num_tokens, hidden_size), "all streams share one value")
    for name, tensor in (("q_weight", q_weight), ("k_weight", k_weight)):
        checks.require_activation("engram_gate", name, tensor)
        checks.require_shape("engram_gate", name, tensor, (num_streams, hidden_size), "one weight per element of a row")
    if is_image is not None:
        checks.require_dtype("engram_gate", "is_image", is_image, (torch.bool,))
        checks.require_shape("engram_gate", "is_image", is_image, (num_tokens,), "one flag per row of streams")
    if use_tilelang(streams):
        from deepinfer_kernels.engram_gate.tilelang_kernel import engram_gate_tilelang

        return engram_gate_tilelang(streams, key, value, q_weight, k_weight, eps, is_image)
    if use_triton(streams):
        return engram_gate_triton(streams, key, value, q_weight, k_weight, eps, is_image)
    return engram_gate_reference(streams, key, value, q_weight, k_weight, eps, is_image)
