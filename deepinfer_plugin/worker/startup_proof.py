"""A forward pass and sampler steps at start-up that look every operation up in the table of batch-invariant ones."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from deepinfer_batch_invariant.gaps import check_forward
from deepinfer_plugin.cache.layers import CacheLayer
from deepinfer_plugin.cache.metadata import CacheMetadata
from deepinfer_plugin.model.parallel import equal_replicas
from deepinfer_plugin.replay.inputs import EncoderPassInputs, ReplayInputs
from deepinfer_plugin.sampling.extras import FORCE_TOP_K, GOLDEN_TOKENS, SUM_SMALLER, TOKEN_BLACKLIST

if TYPE_CHECKING:
    from deepinfer_plugin.draft.drafter import DSparkV41DraftModel
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM
    from deepinfer_plugin.sampling.sampler import DeepInferSampler

logger = init_logger(f"vllm.{__name__}")

_POSITIONS = (0, 1, 2, 70, 71)
"""Two requests: a prompt's first tokens, and two tokens with a past longer than a key tile."""

_STARTS = (0, 3, 5)

# Together they take every stage of the sampler; the first alone takes none of the processing.
_SAMPLING: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "logprobs": 2},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {3: 1.0}, "min_tokens": 1, "stop_token_ids": [4], "logprobs": 0},
    {"temperature": 0.0, "logprob_token_ids": [3, 4]},
    {
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 0,
        "extra_args": {FORCE_TOP_K: 5, TOKEN_BLACKLIST: [[1, 2]], GOLDEN_TOKENS: [3], SUM_SMALLER: True},
    },
)


def prove_forward(vllm_config: VllmConfig, model: "DeepseekV41ForCausalLM", device: torch.device) -> int:
    """Run the model on rows that take both parities, a window edge and a selection, and refuse unproven operations.

    It runs without and with bounded replay, and on an image where the engine takes images.

    Slots are -1 and blocks are the null block, so no cache entry changes: a replayed row writes into the null block,
    which nothing reads.

    Returns:
        Number of operations looked up.

    Raises:
        InvarianceGapError: names every operation without a proof on this device.
    """
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    caches = {name: layer for name, layer in layers.items() if isinstance(layer, CacheLayer)}
    metadata = {name: _metadata(layer, device, _STARTS, _POSITIONS) for name, layer in caches.items()}
    positions = torch.tensor(_POSITIONS, dtype=torch.int64, device=device)
    token_ids = torch.arange(3, 3 + len(_POSITIONS), dtype=torch.int64, device=device)
    lookback = torch.full((len(_POSITIONS), model.config.engram_max_ngram_size - 1), 3, device=device)

    replay = _replay_inputs(token_ids, positions, lookback)

    stage, given = model.parallel.stage, None
    if not stage.is_first:
        given = model.make_empty_intermediate_tensors(len(_POSITIONS), torch.bfloat16, device)

    def run() -> None:
        images = _image_inputs(model, token_ids) if "vision" in model.checkpoint_groups else {}
        for replayed in (None, replay if stage.is_first and stage.is_last else replace(replay, encoder_passes=())):
            output = model(token_ids, positions, given, lookback_ids=lookback, replay=replayed, **images)
            if stage.is_last:
                model.compute_logits(hidden_states_of(output))

    across = equal_replicas(vllm_config, len(_POSITIONS))
    context = set_forward_context(metadata, vllm_config, num_tokens=len(_POSITIONS), num_tokens_across_dp=across)
    with context, torch.inference_mode():
        num_operations = check_forward(run, label="the forward pass")
    logger.info("Batch-invariant mode: every one of %d operations of a forward pass has a proof", num_operations)
    return num_operations


