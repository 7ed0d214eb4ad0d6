"""Our hooks of vLLM's model runner V2."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from deepinfer_kernels.lookback_ids import lookback_ids
from deepinfer_plugin import envs, metrics, variables
from deepinfer_plugin.cache.specs import num_drafts
from deepinfer_plugin.draft.drafter import drafter_of
from deepinfer_plugin.model.parallel import equal_replicas
from deepinfer_plugin.replay import series
from deepinfer_plugin.replay.inputs import ReplayInputs
from deepinfer_plugin.sampling.sampler import DeepInferSampler
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.speculative import series as draft_series
from deepinfer_plugin.speculative.drafts import mend_drafts
from deepinfer_plugin.speculative.record import DraftRecord
from deepinfer_plugin.speculative.verify import ExactMatchVerifier
from deepinfer_plugin.worker.image_inputs import ImageInputs
from deepinfer_plugin.worker.image_state import ImageState
from deepinfer_plugin.worker.replay_state import ReplayState
from deepinfer_plugin.worker.startup_proof import prove_drafter, prove_forward, prove_sampler
from deepinfer_plugin.worker.warm_up import warm_up

if TYPE_CHECKING:
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM

logger = init_logger(f"vllm.{__name__}")


class DeepInferModelState(DefaultModelState):
    """Adds n-gram history and image flags of every row to the model's inputs, and samples with our sampler."""

    supports_prompt_embeds = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: "DeepseekV41ForCausalLM",
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.depth = model.config.engram_max_ngram_size - 1
        # one buffer for the life of the process: a CUDA graph reads the same address at every replay
        self._lookback = torch.full((self.max_num_tokens, self.depth), -1, dtype=torch.int64, device=device)
        self._sampler: DeepInferSampler | None = None
        self._drafter = drafter_of(vllm_config)
        self._replay = ReplayState(model.rule, self.max_num_reqs, self.depth, device)
        self._images: ImageState | None = None
        self._inputs_embeds: torch.Tensor | None = None
        if vllm_config.model_config.supports_multimodal_inputs:
            self._images = ImageState(self.max_num_tokens, self.depth, device, num_drafts(vllm_config))
        if self.supports_mm_inputs:  # the first stage of a pipeline only: it encodes the images
            # vLLM's buffer has the dtype of the checkpoint; the fp32 arithmetics would lose bits of the features in it
            buffer = self.encoder_runner.inputs_embeds
            self.encoder_runner.inputs_embeds = buffer.to(model.arithmetic.activation_dtype)
        self._is_graph = False
        self._attn_metadata: dict[str, Any] | None = None
        self._rows, self._padding_rows = 0, 0
        self._metrics_folder = envs.metrics_folder()
        metrics.PUBLISHER.register(metrics.WORKER_METRICS, self._figures)
        metrics.PUBLISHER.register(series.SERIES, series.figures)

    def _figures(self) -> dict[str, float]:
        return {metrics.ROWS.name: self._rows, metrics.PADDING_ROWS.name: self._padding_rows}

    def custom_sampler(self, sampler: Sampler) -> tuple[DeepInferSampler, ExactMatchVerifier | None]:
        """Our sampler in the place of the stock one, and with drafts our verifier in that of rejection sampling."""
        self._sampler = DeepInferSampler.adopt(sampler)
        count = num_drafts(self.vllm_config)
        if count == 0:
            return self._sampler, None
        self._sampler.drafts = DraftRecord(self.max_num_reqs, count, self.device)
        if self.model.parallel.tensor.rank == 0:  # its ranks see the same drafts
            engine = str(self.vllm_config.parallel_config.data_parallel_index)
            metrics.PUBLISHER.register(draft_series.SERIES, draft_series.DraftSeries(engine).figures)
        if self._drafter is not None:
            self._drafter.bind_sampler(self._sampler)
        return self._sampler, ExactMatchVerifier(self._sampler, count)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Called for a new request and again for one that resumes after preemption, with the same prompt."""
        super().add_request(req_index, new_req_data)
        self._replay.add_request(req_index, new_req_data)
        if self._images is not None:
            self._images.add_request(req_index, new_req_data)
        if self._sampler is None:
            return
        self._sampler.set_prompt(req_index, new_req_data.prompt_token_ids or ())
        params = new_req_data.sampling_params
        is_warm_up = new_req_data.req_id.startswith("_warmup_")
        if self._sampler.drafts is not None and not is_warm_up:
            self._sampler.drafts.begin()
        if params is not None and params.seed is None and params.temperature > 0.0 and not is_warm_up:
            logger.warning_once(
                "sampling: a request came without a seed, expected one from the front end; its answer cannot be "
                "repeated; serve through vLLM's Python front end, which draws a seed and returns it"
            )

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        prove_forward(self.vllm_config, self.model, self.device)
        if self._sampler is not None:
            prove_sampler(self._sampler, self.model.config.vocab_size, self.device)
        if self._drafter is not None:
            prove_drafter(self.vllm_config, self._drafter, num_drafts(self.vllm_config), self.device)
        if self.device.type == "cuda" and Settings.from_envs()[variables.JIT_CACHE_DIR] is not None:
            warm_up(self.vllm_config, self.model, self.device, self._drafter)

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """vLLM calls it before ``prepare_inputs``, which must know whether a graph will compute the step."""
        self._is_graph = cudagraph_mode == CUDAGraphMode.FULL
        metadata: dict[str, Any] = super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)
        self._attn_metadata = metadata
        return metadata

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: InputBatch, req_states: RequestState
    ) -> torch.Tensor:
        """vLLM calls it before ``prepare_inputs``, which reads the rows of images from it."""
        self._mend_drafts(input_batch)
        self._inputs_embeds = super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)
        return self._inputs_embeds

    def _mend_drafts(self, input_batch: InputBatch) -> None:
        """Whatever looks up ids first: a draft may be no id at all."""
        if input_batch.num_draft_tokens > 0:
            mend_drafts(input_batch.input_ids, self.model.config.vocab_size)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        if not self.supports_mm_inputs:  # else they are mended already, see prepare_inputs_embeds
            self._mend_drafts(input_batch)
        inputs = super().prepare_inputs(input_batch, req_states)
        num_tokens = input_batch.num_tokens_after_padding
        graph_rows = num_tokens if self._is_graph else None
        self.model.graph_logits.expect(input_batch.num_tokens, input_batch.logits_indices.shape[0], graph_rows)
        if self._drafter is not None and self._drafter.draws is not None:
            self._drafter.draws.refresh()
        if self.model.load is not None:
            self.model.load.has_prompt_rows = input_batch.has_prefill
        self._rows += input_batch.num_tokens
        self._padding_rows += num_tokens - input_batch.num_tokens
        metrics.PUBLISHER.publish(self._metrics_folder, time.monotonic())
        lookback = self._lookback[:num_tokens]
        ids = lookback_ids(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.query_start_loc,
            input_batch.idx_mapping,
            req_states.all_token_ids.gpu,
            lookback,
        )
        images = None
        if self._images is not None:
            rows = self._images.rows(input_batch)
            ids = rows.block(ids, input_batch.positions[:num_tokens])
            inputs["is_image"] = rows.is_image
            if self.supports_mm_inputs:
                images = ImageInputs(self._images, self.model, self.encoder_runner, self._inputs_embeds)
        if ids is not lookback:  # an image hides some of them
            lookback.copy_(ids)
        plan = self._replay.plan(input_batch)
        replay = self._replay.inputs(plan, input_batch, req_states, lookback, images, is_graph=self._is_graph)
        if self._is_graph and replay.encoder_passes:
            self._replay_before_graph(replay, input_batch)
            replay = replace(replay, encoder_passes=())
        return {**inputs, "lookback_ids": lookback, "replay": replay}

    def _replay_before_graph(self, replay: ReplayInputs, input_batch: InputBatch) -> None:
        """Compute windows again before the graph, which has no place for more rows than the step has.

        The rows of the step run along, as one of them may fill a block that another one has hit; the graph then writes
        the same bytes once more.
        """
        num_tokens = input_batch.num_tokens_after_padding
        across = equal_replicas(self.vllm_config, num_tokens)
        with set_forward_context(
            self._attn_metadata, self.vllm_config, num_tokens=num_tokens, num_tokens_across_dp=across
        ):
            self.model.replay_windows(replay.encoder_passes, input_batch.positions[:num_tokens])

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        if self._images is not None:
            inputs["is_image"] = self._images.dummy_rows(num_tokens).is_image
        return {**inputs, "lookback_ids": self._lookback[:num_tokens], "replay": self._replay.dummy_inputs()}
