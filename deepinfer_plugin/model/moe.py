"""Mixture of experts: router, MXFP4 experts, one shared expert."""

import torch
from torch import nn

from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.moe_experts import moe_experts
from deepinfer_kernels.moe_gate import moe_gate
from deepinfer_kernels.swiglu import swiglu
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.linear import QuantizedLinear, TensorModule, frozen


class Router(nn.Module):
    """Router weights; ``bias`` selects text tokens' experts, ``bias_vl`` those of image tokens."""

    def __init__(self, num_experts: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = frozen(num_experts, hidden_size, dtype=torch.bfloat16)
        self.bias = frozen(num_experts, dtype=torch.float32)
        self.bias_vl = frozen(num_experts, dtype=torch.float32)


class RoutedExperts(nn.Module):
    """All experts of a layer, packed MXFP4: w13 holds the rows of w1, then those of w3."""

    def __init__(self, num_experts: int, intermediate_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w13 = frozen(num_experts, 2 * intermediate_size, hidden_size // 2, dtype=torch.uint8)
        self.w13_scale = frozen(num_experts, 2 * intermediate_size, hidden_size // 32, dtype=torch.uint8)
        self.w2 = frozen(num_experts, hidden_size, intermediate_size // 2, dtype=torch.uint8)
        self.w2_scale = frozen(num_experts, hidden_size, intermediate_size // 32, dtype=torch.uint8)


class SharedExpert(TensorModule):
    """The expert every token passes: SwiGLU with MXFP8 weights."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        config, quantize = context.config, context.arithmetic.quantize
        inner = config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1 = QuantizedLinear(inner, config.hidden_size, quantize_input=quantize)
        self.w3 = QuantizedLinear(inner, config.hidden_size, quantize_input=quantize)
        self.w2 = QuantizedLinear(config.hidden_size, inner, quantize_input=quantize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> same."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit, None))


class MoE(TensorModule):
    """Routed experts in ascending id, then the shared expert, summed in fp32 and rounded once."""

    def __init__(self, context: BuildContext, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        config = context.config
        self.top_k = num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.quantize = context.arithmetic.quantize
        self.gate = Router(num_experts, config.hidden_size)
        self.experts = RoutedExperts(num_experts, config.moe_intermediate_size, config.hidden_size)
        self.shared_experts = SharedExpert(context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size], normed -> same shape and dtype."""
        gate, experts = self.gate, self.experts
        topk_idx, topk_weights = moe_gate(x, gate.weight, gate.bias, top_k=self.top_k, scaling=self.scaling)
        routed = moe_experts(
            x,
            topk_idx,
            topk_weights,
            experts.w13,
            experts.w13_scale,
            experts.w2,
            experts.w2_scale,
            limit=self.limit,
            quantize_input=self.quantize,
        )
        return moe_combine(routed, self.shared_experts(x))
