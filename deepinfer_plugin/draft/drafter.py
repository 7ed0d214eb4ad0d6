"""The draft blocks for vLLM: context KV from the taps of the target, one pass over a block, drafts by its last row."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.kv_store import store_records
from deepinfer_kernels.linear import mxfp8_linear
from deepinfer_kernels.rope import rope
from deepinfer_plugin import variables
from deepinfer_plugin.cache.specs import num_drafts
from deepinfer_plugin.draft.draws import Draws
from deepinfer_plugin.draft.heads import ConfidenceHead, DraftHeads, Drafts
from deepinfer_plugin.draft.step import DraftStep
from deepinfer_plugin.errors import ConfigError, SettingError
from deepinfer_plugin.model.block import Block
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.hyper_connection import identity_pre_mix
from deepinfer_plugin.model.linear import Embedding, Head, QuantizedLinear, RMSNorm
from deepinfer_plugin.model.rope import RotaryTables
from deepinfer_plugin.model.tensors import Group
from deepinfer_plugin.model.weights import load_into
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.speculative.record import DraftRecord

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from deepinfer_plugin.sampling.sampler import DeepInferSampler


REGISTERED_NAME = "deepinfer.drafter"
"""Key of the drafter in vLLM's table of layers, where the hooks of the model runner find it."""


