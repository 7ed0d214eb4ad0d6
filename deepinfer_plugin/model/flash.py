"""DeepSeek-V4.1-Flash for vLLM: the layers in order, and the interface vLLM expects of a model with images."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsPP
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from deepinfer_kernels.dispatch import KernelSet, choose_kernel_set
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_plugin import __version__, envs
from deepinfer_plugin.cache.groups import cache_groups
from deepinfer_plugin.encoding.prompt import IMAGE_TOKEN
from deepinfer_plugin.encoding.token_map import build_token_map
from deepinfer_plugin.images.layout import ImageLayout
from deepinfer_plugin.images.processing import DummyImages, ImageInfo, ImageProcessor
from deepinfer_plugin.model.block import Block
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.engram import ngram_ids
from deepinfer_plugin.model.graph_logits import GraphLogits
from deepinfer_plugin.model.hyper_connection import identity_pre_mix
from deepinfer_plugin.model.indexer import Selection
from deepinfer_plugin.model.linear import Embedding, Head, RMSNorm, frozen
from deepinfer_plugin.model.rope import RotaryTables
from deepinfer_plugin.model.step import Step
from deepinfer_plugin.model.tensors import Group
from deepinfer_plugin.model.vision import Aligner, VisionTower, image_span
from deepinfer_plugin.model.weights import TEXT_ONLY, load_into
from deepinfer_plugin.platforms.capabilities import kernel_set_of
from deepinfer_plugin.replay.inputs import EncoderPassInputs, ReplayInputs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

    from deepinfer_plugin.worker.model_state import DeepInferModelState

logger = init_logger(f"vllm.{__name__}")

STREAMS, PRE_MIX = "streams", "pre_mix"  # what stages hand on, of every row


@MULTIMODAL_REGISTRY.register_processor(ImageProcessor, info=ImageInfo, dummy_inputs=DummyImages)
class DeepseekV41ForCausalLM(nn.Module, SupportsMultiModal, SupportsPP):
    """The model under the architecture name of the released checkpoint.

    The tower and its tensors are built and loaded only where the engine takes images.

    Raises:
        ConfigError: config.json describes a model that this class cannot serve.
    """

    requires_raw_input_tokens: ClassVar[Literal[True]] = True  # n-grams are hashes of ids
    token_map: torch.Tensor
    supports_eagle3 = True
    has_own_embed_tokens = has_own_lm_head = False
    checkpoint_groups: tuple[Group, ...] = TEXT_ONLY

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        super().__init__()
        device_type = vllm_config.device_config.device_type
        envs.enter_batch_invariant_mode(device_type)
        if device_type != "cpu":
            choose_kernel_set(KernelSet(kernel_set_of(device_type)))
        config = ModelConfig.from_hf(vllm_config.model_config.hf_config)
        context = BuildContext.of_engine(vllm_config, config)
        self.config, self.arithmetic = config, context.arithmetic
        self.parallel, self.rule, self.load = context.parallel, context.rule, context.load
        ranks, stage = self.parallel.tensor, self.parallel.stage
        self.rotary = RotaryTables(config)
        blocks: dict[int, Block] = {}
        kv_source = None
        for layer in filter(stage.has_layer, range(config.num_hidden_layers)):
            blocks[layer] = Block(context, layer, f"{prefix}layers.{layer}", kv_source)
            kv_source = blocks[layer].attn if config.is_kv_source(layer) else kv_source
        # a layer of another stage keeps its number, and has no tensor here
        self.layers = nn.ModuleList(blocks.get(layer, nn.Identity()) for layer in range(config.num_hidden_layers))
        cut = config.kv_source_layer_ids[-1]
        self._encoder = tuple(block for layer, block in blocks.items() if layer < cut)
        self._decoder = tuple(block for layer, block in blocks.items() if layer >= cut)
        self._tapped: tuple[int, ...] = ()
        self.graph_logits = GraphLogits.of_engine(vllm_config, config.vocab_size if stage.is_last else 0)
        if stage.is_first:
            self.embed = Embedding(config.vocab_size, config.hidden_size, ranks)
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.head = Head(config.vocab_size, config.hidden_size, ranks)
        if vllm_config.model_config.supports_multimodal_inputs:
            self.checkpoint_groups = ("text", "vision")
            if stage.is_first:
                self._build_vision()
        self.register_buffer("token_map", _token_map(vllm_config, config), persistent=False)
        self.pad_id = int(self.token_map[config.engram_pad_token_id]) if config.engram_layer_ids else 0
        logger.info(
            "deepinfer_plugin %s serves DeepseekV41ForCausalLM; kernel set: %s; arithmetic: %s",
            __version__,
            kernel_set_of(device_type),
            self.arithmetic.value,
        )

    def _build_vision(self) -> None:
        vision, width = self.config.vision_config, self.config.hidden_size
        assert vision is not None, "ImageInfo allows no image without a vision_config"
        self.vision = VisionTower(vision)
        self.aligner = Aligner(vision, width)
        self.image_start, self.image_newline, self.image_end = (frozen(width, dtype=torch.bfloat16) for _ in range(3))

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """How a raw prompt marks the place of an image."""
        del i
        return IMAGE_TOKEN if modality == "image" else None

    @staticmethod
    def get_model_state_cls() -> type["DeepInferModelState"]:
        """Hooks of vLLM's model runner V2."""
        from deepinfer_plugin.worker.model_state import DeepInferModelState

        return DeepInferModelState

    @classmethod
    def get_kv_cache_groups(
        cls, vllm_config: "VllmConfig", kv_cache_spec: dict[str, "KVCacheSpec"]
    ) -> list["KVCacheGroupSpec"]:
        """Groups of caches that share a block table, for vLLM's planner."""
        return cache_groups(vllm_config, kv_cache_spec)

    def get_language_model(self) -> "DeepseekV41ForCausalLM":
        """The part that makes text: vLLM's draft models ask it for what they share."""
        return self

    @property
    def model(self) -> "DeepseekV41ForCausalLM":
        """vLLM looks here for what a draft model shares with its target."""
        return self

    @property
    def embed_tokens(self) -> Embedding:
        """The embedding under the name that vLLM's draft models share it by."""
        return self.embed

    @property
    def lm_head(self) -> Head:
        """The head under the name that vLLM's draft models share it by."""
        return self.head

    def blocks(self) -> tuple[Block, ...]:
        """The layers of the backbone in order."""
        return self._encoder + self._decoder

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Layers whose input the draft model of the checkpoint reads."""
        return self.config.dspark_target_layer_ids

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let ``forward`` return the input of these decoder layers beside the hidden states."""
        cut = len(self._encoder)
        assert min(layers) >= cut, (layers, cut)
        self._tapped = tuple(layer - cut for layer in layers)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows at the entry of the model.

        Args:
            input_ids: [num_tokens].
            multimodal_embeddings: parts of image spans, in the order of their rows.
            is_multimodal: [num_tokens] bool, the rows of those parts; given with them.

        Returns:
            [num_tokens, hidden_size] in the activation dtype.
        """
        embedded = self.embed(input_ids).to(self.arithmetic.activation_dtype)
        if multimodal_embeddings:
            assert is_multimodal is not None
            rows = is_multimodal.nonzero()[:, 0].to(embedded.device, non_blocking=True)
            embedded[rows] = torch.cat(list(multimodal_embeddings))
        return embedded

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Encode images, one after the other.

        Args:
            kwargs: the fields of ``ImageProcessor``: ``patches`` [sum of patches, 3 * patch_size ** 2] bf16 of all
                images, ``grid`` [num_images, 2] int64 patches high and wide.

        Returns:
            Per image the rows of its span, [num_tokens, hidden_size] in the activation dtype.

        Invariance: bitwise per image; an image's rows depend on that image and the weights only.
        """
        vision, patches, grids = self.config.vision_config, kwargs["patches"], kwargs["grid"]
        assert vision is not None
        assert isinstance(patches, torch.Tensor)
        assert isinstance(grids, torch.Tensor)
        layouts = [ImageLayout.of_patches(high, wide, vision) for high, wide in grids.tolist()]
        parts = torch.split(patches, [layout.num_patches for layout in layouts])
        return [self._encode_image(part, layout) for part, layout in zip(parts, layouts, strict=True)]

    def _encode_image(self, patches: torch.Tensor, layout: ImageLayout) -> torch.Tensor:
        rows = self.vision(patches, layout, self.arithmetic.activation_dtype)
        delimiters = (self.image_start, self.image_newline, self.image_end)
        return image_span(self.aligner(rows, layout), layout.roles(), delimiters)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: "IntermediateTensors | None" = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        lookback_ids: torch.Tensor,
        replay: ReplayInputs | None = None,
        is_image: torch.Tensor | None = None,
    ) -> "torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]] | IntermediateTensors":
        """Run the layers of this stage on the rows of a step.

        Args:
            input_ids: [num_tokens] token ids.
            positions: [num_tokens] int64, absolute position of each token in its request.
            intermediate_tensors: what the stage before this one returned; None on the first.
            inputs_embeds: [num_tokens, hidden_size] rows at the entry, those of images included; None: text only.
            lookback_ids: [num_tokens, engram_max_ngram_size - 1] int64, the ids before each token, nearest first,
                -1 before the start of the request or of the text behind the last image.
            replay: what bounded replay computes of the step; None: every row, with full windows.
            is_image: [num_tokens] bool, rows inside an image span; None: text only.

        Returns:
            [num_tokens, hidden_size], after the final norm; 0 in a row that does not pass the decoder layers. With it,
            where layers are tapped, the mean of the input streams of each, of the same shape, in the layers' order.
            On a stage that is not the last, what the next one takes.

        Invariance: bitwise per row, given the request's tokens; the other rows of the step do not matter.
        """
        attn_metadata = get_forward_context().attn_metadata
        step = None
        if attn_metadata:
            step = Step.of_batch(positions, attn_metadata, self.rotary, self.config.sliding_window, is_image)
        compressed_ids = self._compressed_ids(input_ids, lookback_ids)
        if replay is not None and replay.encoder_passes and step is not None:
            streams, pre = self._encode_in_passes(input_ids.shape[0], step, replay.encoder_passes)
        elif intermediate_tensors is not None:
            streams, pre = intermediate_tensors[STREAMS], intermediate_tensors[PRE_MIX]
            streams, pre, _ = _run(self._encoder, streams, pre, compressed_ids, step)
        else:
            embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            streams, pre = self._encode(embedded, compressed_ids, step)
        if not self.parallel.stage.is_last:
            return IntermediateTensors({STREAMS: streams, PRE_MIX: pre})
        hidden_states, taps = self._decode(streams, pre, compressed_ids, step, replay)
        self.graph_logits.capture(hidden_states, self._logits)
        return (hidden_states, taps) if self._tapped else hidden_states

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """Room for what a stage takes from the one before it, ``batch_size`` rows.

        Args:
            batch_size: most rows of a step.
            dtype: of the checkpoint, unused: rows have the activation dtype.
            device: of the stage.
        """
        del dtype
        config = self.config
        shape = (batch_size, config.hc_mult, config.hidden_size)
        streams = torch.zeros(shape, dtype=self.arithmetic.activation_dtype, device=device)
        return IntermediateTensors({STREAMS: streams, PRE_MIX: torch.zeros(shape[:2], device=device)})

    def replay_windows(self, passes: Iterable[EncoderPassInputs], positions: torch.Tensor) -> None:
        """Compute encoder windows again, for a step whose own rows run in a CUDA graph; within a forward context.

        Args:
            passes: of the step.
            positions: [num_tokens] int64, of the step.
        """
        metadata = get_forward_context().attn_metadata
        step = Step.of_batch(positions, metadata, self.rotary, self.config.sliding_window)
        for one in passes:
            self._encode_pass(one, step)

    def _compressed_ids(self, input_ids: torch.Tensor, lookback_ids: torch.Tensor) -> torch.Tensor | None:
        """[num_tokens, engram_max_ngram_size] ids for the Engram layers; None without such layers."""
        if not self.config.engram_layer_ids:
            return None
        return ngram_ids(torch.cat((input_ids[:, None].long(), lookback_ids), dim=1), self.token_map, self.pad_id)

    def _encode(
        self, embedded: torch.Tensor, compressed_ids: torch.Tensor | None, step: Step | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers before the last KV source, on rows from their embedding on; returns streams and pre-mix."""
        streams = embedded[:, None, :].expand(-1, self.config.hc_mult, -1).contiguous()
        streams, pre, _ = _run(self._encoder, streams, identity_pre_mix(streams), compressed_ids, step)
        return streams, pre

    def _encode_pass(self, one: EncoderPassInputs, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        rows = step.replaying(one.positions, one.req_idx, one.floors, one.source_rows, one.is_image)
        embedded = self.embed_input_ids(one.input_ids) if one.inputs_embeds is None else one.inputs_embeds
        return self._encode(embedded, self._compressed_ids(one.input_ids, one.lookback_ids), rows)

    def _encode_in_passes(
        self, num_tokens: int, step: Step, passes: tuple[EncoderPassInputs, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same where windows are computed again at borders inside the step; rows come back in its order."""
        config = self.config
        shape, dtype = (num_tokens, config.hc_mult, config.hidden_size), self.arithmetic.activation_dtype
        streams = torch.zeros(shape, dtype=dtype, device=step.positions.device)
        pre = torch.zeros(shape[:2], device=step.positions.device)
        for one in passes:
            pass_streams, pass_pre = self._encode_pass(one, step)
            streams[one.step_rows] = pass_streams[one.own_rows]
            pre[one.step_rows] = pass_pre[one.own_rows]
        return streams, pre

    def _decode(
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        compressed_ids: torch.Tensor | None,
        step: Step | None,
        replay: ReplayInputs | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Layers from the last KV source on, on the rows that are kept; hidden states of all rows, and their taps."""
        if step is not None and replay is not None:
            step = step.with_floors(replay.decoder_floors)
        rows = None if replay is None else replay.decoder_rows
        if rows is None or step is None:
            return self._finish(streams, pre, compressed_ids, step)
        self._decoder[0].write_entries(streams, pre, step)
        every_row = [streams.new_zeros(streams.shape[0], streams.shape[2]) for _ in range(1 + len(self._tapped))]
        if rows.shape[0] > 0:
            kept_ids = None if compressed_ids is None else compressed_ids[rows]
            hidden_states, taps = self._finish(streams[rows], pre[rows], kept_ids, step.kept(rows))
            for whole, kept in zip(every_row, (hidden_states, *taps), strict=True):
                whole[rows] = kept
        return every_row[0], every_row[1:]

    def _finish(
        self, streams: torch.Tensor, pre: torch.Tensor, compressed_ids: torch.Tensor | None, step: Step | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same on rows that all pass; hidden states after the norm, and taps."""
        streams, pre, taps = _run(self._decoder, streams, pre, compressed_ids, step, self._tapped)
        return self.norm(hc_collapse(streams, pre)), taps

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size] -> [num_rows, vocab_size] fp32, valid until the next step."""
        ready = self.graph_logits.take(hidden_states.shape[0])
        return self._logits(hidden_states) if ready is None else ready

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_states, torch.float32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters from checkpoint tensors, whole or this rank's rows; each is consumed exactly once.

        Raises:
            CheckpointError: a tensor is missing, unknown, given twice, or has the wrong shape or dtype.
        """
        return load_into(self, weights, self.config, self.checkpoint_groups, self.parallel)


def _run(
    blocks: tuple[Block, ...],
    streams: torch.Tensor,
    pre: torch.Tensor,
    compressed_ids: torch.Tensor | None,
    step: Step | None,
    tapped: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Pass rows through consecutive layers; streams, pre-mix, and the mean input streams of the ``tapped`` ones.

    No selection goes from the encoder to the decoder: the decoder's first layer is an index source.
    """
    selection: Selection | None = None
    taps = []
    for index, block in enumerate(blocks):
        if block.engram is not None:
            streams = block.engram(streams, compressed_ids, None if step is None else step.is_image)
        if index in tapped:
            taps.append(hc_collapse(streams, torch.full_like(pre, 1.0 / streams.shape[1])))
        streams, pre, selection = block(streams, pre, step, selection)
    return streams, pre, taps


def _token_map(vllm_config: "VllmConfig", config: ModelConfig) -> torch.Tensor:
    """Token id to compressed id for the Engram layers, [vocab_size] int64; empty without such layers."""
    if not config.engram_layer_ids:
        return torch.empty(0, dtype=torch.int64)
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    return build_token_map(tokenizer.backend_tokenizer, config.vocab_size, config.engram_compressed_vocab_size).long()
