"""Mix coefficients from mix logits in plain PyTorch. Axes: T tokens, I source stream, J destination stream."""

import torch

from deepinfer_kernels.pointwise import sigmoid

TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, num_streams: int, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mix logits [num_rows, (2 + S) * S], every third row of size 80, scale [3] and base, all fp32."""
    width = (2 + num_streams) * num_streams
    logits = torch.randn(num_rows, width, generator=generator)
    logits[2::3] = 80.0 * logits[2::3].sign()
    scale = torch.rand(3, generator=generator) + 0.5
    base = torch.randn(width, generator=generator)
    return logits.to(device), scale.to(device), base.to(device)


class _Normalise:
    """Divides a tensor, in place, by its serial sums over one axis. Views are made once: the steps are tiny."""

    def __init__(self, values: torch.Tensor, dim: int) -> None:
        self._values = values
        self._parts = values.unbind(dim)
        self._total = torch.empty_like(self._parts[0])
        self._divisor = self._total.unsqueeze(dim)

    def step(self, eps: float) -> None:
        """values /= sum + eps, the sum in ascending index."""
        self._total.copy_(self._parts[0])
        for part in self._parts[1:]:
            self._total.add_(part)
        if eps != 0.0:
            self._total.add_(eps)
        self._values.div_(self._divisor)


def hc_sinkhorn_reference(
    mix_logits: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, num_streams: int, iters: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pre_scale, post_scale, comb_scale = scale.detach().unbind()
    column_scale = torch.cat(
        [pre_scale.expand(num_streams), post_scale.expand(num_streams), comb_scale.expand(num_streams**2)]
    )
    logits = (mix_logits * column_scale).add_(base.detach())
    gates = sigmoid(logits[:, : 2 * num_streams])
    pre = gates[:, :num_streams] + eps
    post = gates[:, num_streams:] * 2.0

    # Tokens last: every step below then works on whole rows of tokens.
    comb_IJT = logits[:, 2 * num_streams :].t().reshape(num_streams, num_streams, logits.shape[0])
    comb_IJT = (comb_IJT - comb_IJT.amax(dim=1, keepdim=True)).exp_()
    rows, columns = _Normalise(comb_IJT, 1), _Normalise(comb_IJT, 0)
    rows.step(0.0)  # the softmax
    comb_IJT.add_(eps)
    columns.step(eps)
    for _ in range(iters - 1):
        rows.step(eps)
        columns.step(eps)
    return pre, post, comb_IJT.permute(2, 0, 1).contiguous()
