"""Supported vLLM versions, and the ledger of what the plugin changes in vLLM. Loads neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from deepinfer_plugin.errors import PlatformError

SUPPORTED_VLLM = ">=0.33.0,<0.34"
SUPPORTED_SERIES = "0.33"
_OLDEST = (0, 33, 0)
_TOO_NEW = (0, 34)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to vLLM's behaviour that no extension point offers."""

    what: str
    why: str
    upstream: str
    removal: str


PATCHES: tuple[Patch, ...] = (
    Patch(
        what="torch op _C::init_cpu_memory_env defined where vLLM's compiled CPU extension is absent",
        why="CPUWorker calls it; the released wheel carries CUDA code only. It binds memory to a NUMA node: no result "
        "depends on it",
        upstream="vllm/v1/worker/cpu_worker.py, vLLM 0.33.0",
        removal="the released wheel runs CPUWorker without its CPU extension",
    ),
    Patch(
        what="entry DeepseekV41ForCausalLM of vllm.model_executor.models.config.MODELS_CONFIG_MAP replaced by a class "
        "that calls vLLM's and then checks configuration, checkpoint and options",
        why="a wrong checkpoint or option should end in one error before an engine process starts; no extension point "
        "runs there for a model",
        upstream="vllm/model_executor/models/config.py, vLLM 0.33.0",
        removal="vLLM calls a hook of the registered model class from ModelConfig",
    ),
    Patch(
        what="EngineArgs.create_model_config wrapped: our architecture's DEEPINFER_* variables become arguments",
        why="nowhere else are the model's type and the arguments as the user gave them known together, and a variable "
        "that contradicts a flag must stop the start",
        upstream="vllm/engine/arg_utils.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="a platform or a model class may change the engine's arguments before its configuration is made",
    ),
    Patch(
        what="modules of Triton forgotten once, before vLLM imports them, on a host without an accelerator",
        why="import torch of PyTorch 2.14 imports Triton before the platform can switch its interpreter on",
        upstream="torch/_dynamo/utils.py, PyTorch 2.14.0",
        removal="TRITON_INTERPRET takes effect after Triton's import, or torch imports Triton late",
    ),
    Patch(
        what="InputProcessor.process_inputs wrapped: a request of our model gets its seed before the engine sees it",
        why="an answer drawn without a seed could not be repeated; Platform.validate_request sees the caller's own "
        "parameters, which several prompts may share, and may not change them",
        upstream="vllm/v1/engine/input_processor.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="a hook may change the engine's copy of a request's sampling parameters",
    ),
    Patch(
        what="AsyncLLM.add_request wrapped: a constraint on an answer of our model is compiled in a child first",
        why="vLLM parses constraints in the event loop without a limit; what hangs or crashes there takes all requests "
        "with it, and no hook for requests may wait",
        upstream="vllm/v1/engine/async_llm.py, vLLM 0.33.0; Platform.validate_request is called in the event loop",
        removal="vLLM limits the time and memory of constraints, or has an asynchronous hook for requests",
    ),
    Patch(
        what="StructuredOutputManager._create_grammar wrapped: a request with trigger token ids gets its grammar "
        "behind them",
        why="structural tags start at texts, and a reasoning parser at one token per model; DeepInfer's grammars start "
        "at token ids of the request",
        upstream="vllm/v1/structured_output/__init__.py, vLLM 0.33.0: backends are chosen among four names",
        removal="vLLM takes a backend of a plugin, or knows trigger token ids",
    ),
    Patch(
        what="LogprobsProcessor._update_sample_logprobs wrapped: the columns of sum_smaller_probs and draft_facts are "
        "taken out",
        why="they have to reach the answer; a sampler can hand nothing but log-probabilities to the front end",
        upstream="vllm/v1/engine/logprobs.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="SamplerOutput carries fields of a plugin",
    ),
    Patch(
        what="RequestState.from_new_request and _new_request_output wrapped: our RequestOutput has fields seed, "
        "replay, sum_smaller_probs and draft_facts",
        why="the seed, the function that was served and what was asked for must come back with the answer; "
        "RequestOutput has no field for a plugin",
        upstream="vllm/v1/engine/output_processor.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="RequestOutput carries the sampling parameters, or fields of a plugin",
    ),
    Patch(
        what="KVCacheManager.get_computed_blocks wrapped: it passes on the longest hit that bounded replay allows",
        why="rows from the decoder's floor on need the encoder's output, which is not cached; the limit follows from "
        "the prompt's own length, and no extension point of a model or cache sees a request",
        upstream="vllm/v1/core/kv_cache_manager.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="a KV-cache specification may limit the hit of a request",
    ),
    Patch(
        what="KVCacheManager.allocate_slots wrapped: under bounded replay a running request of our model that crosses "
        "no border of blocks is given none without asking",
        why="it is asked for every request of every step; of a decode step of 64 requests this took two thirds of the "
        "planning",
        upstream="vllm/v1/core/kv_cache_manager.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="vLLM's scheduler asks where a block may be missing only",
    ),
    Patch(
        what="VllmConfig.max_concurrent_batches and AsyncScheduler._update_after_schedule wrapped: with "
        "max_concurrent_batches of --additional-config our model's engine plans further ahead, and a request with a "
        "grammar waits for its last token",
        why="vLLM plans one step ahead, which is too short where the host needs longer than a step from one result to "
        "the launch that follows it",
        upstream="vllm/config/vllm.py and vllm/v1/core/sched/async_scheduler.py, vLLM 0.33.0; wrapping.py checks them",
        removal="vLLM has an option for the number of steps under way",
    ),
    Patch(
        what="SamplingParams._validate_spec_decode wrapped: a request of our model may have min_p and logit_bias "
        "beside drafts",
        why="vLLM refuses them because its rejection sampler leaves them out; our verifier draws every row with all of "
        "them",
        upstream="vllm/sampling_params.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="vLLM asks the sampler of a model which parameters it takes",
    ),
    Patch(
        what="ModelCudaGraphManager.__init__ wrapped: with DEEPINFER_ENABLE_MTP_VARLEN=1 our model's decode graphs are "
        "captured for any mix of 1 to 1 + drafts rows",
        why="vLLM does so beside its own adaptive verification only; without it a step in which one request verifies "
        "fewer drafts than another runs without a graph",
        upstream="vllm/v1/worker/gpu/cudagraph_utils.py, vLLM 0.33.0; wrapping.py checks the parameters",
        removal="a model or worker may ask for graphs of ragged decode steps",
    ),
)


def installed_vllm() -> str | None:
    """Version of the installed vLLM, read without importing it; None where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def series(text: str) -> str:
    """Major and minor number of a version: 0.23.0.post1 -> 0.23."""
    return ".".join(str(number) for number in _release(text)[:2])


def is_of_supported_series(found: str | None) -> bool:
    """Whether a version, of vLLM or of a package that follows its numbers, belongs to the supported series."""
    return found is not None and series(found) == SUPPORTED_SERIES


def check_vllm_version(found: str | None) -> None:
    """Refuse a vLLM that this plugin was not tested with.

    Args:
        found: the installed version, or None.

    Raises:
        PlatformError: the version is outside SUPPORTED_VLLM.
    """
    if found is not None and _OLDEST <= _release(found) < _TOO_NEW:
        return
    raise PlatformError(
        f"registration: vLLM is {found or 'not installed'}, expected {SUPPORTED_VLLM}; run "
        f"pip install 'vllm{SUPPORTED_VLLM}', or set DEEPINFER_DISABLE=1 to use vLLM without this plugin"
    )


def _release(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: 0.33.1rc2+cpu -> (0, 33, 1)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
