"""Mixture of experts: router, MXFP4 experts, one shared expert.

Ranks of tensor parallelism cut every expert by outputs, and exchange what is between its two products. With expert
parallelism they have whole experts, and rows go to them (``expert_exchange``).
"""

import torch
from torch import nn

from deepinfer_kernels.experts_output import experts_output
from deepinfer_kernels.hc_norm import SublayerInput
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.moe_experts import moe_experts
from deepinfer_kernels.moe_gate import moe_gate
from deepinfer_kernels.shared_expert import shared_expert
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.expert_exchange import ExpertExchange
from deepinfer_plugin.model.hyper_connection import Mix
from deepinfer_plugin.model.linear import QuantizedWeight, TensorModule, frozen, place_in_one
from deepinfer_plugin.model.side_stream import MAX_ROWS, MAX_ROWS_BESIDE_EXPERTS


class Router(nn.Module):
    """Router weights; ``bias`` selects text tokens' experts, ``bias_vl`` those of image tokens."""

    def __init__(self, num_experts: int, hidden_size: int, *, has_images: bool) -> None:
        super().__init__()
        self.weight = frozen(num_experts, hidden_size, dtype=torch.bfloat16)
        self.bias = frozen(num_experts, dtype=torch.float32)
        self.bias_vl = frozen(num_experts, dtype=torch.float32) if has_images else None


class RoutedExperts(nn.Module):
    """The experts of a layer that are on this rank, packed MXFP4: w13 holds the rows of w1, then those of w3.

    ``num_cuts`` ranks have an equal share of the outputs of both products.
    """

    def __init__(self, num_experts: int, intermediate_size: int, hidden_size: int, num_cuts: int) -> None:
        super().__init__()
        inner, outputs = 2 * (intermediate_size // num_cuts), hidden_size // num_cuts
        self.w13 = frozen(num_experts, inner, hidden_size // 2, dtype=torch.uint8)
        self.w13_scale = frozen(num_experts, inner, hidden_size // 32, dtype=torch.uint8)
        self.w2 = frozen(num_experts, outputs, intermediate_size // 2, dtype=torch.uint8)
        self.w2_scale = frozen(num_experts, outputs, intermediate_size // 32, dtype=torch.uint8)

    def moved(self) -> tuple[torch.Tensor, ...]:
        """What goes along when an expert moves, each [num_experts, ...] uint8."""
        return self.w13.data, self.w13_scale.data, self.w2.data, self.w2_scale.data


class SharedExpert(nn.Module):
    """Weights of the expert every token passes, MXFP8; ranks own outputs of its second product."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        inner, hidden_size = context.config.moe_intermediate_size, context.config.hidden_size
        self.w1 = QuantizedWeight(inner, hidden_size)
        self.w3 = QuantizedWeight(inner, hidden_size)
        self.w2 = QuantizedWeight(hidden_size // context.parallel.tensor.size, inner)
        place_in_one(self.w1, self.w3)


class MoE(TensorModule):
    """Routed experts in ascending id, then the shared expert, summed in fp32 and rounded once."""

    def __init__(self, context: BuildContext, layer: int) -> None:
        super().__init__()
        config, parallel = context.config, context.parallel
        num_experts, self.top_k = context.expert_counts(layer)
        self.scaling = config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.quantize, self.side = context.arithmetic.quantize, context.side
        self.ranks, self.num_shares = parallel.tensor, parallel.experts.size
        self.exchange = None if parallel.experts.is_alone else ExpertExchange(context, layer)
        self.is_cut = parallel.expert_outputs.size > 1
        num_here = num_experts if self.exchange is None else len(self.exchange.slots)
        self.gate = Router(num_experts, config.hidden_size, has_images=config.vision_config is not None)
        self.experts = RoutedExperts(
            num_here, config.moe_intermediate_size, config.hidden_size, parallel.expert_outputs.size
        )
        self.shared_experts = SharedExpert(context)
        self.max_side_rows = MAX_ROWS_BESIDE_EXPERTS if self.ranks.is_alone else MAX_ROWS

    def forward(
        self, given: SublayerInput, streams: torch.Tensor, mix: Mix, is_image: torch.Tensor | None
    ) -> torch.Tensor:
        """Send the rows through the experts and add the result to the streams.

        Args:
            given: one row per token, ffn-normed, with rows for the experts.
            streams: [num_tokens, hc_mult, hidden_size], in front of this sublayer.
            mix: how the result joins them.
            is_image: [num_tokens] bool, rows whose experts ``bias_vl`` selects; None: no row.

        Returns:
            The streams behind this sublayer.
        """
        x, gate = given.x, self.gate
        with self.side.fork(x, max_rows=self.max_side_rows):
            shared = self._shared(given)
        topk_idx, topk_weights = moe_gate(
            x,
            gate.weight,
            gate.bias,
            top_k=self.top_k,
            scaling=self.scaling,
            bias_image=None if is_image is None else gate.bias_vl,
            is_image=is_image,
        )
        exchange = self.exchange
        if exchange is None:
            routed = self._routed(x, topk_idx, topk_weights, given.expert_rows)
        else:
            sent = exchange.send(x, topk_idx, topk_weights)
            rows = None if exchange.has_replicas else given.expert_rows
            routed = exchange.fetch(self._routed(sent.x, sent.topk_idx, sent.topk_weights, rows), sent.owner)
        self.side.join(x)
        if exchange is None and not self.is_cut:
            return experts_output(routed, shared, streams, mix.post, mix.comb)
        y = self.ranks.gather_columns(moe_combine(routed, shared))
        return hc_post(y, streams, mix.post, mix.comb)

    def _routed(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Results of the experts of this rank, [num_rows, top_k, outputs of w2]."""
        experts = self.experts
        return moe_experts(
            x,
            topk_idx,
            topk_weights,
            experts.w13,
            experts.w13_scale,
            experts.w2,
            experts.w2_scale,
            limit=self.limit,
            quantize_input=self.quantize,
            rows=rows,
            num_shares=self.num_shares,
            gather=self.ranks.gather_columns if self.is_cut else None,
        )

    def _shared(self, given: SublayerInput) -> torch.Tensor:
        weights = self.shared_experts
        return shared_expert(
            given.rows,
            weights.w1.tensors,
            weights.w3.tensors,
            weights.w2.tensors,
            limit=self.limit,
            out_dtype=given.x.dtype,
            quantize=self.quantize,
            num_shards=self.ranks.size,
        )
