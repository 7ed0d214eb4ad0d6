"""Checks in the front-end process, before an engine starts: configuration, checkpoint files, engine options."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig
from vllm.platforms import current_platform

from deepinfer_plugin import envs, variables
from deepinfer_plugin.cache.specs import block_size, num_drafts
from deepinfer_plugin.encoding import renderer_mode
from deepinfer_plugin.eplb.options import EplbOptions
from deepinfer_plugin.errors import ConfigError, SettingError
from deepinfer_plugin.grammar import admission, trigger
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.graphs import graph_mode
from deepinfer_plugin.model.parallel import check_sizes, dealt_ranks
from deepinfer_plugin.model.stage import stages_of
from deepinfer_plugin.model.weights import check_checkpoint, check_tokenizer
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, MODE_VARIABLE, ReplaySettings
from deepinfer_plugin.sampling import front_end
from deepinfer_plugin.sampling.server_defaults import check_server_defaults
from deepinfer_plugin.settings import Arithmetic, Settings
from deepinfer_plugin.speculative.front_end import install as allow_parameters_beside_drafts
from deepinfer_plugin.worker import live_code

if TYPE_CHECKING:
    from vllm.config import ModelConfig as EngineModelConfig
    from vllm.config import SpeculativeConfig, VllmConfig

DRAFT_METHODS = ("dspark", "ngram")
"""Who may draft. The answer depends on neither of them: verification is by exact match."""

logger = init_logger(f"vllm.{__name__}")


class DeepseekV41Checks(DeepseekV4ForCausalLMConfig):
    """vLLM's hook for the architecture: what vLLM does there, then our checks.

    Raises:
        SettingError: vLLM's own switch contradicts ours, or a variable names tokens that the model does not have.
        ConfigError: config.json or an engine option is one that the model cannot serve.
        CheckpointError: a file of a local checkpoint is missing, damaged or contradicts another one.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "EngineModelConfig") -> None:
        device = "cuda" if current_platform.is_cuda() else "cpu"
        envs.pin_vllm_batch_invariance(device)
        envs.enter_batch_invariant_mode(device)
        config = ModelConfig.from_hf(model_config.hf_config)
        model_dir = Path(model_config.model)
        if model_dir.is_dir() and any(model_dir.glob("*.safetensors*")):  # none where only speed is measured
            check_tokenizer(model_dir, config)
            check_checkpoint(model_dir, config)
        DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)
        renderer_mode.choose(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        check_engine_options(vllm_config)
        check_parallel_sizes(vllm_config)
        check_stages(vllm_config)
        check_replay(vllm_config, Settings.from_envs().replay)
        check_server_defaults(Settings.from_envs(), vllm_config.model_config.get_vocab_size())
        _keep_encoder_windows(vllm_config, Settings.from_envs().replay)
        check_images(vllm_config)
        if vllm_config.cache_config.swa_bounded_replay:
            vllm_config.cache_config.swa_bounded_replay = False
            logger.info("vLLM's own SWA bounded replay is off; ours follows DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE")
        front_end.install()
        admission.install()
        trigger.install()
        allow_parameters_beside_drafts()
        require_xgrammar(vllm_config)
        limit_grammar_cache(Settings.from_envs())
        if not vllm_config.parallel_config.worker_extension_cls:  # a user's own, as reinforcement learning needs, stays
            vllm_config.parallel_config.worker_extension_cls = live_code.CLASS_PATH
        compilation = vllm_config.compilation_config
        # Products of fp32 rows, for tests, are the plain references: they ask the device for sizes.
        is_captured = Settings.from_envs().arithmetic is Arithmetic.REF and not vllm_config.model_config.enforce_eager
        has_graphs = current_platform.is_cuda() and is_captured
        compilation.cudagraph_mode = graph_mode(compilation.cudagraph_mode, has_graphs=has_graphs)


def check_replay(vllm_config: "VllmConfig", replay: ReplaySettings) -> None:
    """Refuse replay settings that the model or the engine cannot keep.

    Raises:
        SettingError: too few kept rows, or a segment that is no multiple of the block.
        ConfigError: KV blocks come from elsewhere, or drafts would cross a border.
    """
    config = ModelConfig.from_hf(vllm_config.model_config.hf_config)
    replay.check_model(config.sliding_window, num_drafts(vllm_config), block_size(vllm_config))
    if replay.is_on and vllm_config.kv_transfer_config is not None:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: kv_transfer_config is set and {MODE_VARIABLE} is {replay.mode.value!r}, expected "
            "no KV transfer: its hits do not keep to the floor of the prompt; leave it out, or set the mode to off"
        )
    if replay.encoder.kind != "exact" and vllm_config.speculative_config is not None:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: speculative_config is set and {ENCODER_VARIABLE} is {str(replay.encoder)!r}, "
            "expected exact: with drafts the host does not know which row crosses a border"
        )
    if replay.is_approximate:
        logger.warning(
            "replay: %s is bounded: a prefix hit changes the bits of an answer, by the length of the hit",
            ENCODER_VARIABLE,
        )