class DSparkV41DraftModel(nn.Module):
    """The ``mtp.*`` part of a checkpoint under the interface that vLLM's DSpark speculator calls.

    Embedding and head are the target's own; vLLM sets ``embed_tokens`` and ``lm_head`` after loading. A wrong draft
    costs time and never changes an answer, so nothing here is part of the promise but that it comes back.

    Raises:
        ConfigError: the model has no draft blocks, or they read layers that replayed prompts do not pass.
        SettingError: confidences have neither one temperature nor one for each draft.
    """

    has_own_embed_tokens = False
    has_own_lm_head = False
    draft_id_to_target_id = None

    checkpoint_groups: tuple[Group, ...] = ("draft",)

    embed_tokens: Embedding
    lm_head: Head

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        super().__init__()
        settings = Settings.from_envs()
        config = ModelConfig.from_hf(vllm_config.speculative_config.draft_model_config.hf_config)
        check_draft_blocks(config)
        context = BuildContext.of_engine(vllm_config, config)
        self.config, self.arithmetic, self.records = config, context.arithmetic, context.records
        self.parallel = context.parallel
        self.rotary = RotaryTables(config)
        first = config.num_hidden_layers
        self._blocks = tuple(
            Block(context, first + index, f"{prefix}mtp.{index}", None)
            for index in range(config.num_nextn_predict_layers)
        )
        self.mtp = nn.ModuleList(self._blocks)
        width, num_taps = config.hidden_size, len(config.dspark_target_layer_ids)
        main_proj = QuantizedLinear(width, num_taps * width, quantize_input=settings.arithmetic.quantize)
        main_norm = RMSNorm(width, config.rms_norm_eps)
        self._blocks[0].add_module("main_proj", main_proj)
        self._blocks[0].add_module("main_norm", main_norm)
        self._context = (main_proj, main_norm)  # the same modules, with their types
        self.heads = DraftHeads(
            config, self._blocks[-1], settings.arithmetic.activation_dtype, _temperatures(settings, vllm_config)
        )
        self.draws: Draws | None = None
        self.record: DraftRecord | None = None
        vllm_config.compilation_config.static_forward_context[REGISTERED_NAME] = self

    @property
    def model(self) -> "DSparkV41DraftModel":
        """vLLM looks for embedding and confidence head in an inner module; there is none."""
        return self

    @property
    def confidence_head(self) -> ConfidenceHead:
        """Its presence tells vLLM that drafts come with a confidence."""
        return self.heads.confidence

    def bind_sampler(self, sampler: "DeepInferSampler") -> None:
        """Draw with the parameters that this sampler holds from now on, and say to its record how sure drafts are."""
        self.draws = Draws(sampler, self.heads.norm.weight.device)
        self.record = sampler.drafts

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [num_tokens] -> [num_tokens, hidden_size] in the activation dtype."""
        return self.embed_tokens(input_ids).to(self.arithmetic.activation_dtype)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Taps of the target side by side, [num_tokens, num_taps * hidden_size], to what context KV is made of.

        Returns:
            [num_tokens, hidden_size].
        """
        main_proj, main_norm = self._context
        return main_norm(main_proj(aux_hidden_states.to(self.arithmetic.activation_dtype)))

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """Names of the caches, one a block."""
        return [block.attn.window.prefix for block in self._blocks]

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mappings: "Sequence[torch.Tensor | None] | None" = None,
    ) -> None:
        """Keep what drafts read of verified tokens (spec §4.2).

        Args:
            context_states: [num_tokens, hidden_size], from ``combine_hidden_states``.
            context_positions: [num_tokens] int64.
            context_slot_mappings: [num_tokens] int64 token slots for every block, -1: do not write; None in a run that
                only measures memory.
        """
        states = context_states.to(self.arithmetic.activation_dtype)
        rotation = self.rotary.rotation(context_positions, 0)
        for index, block in enumerate(self._blocks):
            attn = block.attn
            product = mxfp8_linear(
                states, *attn.wkv.tensors, out_dtype=states.dtype, quantize_input=self.arithmetic.quantize
            )
            key_value = rope(attn.kv_norm(product), rotation.cos, rotation.sin)
            slots = None if context_slot_mappings is None else context_slot_mappings[index]
            if slots is not None:
                store_records(attn.window.kv_cache, slots, key_value, self.records.window_format)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the blocks on the anchor and the noise tokens of every request.

        Args:
            input_ids: [num_reqs * num_drafts] token ids.
            positions: [num_reqs * num_drafts] int64.
            inputs_embeds: unused; text only.

        Returns:
            [num_reqs * num_drafts, hidden_size], in front of the norm.
        """
        del inputs_embeds
        metadata = get_forward_context().attn_metadata
        step = None
        if metadata:
            step = DraftStep.of_batch(positions, metadata, self.rotary, self.config.sliding_window)
        embedded = self.embed_input_ids(input_ids)
        streams = embedded[:, None, :].expand(-1, self.config.hc_mult, -1).contiguous()
        pre = identity_pre_mix(streams)
        for block in self._blocks:
            streams, pre, _ = block(streams, pre, step, None)
        return hc_collapse(streams, pre)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] as ``forward`` returns them -> [num_rows, vocab_size] fp32, without Markov head."""
        return self.lm_head(self.heads.norm(hidden_states), torch.float32)

    def draft(
        self, hidden_states: torch.Tensor, anchors: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> Drafts:
        """Drafts of every request from the rows of its block; arguments as of ``DraftHeads.draft``.

        Args:
            hidden_states: [num_reqs * num_drafts, hidden_size], from ``forward``.
        """
        assert self.draws is not None, "DSparkV41DraftModel: draft without a sampler, expected bind_sampler before"
        shape = (*positions.shape, -1)
        base = self.compute_logits(hidden_states).view(shape)
        return self.heads.draft(base, hidden_states.view(shape), anchors, slots, positions, self.draws)

    def sample_sequential(self, speculator: "DSparkSpeculator", num_reqs: int, head_hidden: torch.Tensor) -> bool:
        """vLLM's hook in the place of its own sampling of the block; within a CUDA graph where there is one.

        Args:
            speculator: holds the inputs and takes the results.
            num_reqs: requests of the pass.
            head_hidden: [num_rows, hidden_size], from ``forward``, one row per request and draft in order.

        Returns:
            True: done.
        """
        steps = speculator.num_speculative_steps
        num_rows = num_reqs * steps
        slots = speculator.sample_idx_mapping[:num_rows].view(num_reqs, steps)[:, 0]
        drafts = self.draft(
            head_hidden[:num_rows],
            speculator.input_buffers.input_ids[:num_rows].view(num_reqs, steps)[:, 0],
            slots,
            speculator.sample_pos[:num_rows].view(num_reqs, steps),
        )
        speculator.draft_tokens[:num_reqs] = drafts.tokens
        speculator.draft_token_confidence_probs[:num_reqs] = drafts.confidence
        if self.record is not None:
            self.record.store_confidence(slots, drafts.confidence)
        return True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters from checkpoint tensors.

        Args:
            weights: all tensors of the checkpoint, as vLLM's loader reads them when it is asked for the next one.

        Raises:
            CheckpointError: a tensor is missing, unknown, given twice, or has the wrong shape or dtype.
        """
        return load_into(self, weights, self.config, self.checkpoint_groups, self.parallel)


def drafter_of(vllm_config: "VllmConfig") -> DSparkV41DraftModel | None:
    """The drafter that was built for an engine, if it has one."""
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    found = layers.get(REGISTERED_NAME)
    assert found is None or isinstance(found, DSparkV41DraftModel)
    return found


def _temperatures(settings: Settings, vllm_config: "VllmConfig") -> tuple[float, ...]:
    """What divides the scores of a block's drafts.

    Raises:
        SettingError: neither one number nor as many as drafts.
    """
    variable, count = variables.DFLASH_CONFIDENCE_HEAD_TEMPERATURE, num_drafts(vllm_config)
    found = settings[variable]
    if len(found) not in (1, count):
        raise SettingError(
            f"DSparkV41DraftModel: {settings.environment.describe(variable)} with {len(found)} numbers, expected 1 or "
            f"{count}, the drafts of a step; write one for each"
        )
    return found


def check_draft_blocks(config: ModelConfig) -> None:
    """Refuse a model that cannot draft.

    Raises:
        ConfigError: see ``DSparkV41DraftModel``.
    """
    if config.num_nextn_predict_layers == 0:
        raise ConfigError(
            "DSparkV41DraftModel: text_config.num_nextn_predict_layers is 0, expected draft blocks in the checkpoint; "
            "leave --speculative-config out"
        )
    cut = config.kv_source_layer_ids[-1]
    if min(config.dspark_target_layer_ids) < cut:
        raise ConfigError(
            f"DSparkV41DraftModel: text_config.dspark_target_layer_ids is {list(config.dspark_target_layer_ids)}, "
            f"expected decoder layers, {cut} or later; drafts read what the last layers know of a token"
        )
