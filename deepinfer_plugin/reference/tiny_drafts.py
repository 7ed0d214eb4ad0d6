"""Small checkpoints whose drafts are mostly right: the text model nearly a bigram model that the Markov head knows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from deepinfer_plugin.model.config import ModelConfig

SHRINK = 5
"""Power of two by which the sublayers' outputs are smaller: enough for logits to follow the context in every bit."""

_OUTPUTS = re.compile(r"layers\..*\.(attn\.wo_b|ffn\..*\.w2|engram\.wkv)\.scale")


def with_agreeing_drafts(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, changed where drafts and text model disagree.

    Embeddings keep their first ``dspark_markov_rank`` columns, and the sublayers of the text model add little to them.
    Its logits are then nearly ``head @ rms_norm(embedding)``, a product of that rank, which the Markov head gets; the
    draft blocks themselves say nothing.

    Args:
        tensors: of ``make_tensors``; not changed.
        config: of the checkpoint.
    """
    rank, last = config.dspark_markov_rank, f"mtp.{config.num_nextn_predict_layers - 1}"
    changed = dict(tensors)
    embed = tensors["embed.weight"].clone()
    embed[:, rank:] = 0
    changed["embed.weight"] = embed
    for name, tensor in tensors.items():
        if _OUTPUTS.fullmatch(name):
            exponents = tensor.view(torch.uint8).int() - SHRINK
            changed[name] = exponents.clamp_min(1).to(torch.uint8).view(tensor.dtype)
    changed["norm.weight"] = torch.ones_like(tensors["norm.weight"])
    changed[f"{last}.norm.weight"] = torch.zeros_like(tensors[f"{last}.norm.weight"])
    rows = embed.double()
    normed = rows * rows.square().mean(dim=1, keepdim=True).rsqrt()
    changed[f"{last}.markov_head.embed.weight"] = normed[:, :rank].to(torch.bfloat16)
    changed[f"{last}.markov_head.head.weight"] = tensors["head.weight"][:, :rank].clone()
    return changed