def hidden_states_of(output: torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
    """What the model returned, without the taps for a drafter."""
    return output[0] if isinstance(output, tuple) else output


def prove_drafter(
    vllm_config: VllmConfig, drafter: "DSparkV41DraftModel", num_drafts: int, device: torch.device
) -> int:
    """The same for the draft blocks: context of verified tokens, a pass over the blocks of two requests, drafts.

    Drafts cannot change an answer; that they do not depend on other requests either keeps their number repeatable.

    Returns:
        Number of operations looked up.

    Raises:
        InvarianceGapError: names every operation without a proof on this device.
    """
    starts = (0, num_drafts, 2 * num_drafts)
    places = (*range(3, 3 + num_drafts), *range(72, 72 + num_drafts))  # behind the two requests of the forward pass
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    metadata = {
        name: _metadata(layers[name], device, starts, places) for name in drafter.get_draft_kv_cache_layer_names()
    }
    positions = torch.tensor(places, dtype=torch.int64, device=device)
    config = drafter.config
    taps = torch.ones(len(_POSITIONS), len(config.dspark_target_layer_ids) * config.hidden_size, device=device)
    unwritten = [torch.full((len(_POSITIONS),), -1, dtype=torch.int64, device=device)] * len(metadata)
    slots = torch.tensor([0, -1], dtype=torch.int64, device=device)

    def run() -> None:
        with set_forward_context(metadata, vllm_config, num_tokens=len(places)), torch.inference_mode():
            context = drafter.combine_hidden_states(taps)
            drafter.precompute_and_store_context_kv(context, positions.new_tensor(_POSITIONS), unwritten)
            hidden_states = drafter(torch.full_like(positions, 3), positions)
            drafter.draft(hidden_states, positions[: len(slots)] * 0 + 3, slots, positions.view(2, num_drafts) + 1)

    num_operations = check_forward(run, label="the draft pass")
    logger.info("Batch-invariant mode: every one of %d operations of a draft pass has a proof", num_operations)
    return num_operations


def _image_inputs(model: "DeepseekV41ForCausalLM", token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """An image of more patches than a tile of keys; its first rows stand before the last token."""
    is_image = torch.arange(len(token_ids)) < len(token_ids) - 1
    if not model.parallel.stage.is_first:
        return {"is_image": is_image.to(token_ids.device)}
    vision = model.config.vision_config
    assert vision is not None
    grid = torch.tensor([[7, 10]])
    patches = torch.zeros(70, 3 * vision.patch_size**2, dtype=torch.bfloat16, device=token_ids.device)
    span = model.embed_multimodal(patches=patches, grid=grid)[0][: len(token_ids) - 1]
    embeds = model.embed_input_ids(token_ids, [span], is_multimodal=is_image)
    return {"inputs_embeds": embeds, "is_image": is_image.to(token_ids.device)}


def _replay_inputs(token_ids: torch.Tensor, positions: torch.Tensor, lookback: torch.Tensor) -> ReplayInputs:
    """The second request's first row is replayed before its second one; the first request keeps its last row."""
    kept = torch.tensor([2, 4], dtype=torch.int64, device=positions.device)
    own = torch.tensor([0, 1, 2, 4], dtype=torch.int64, device=positions.device)
    source_rows = torch.tensor([0, 1, 2, -1, 4], dtype=torch.int64, device=positions.device)
    one = EncoderPassInputs(
        input_ids=token_ids,
        lookback_ids=lookback,
        positions=positions,
        req_idx=torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=positions.device),
        floors=torch.zeros_like(positions),
        source_rows=source_rows,
        own_rows=own,
        step_rows=own,
    )
    return ReplayInputs(
        decoder_floors=torch.tensor([2, 0], dtype=torch.int64, device=positions.device),
        decoder_rows=kept,
        encoder_passes=(one,),
    )


def _metadata(
    layer: CacheLayer, device: torch.device, starts: tuple[int, ...], positions: tuple[int, ...]
) -> CacheMetadata:
    num_reqs = len(starts) - 1
    max_seq_len = positions[-1] + 1
    num_blocks = max_seq_len // layer.spec.block_size + 1
    return CacheMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([positions[starts[1] - 1] + 1, max_seq_len], dtype=torch.int32, device=device),
        block_table=torch.zeros(num_reqs, num_blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.full((len(positions),), -1, dtype=torch.int64, device=device),
        block_size=layer.spec.block_size,
        max_seq_len=max_seq_len,
    )


def prove_sampler(sampler: "DeepInferSampler", vocab_size: int, device: torch.device) -> int:
    """Sample and score rows under all kinds of sampling parameters, and refuse unproven operations.

    It writes the parameters of request slots; a request that takes a slot writes them anew.

    Returns:
        Number of operations looked up.

    Raises:
        InvarianceGapError: names every operation without a proof on this device.
    """
    slots = sampler.prompt_hashes.np.shape[0]
    params = [SamplingParams(**values) for values in _SAMPLING]
    batches = [*(params[start : start + slots] for start in range(0, len(params), slots)), params[:1]]
    generator = torch.Generator().manual_seed(0)
    num_operations = 0
    for batch in batches:
        for slot, each in enumerate(batch):
            sampler.set_prompt(slot, (slot,))
            sampler.add_request(slot, each)
        sampler.apply_staged_writes()
        logits = torch.randn(len(batch), vocab_size, generator=generator).to(device)
        step = InputBatch.make_dummy(len(batch), len(batch), InputBuffers(len(batch), len(batch), device))
        num_operations += check_forward(partial(_sample, sampler, logits, step), label="the sampler")
    logger.info("Batch-invariant mode: every one of %d operations of the sampler has a proof", num_operations)
    return num_operations


def _sample(sampler: "DeepInferSampler", logits: torch.Tensor, step: InputBatch) -> None:
    with torch.inference_mode():
        sampler(logits, step)
