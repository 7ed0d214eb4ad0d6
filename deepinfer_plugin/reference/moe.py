"""Mixture of experts of one layer (spec §2.10)."""

from __future__ import annotations

import torch

from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.moe_experts import moe_experts
from deepinfer_kernels.moe_gate import moe_gate
from deepinfer_kernels.swiglu import swiglu
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.step import Parameters, Step


class ReferenceMoe:
    """Router, routed experts and the shared expert of one layer."""

    def __init__(self, config: ModelConfig, layer: int, parameters: Parameters) -> None:
        self.config = config
        self.layer = layer
        self.parameters = parameters
        self.w13 = self._stack("w1.weight", "w3.weight")
        self.w13_scale = self._stack("w1.scale", "w3.scale")
        self.w2 = self._stack("w2.weight")
        self.w2_scale = self._stack("w2.scale")

    def _stack(self, *names: str) -> torch.Tensor:
        """One tensor of all experts, the rows of ``names`` one after the other in each."""
        experts = [
            torch.cat([self.parameters[f"experts.{expert}.{name}"] for name in names])
            for expert in range(self.config.n_routed_experts)
        ]
        return torch.stack(experts)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Send the normed rows x [num_tokens, hidden_size] through the experts; returns a tensor like x."""
        config = self.config
        topk_idx, topk_weights = moe_gate(
            x,
            self.parameters["gate.weight"],
            self.parameters["gate.bias"],
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            bias_image=None if step.is_image is None else self.parameters["gate.bias_vl"],
            is_image=step.is_image,
        )
        step.record(f"L{self.layer}.gate_experts", topk_idx)
        step.record(f"L{self.layer}.gate_weights", topk_weights)
        routed = moe_experts(
            x,
            topk_idx,
            topk_weights,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            limit=config.swiglu_limit,
            quantize_input=self.parameters.arithmetic.quantize,
        )
        return moe_combine(routed, self.shared(x))

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """The shared expert: the same SwiGLU on MXFP8 weights, without a routing weight."""
        shared = self.parameters.under("shared_experts.")
        hidden = swiglu(
            shared.quantized_linear("w1", x), shared.quantized_linear("w3", x), self.config.swiglu_limit, None
        )
        return shared.quantized_linear("w2", hidden)
