"""What ``register()`` adds to vLLM, in order. Safe to run twice in a process, and in each of vLLM's processes."""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING

from deepinfer_plugin import compat, envs, translate, variables
from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.platforms.capabilities import check_kernel_set
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.scheduling import concurrent_batches
from deepinfer_plugin.settings import Accelerator, Settings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_MODULE = "deepinfer_plugin.model"
MODEL_CLASS = "DeepseekV41ForCausalLM"
DRAFT_ARCHITECTURE = "DSparkV41DraftModel"  # vLLM gives this name to the draft blocks of a DeepSeek-V4.1 checkpoint
DRAFT_MODULE = "deepinfer_plugin.draft"
DRAFT_CLASS = "DSparkV41DraftModel"

# vLLM shows the INFO lines of loggers below "vllm" only.
LOGGER_NAME = f"vllm.{__name__}"


def register_all() -> None:
    """Check the settings and the machine, then put our model class in the place of vLLM's own.

    Raises:
        SettingError: a DEEPINFER_* variable has a value outside its rule.
        PlatformError: this machine or this vLLM cannot run the plugin.
    """
    settings = Settings.from_envs()
    if settings.disable:
        return
    _check_target_device(envs.vllm_target_device())
    decision = current_decision()
    assert decision is not None, "the plugin is not disabled"
    if decision.model_refusal is None:
        compat.check_vllm_version(compat.installed_vllm())
    from vllm.logger import init_logger

    logger = init_logger(LOGGER_NAME)
    is_first_process = multiprocessing.parent_process() is None
    if is_first_process:
        for warning in (*envs.warnings(), *(decision.warnings if settings.batch_invariant else ())):
            logger.warning(warning)
    translate.check_together(settings)
    if decision.model_refusal is not None:
        _refuse_model(decision.model_refusal, settings)
        return
    check_kernel_set(settings, decision)
    translate.install()
    if not settings.batch_invariant:
        if is_first_process and decision.accelerator is Accelerator.CPU:
            logger.warning(
                "registration: DEEPINFER_BATCH_INVARIANT is 0, which leaves %s to vLLM's own model, and that cannot "
                "run on this machine (%s); unset it to serve with our model",
                ARCHITECTURE,
                decision.why,
            )
        return
    envs.use_kernel_cache(settings[variables.JIT_CACHE_DIR])
    owner = _register_model(ARCHITECTURE, MODEL_MODULE, MODEL_CLASS)
    _register_model(DRAFT_ARCHITECTURE, DRAFT_MODULE, DRAFT_CLASS)
    _register_checks()
    _register_renderer()
    concurrent_batches.install()
    _prepare_engine_process()
    if owner.split(".")[0] not in ("", "vllm", "deepinfer_plugin"):
        logger.warning(
            "registration: %s was registered by %s; our model takes its place; DEEPINFER_BATCH_INVARIANT=0 keeps it",
            ARCHITECTURE,
            owner,
        )


def _check_target_device(target: str | None) -> None:
    """vLLM skips every platform plugin, ours too, when VLLM_TARGET_DEVICE is cpu."""
    if target is not None and target.lower() == "cpu":
        raise PlatformError(
            f"registration: VLLM_TARGET_DEVICE is {target!r}, with which vLLM skips platform plugins and needs its own "
            "CPU build; unset it and use DEEPINFER_ACCELERATOR=cpu, or set DEEPINFER_DISABLE=1 to skip this plugin"
        )


def _register_model(architecture: str, module: str, class_name: str) -> str:
    """Register our class unless it is registered; returns the module that owned the architecture before, or ""."""
    from vllm import ModelRegistry

    present = ModelRegistry.models.get(architecture)
    owner = getattr(present, "module_name", None) or getattr(getattr(present, "model_cls", None), "__module__", "")
    if owner != module:
        ModelRegistry.register_model(architecture, f"{module}:{class_name}")
    return str(owner)


class _Checks:
    """vLLM's per-architecture hook, resolved late: ``register()`` runs while vLLM's own modules are being imported."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        from deepinfer_plugin.model.checks import DeepseekV41Checks

        DeepseekV41Checks.verify_and_update_model_config(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        from deepinfer_plugin.model.checks import DeepseekV41Checks

        DeepseekV41Checks.verify_and_update_config(vllm_config)


def _refuse_model(reason: str, settings: Settings) -> None:
    """Let other models pass and refuse our architecture, unless the user has left it to vLLM.

    A vLLM of another series, as vllm-ascend may need it, does not know the architecture and is left as it is.
    """
    if not settings.batch_invariant or not compat.is_of_supported_series(compat.installed_vllm()):
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP[ARCHITECTURE] = refusing_checks(reason)


def refusing_checks(reason: str) -> type[_Checks]:
    """vLLM's per-architecture hook that ends the start with one reason."""

    class Refused(_Checks):
        @staticmethod
        def verify_and_update_model_config(model_config: ModelConfig) -> None:
            del model_config
            raise PlatformError(reason)

    return Refused


def _register_checks() -> None:
    """Put our checks in front of vLLM's for this architecture, see ``compat.PATCHES``."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP[ARCHITECTURE] = _Checks


def _register_renderer() -> None:
    """Make our tokenizer mode known; the checks choose it for our model."""
    from deepinfer_plugin.encoding import renderer_mode

    renderer_mode.register()


def _prepare_engine_process() -> None:
    """Change vLLM's grammars where the engine runs in a process of its own; elsewhere the checks do it."""
    if "vllm.v1.engine.core" in sys.modules:
        from deepinfer_plugin.grammar import trigger

        trigger.install()
