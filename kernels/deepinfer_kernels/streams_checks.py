"""Checks of the residual streams and the coefficients of their update."""

import torch

from deepinfer_kernels import checks


def check_mix(
    op: str, name: str, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> None:
    """Raise unless streams [T, S, d], post [T, S] and comb [T, S, S] fit each other; ``y`` has the streams' dtype."""
    checks.require_activation(op, name, y)
    checks.require_dtype(op, "streams", streams, (y.dtype,))
    checks.require_dtype(op, "post", post, (torch.float32,))
    checks.require_dtype(op, "comb", comb, (torch.float32,))
    checks.require_rank(op, "streams", streams, 3, "[T, S, d]")
    num_tokens, num_streams, _ = streams.shape
    checks.require_shape(op, "post", post, (num_tokens, num_streams), "one weight per stream of every token")
    expected = (num_tokens, num_streams, num_streams)
    checks.require_shape(op, "comb", comb, expected, "one weight per pair of streams of every token")
