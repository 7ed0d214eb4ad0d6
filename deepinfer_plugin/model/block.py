"""One layer: attention and mixture of experts between lagged hyper-connections."""

import torch
from torch import nn

from deepinfer_kernels.hc_norm import hc_norm
from deepinfer_plugin.model.attention import Attention
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.engram import Engram
from deepinfer_plugin.model.hyper_connection import compute_mix, mix_parameters
from deepinfer_plugin.model.indexer import Selection
from deepinfer_plugin.model.linear import RMSNorm
from deepinfer_plugin.model.moe import MoE
from deepinfer_plugin.model.step import Step


class Block(nn.Module):
    """A backbone layer or a draft block.

    The pre-mix that a sublayer computes collapses the input of the *next* sublayer.
    """

    def __init__(self, context: BuildContext, layer: int, prefix: str, kv_source: Attention | None) -> None:
        super().__init__()
        config = context.config
        self.config = config
        self.quantize, self.side = context.arithmetic.quantize, context.side
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base = mix_parameters(config)
        self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base = mix_parameters(config)
        self.engram = Engram(context, layer) if layer in config.engram_layer_ids else None
        self.attn = Attention(context, layer, f"{prefix}.attn", kv_source)
        self.ffn = MoE(context, layer)

    def forward(
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        step: Step | None,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Selection | None]:
        """Run the layer on streams that already hold its Engram memory.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            pre: [num_tokens, hc_mult] fp32, from the previous layer's FFN.
            step: the batch, or None in a memory-measuring run.
            selection: entries chosen by the last index source.

        Returns:
            Streams, the FFN's pre-mix, the selection in force.
        """
        with self.side.fork(streams):  # joined where attention and experts end
            attn = compute_mix(streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base, self.config)
        norm = self.attn_norm
        given = hc_norm(streams, pre, norm.weight, norm.eps, quantize=self.quantize, for_experts=False)
        streams, selection = self.attn(given, streams, attn, step, selection)
        with self.side.fork(streams):
            ffn = compute_mix(streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base, self.config)
        norm = self.ffn_norm
        given = hc_norm(streams, attn.pre, norm.weight, norm.eps, quantize=self.quantize, for_experts=True)
        is_image = None if step is None else step.is_image
        return self.ffn(given, streams, ffn, is_image), ffn.pre, selection

    def write_entries(self, streams: torch.Tensor, pre: torch.Tensor, step: Step) -> None:
        """Store what later layers and requests read of rows that do not pass this KV-source layer themselves.

        Args:
            streams: [num_tokens, hc_mult, hidden_size], as for ``forward``.
            pre: [num_tokens, hc_mult] fp32, from the previous layer's FFN.
            step: the rows.
        """
        norm = self.attn_norm
        given = hc_norm(streams, pre, norm.weight, norm.eps, quantize=self.quantize, for_experts=False)
        self.attn.write_entries(given.x, step)