def check_images(vllm_config: "VllmConfig") -> None:
    """Refuse or correct image options with which a request could reach the images of another one.

    Raises:
        ConfigError: the option, and what to do.
    """
    options = vllm_config.model_config.multimodal_config
    if options is None or not vllm_config.model_config.supports_multimodal_inputs:
        return
    if options.enable_mm_embeds:
        raise ConfigError(
            "DeepseekV41ForCausalLM: enable_mm_embeds is True, expected False: rows that a user computed are no image; "
            "leave --enable-mm-embeds out"
        )
    if options.mm_processor_cache_gb:
        # A request that is refused behind the front end (a prompt that is too long) would leave an image there that the
        # engine never got: the next request for that image would fail. Bounded replay needs the patches, too.
        options.mm_processor_cache_gb = 0
        logger.info("Images are sent to the engine with every request: mm_processor_cache_gb is 0")
    if not current_platform.is_cuda():
        options.skip_mm_profiling = True  # it measures the memory of an accelerator
    envs.refuse_media_redirects()


def _keep_encoder_windows(vllm_config: "VllmConfig", replay: ReplaySettings) -> None:
    """Under ``exact`` keep the windows at every boundary, unless the user spaces them out.

    vLLM's default, 0, keeps those at the end of a prompt only. A hit ends at the floor of the prompt or before it, and
    would then never find them.
    """
    cache = vllm_config.cache_config
    if replay.is_on and replay.encoder.kind == "exact" and cache.prefix_cache_retention_interval == 0:
        cache.prefix_cache_retention_interval = None
        logger.info("Prefix cache: encoder windows are kept at every block, as %s=exact needs", ENCODER_VARIABLE)


def require_xgrammar(vllm_config: "VllmConfig") -> None:
    """Make XGrammar the only backend of structured output.

    An engine keeps the backend of its first constraint. With ``auto`` a request whose schema only another backend knows
    would make the engine refuse every later request that this one is not for.

    Raises:
        ConfigError: the user chose another backend.
    """
    options = vllm_config.structured_outputs_config
    if options.backend not in ("auto", "xgrammar"):
        raise ConfigError(
            f"DeepseekV41ForCausalLM: structured_outputs_config.backend is {options.backend!r}, expected auto or "
            "xgrammar; the limits on constraints hold for XGrammar only, leave the option out"
        )
    options.backend = "xgrammar"


def limit_grammar_cache(settings: Settings) -> None:
    """Hand the limit on compiled grammars to vLLM where the user set one; vLLM's default is the variable's default.

    Raises:
        SettingError: vLLM's own variable says otherwise.
    """
    variable = variables.XGRAMMAR_CACHE_LIMIT_BYTES
    if not settings.environment.is_set(variable):
        return
    envs.limit_grammar_cache(settings[variable])
    if settings[variable] < 0:
        logger.warning("%s is -1: the memory of compiled grammars has no limit; set a number of bytes", variable.name)


def check_stages(vllm_config: "VllmConfig") -> None:
    """Refuse stages of a pipeline that the model cannot be cut into, and what needs all layers in one process.

    Raises:
        ConfigError: the option, and what to do.
    """
    parallel = vllm_config.parallel_config
    num_stages = parallel.pipeline_parallel_size
    if num_stages == 1:
        return
    stages_of(ModelConfig.from_hf(vllm_config.model_config.hf_config), num_stages)
    replay = Settings.from_envs().replay
    refused = {
        "speculative_config": vllm_config.speculative_config is not None,
        "enable_eplb": EplbOptions.of_engine(vllm_config) is not None,  # on the CPU vLLM does not see the flag
        "data_parallel_size": parallel.data_parallel_size > 1,  # steps of replicas that share experts must meet
        f"{ENCODER_VARIABLE}={replay.encoder!s}": replay.encoder.kind != "exact",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"DeepseekV41ForCausalLM: pipeline_parallel_size is {num_stages} with {name}, which this version "
                "serves on one stage only; leave one of the two out, or use --tensor-parallel-size"
            )


