"""Manifold hyper-connections: four residual streams mixed around every sublayer."""

from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_kernels.hc_mix import hc_mix
from deepinfer_kernels.hc_sinkhorn import hc_sinkhorn
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.linear import frozen


@dataclass(frozen=True, slots=True)
class Mix:
    """Coefficients of one sublayer, fp32: ``post`` and ``comb`` are its own, ``pre`` is for the next sublayer.

    pre, post: [num_tokens, hc_mult]; comb: [num_tokens, hc_mult (source), hc_mult (destination)].
    """

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def compute_mix(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, config: ModelConfig
) -> Mix:
    """Coefficients of a sublayer from the streams [num_tokens, hc_mult, hidden_size] in front of it."""
    logits = hc_mix(streams, fn, config.rms_norm_eps)
    return Mix(*hc_sinkhorn(logits, scale, base, iters=config.hc_sinkhorn_iters, eps=config.hc_eps))


def identity_pre_mix(streams: torch.Tensor) -> torch.Tensor:
    """The pre-mix in front of the first sublayer: stream 0 alone. [num_tokens, hc_mult] fp32."""
    pre = torch.zeros(streams.shape[:2], dtype=torch.float32, device=streams.device)
    pre[:, 0] = 1.0
    return pre


def mix_parameters(config: ModelConfig) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """fn [(2 + S) * S, S * hidden_size], scale [3], base [(2 + S) * S], fp32."""
    width = (2 + config.hc_mult) * config.hc_mult
    return (
        frozen(width, config.hc_mult * config.hidden_size, dtype=torch.float32),
        frozen(3, dtype=torch.float32),
        frozen(width, dtype=torch.float32),
    )