def check_parallel_sizes(vllm_config: "VllmConfig") -> None:
    """Refuse numbers of ranks that do not divide the model.

    Raises:
        ConfigError: names the size and what it does not divide.
    """
    parallel = vllm_config.parallel_config
    tensor_size = parallel.tensor_parallel_size
    replicas = parallel.data_parallel_size if parallel.enable_expert_parallel else 1
    config = ModelConfig.from_hf(vllm_config.model_config.hf_config)
    replay = Settings.from_envs().replay
    if replicas > 1 and replay.encoder.kind != "exact":
        raise ConfigError(
            f"DeepseekV41ForCausalLM: data_parallel_size is {replicas} with enable_expert_parallel and "
            f"{ENCODER_VARIABLE} is {str(replay.encoder)!r}, expected exact: replicas do not agree on replayed rows"
        )
    balancing = EplbOptions.of_engine(vllm_config)
    if balancing is not None:
        has_expert_parallel = parallel.enable_expert_parallel
        balancing.check(config.n_routed_experts, tensor_size * replicas, has_expert_parallel=has_expert_parallel)
        if balancing.is_async:
            logger.info("Experts are moved between two steps: use_async of --eplb-config has no effect")
    has_drafts = vllm_config.speculative_config is not None
    if has_drafts and replicas > 1:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: data_parallel_size is {replicas} with enable_expert_parallel and "
            "speculative_config set, expected no drafts: replicas do not agree on the rows of a draft pass; leave "
            "--speculative-config or --enable-expert-parallel out"
        )
    expert_size = dealt_ranks(vllm_config)
    check_sizes(config, tensor_size, expert_size, has_drafts=has_drafts, are_replicated=balancing is not None)


def check_verification(speculative: "SpeculativeConfig", settings: Settings) -> None:
    """Refuse a choice of verified drafts that nobody can make.

    Raises:
        ConfigError: vLLM's own choice is asked for.
        SettingError: ours is, for drafts without confidence.
    """
    if speculative.enable_adaptive_verification:
        raise ConfigError(
            "DeepseekV41ForCausalLM: speculative_config.enable_adaptive_verification is True, expected False: it "
            "changes lengths on the device behind the host's back, is reported broken on SM90 and does not run on a "
            f"CPU; leave it out and set {variables.ENABLE_MTP_VARLEN.name}=1, which chooses on the host"
        )
    if settings[variables.ENABLE_MTP_VARLEN] and speculative.method != "dspark":
        raise SettingError(
            f"DeepseekV41ForCausalLM: {settings.environment.describe(variables.ENABLE_MTP_VARLEN)} with drafts of "
            f"{speculative.method!r}, expected dspark: only the checkpoint's own have a confidence; unset it"
        )


def check_engine_options(vllm_config: "VllmConfig") -> None:
    """Refuse what this version cannot serve, naming the option.

    Raises:
        ConfigError: context parallelism, drafts of another kind than the checkpoint's, LoRA, or an odd block size.
        SettingError: see ``check_verification``.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name)
        if size != 1:
            raise ConfigError(
                f"DeepseekV41ForCausalLM: {name} is {size}, expected 1; this version divides no context, use "
                "--tensor-parallel-size, --enable-expert-parallel, --data-parallel-size or --pipeline-parallel-size"
            )
    for name, reason in (
        ("enable_elastic_ep", "the number of ranks stays as it is while an engine runs"),
        ("enable_dbo", "micro-batches of the Engram layers are not supported"),
    ):
        if getattr(parallel, name):
            raise ConfigError(f"DeepseekV41ForCausalLM: {name} is True, expected False; {reason}, leave the flag out")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFT_METHODS:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: speculative_config.method is {speculative.method!r}, expected "
            f"{' or '.join(DRAFT_METHODS)}; no other drafter is tested with this model"
        )
    if speculative is not None:
        check_verification(speculative, Settings.from_envs())
    if vllm_config.lora_config is not None:
        raise ConfigError("DeepseekV41ForCausalLM: lora_config is set, expected none; leave --enable-lora out")
    if cache.user_specified_block_size and cache.block_size % 32 != 0:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: block_size is {cache.block_size}, expected a multiple of 32; "
            "leave --block-size out for the default"
        )
