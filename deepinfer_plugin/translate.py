"""DEEPINFER_* variables into vLLM's arguments, once, where a process makes its engine's configuration.

A variable that is set and a flag that is given must agree, or the start stops with both names. Importing this module
loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_plugin import answer_provenance, envs, variables
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.variables import Variable
from deepinfer_plugin.wrapping import wrap

MODEL_TYPE = "deepseek_v41"
DRAFT_METHOD = "dspark"


@dataclass(slots=True, kw_only=True)
class Flags:
    """The arguments of vLLM that variables translate into, none of them given; ``EngineArgs`` has the same fields."""

    speculative_config: dict[str, Any] | None = None
    async_scheduling: bool | None = None
    engram_config: Any = None
    enable_eplb: bool = False
    eplb_config: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """What decided a feature that vLLM has an argument for: ``origin`` is a variable or a flag, ``text`` says what."""

    feature: str
    origin: str
    text: str
    is_on: bool


def check_together(settings: Settings) -> None:
    """Rules that span variables.

    Raises:
        SettingError: two variables contradict each other; the text names both.
    """
    environment = settings.environment
    num_drafts = settings[variables.USE_NEXTN_DECODE]
    temperatures = settings[variables.DFLASH_CONFIDENCE_HEAD_TEMPERATURE]
    is_counted = environment.is_set(variables.USE_NEXTN_DECODE)  # else a flag may say how many; the drafter checks it
    if is_counted and len(temperatures) not in (1, num_drafts):
        raise SettingError(
            f"environment: {environment.describe(variables.DFLASH_CONFIDENCE_HEAD_TEMPERATURE)} with "
            f"{len(temperatures)} numbers, expected 1 or {num_drafts}, the value of {variables.USE_NEXTN_DECODE.name}"
        )


def translate(settings: Settings, args: Any) -> list[Translated]:
    """Put the variables that are set into vLLM's arguments.

    Args:
        settings: those of the process.
        args: vLLM's ``EngineArgs``; changed in place. Calling it again changes nothing.

    Returns:
        One entry for each feature that a variable or a flag decided.

    Raises:
        SettingError: a variable asks for what the serving model does not have, or contradicts a variable or a flag.
    """
    check_together(settings)
    for text in envs.refusals(settings.environment, is_our_model=settings.batch_invariant):
        raise SettingError(text)
    steps = (_drafts, _adaptive_verification, _curve_cache, _scheduling, _balancing, _engram)
    found = (step(settings, args) for step in steps)
    return [entry for entry in found if entry is not None]


def install() -> None:
    """Translate whenever this process makes the configuration of an engine for the architecture.

    Raises:
        PlatformError: vLLM's method is not the one this version knows.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "create_model_config", ("self",), _create_model_config)


def _create_model_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Once vLLM knows the model, and before it reads its other arguments."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from deepinfer_plugin.eplb.options import keep_where_vllm_has_no_balancer

    model_config = original(self, *args, **kwargs)
    if model_config.hf_config.model_type == MODEL_TYPE:
        logger, settings = init_logger(f"vllm.{__name__}"), Settings.from_envs()
        for entry in translate(settings, self):
            if entry.origin.startswith(variables.PREFIX):
                logger.info_once("%s: %s", entry.origin, entry.text)
        if settings.batch_invariant:
            if current_platform.is_cpu():
                keep_where_vllm_has_no_balancer(self)
            envs.prepare_metrics_folder()
            num_drafts = count_drafts(self.speculative_config, model_config.hf_config)
            answer_provenance.note(settings, model_config.model, model_config.revision, num_drafts=num_drafts)
    return model_config


def count_drafts(speculative_config: Mapping[str, Any] | None, hf_config: Any) -> int:
    """Tokens drafted in a step under vLLM's configuration, which leaves their number to the checkpoint if it has none.

    Args:
        speculative_config: as a user gives it; None: no drafts.
        hf_config: config.json of the checkpoint, flattened.
    """
    if speculative_config is None:
        return 0
    given = speculative_config.get("num_speculative_tokens")
    return int(hf_config.dspark_block_size if given is None else given)


def _disagree(settings: Settings, variable: Variable[Any], flag: str, expected: str) -> SettingError:
    return SettingError(
        f"settings: {settings.environment.describe(variable)}, but the flag is {flag}, expected {expected}; leave one "
        "of the two out"
    )


def _drafts(settings: Settings, args: Any) -> Translated | None:
    """F1: the number of drafts as vLLM's configuration of speculative decoding."""
    variable, given = variables.USE_NEXTN_DECODE, args.speculative_config
    if not settings.environment.is_set(variable):
        return None if given is None else _by_flag("F1", f"--speculative-config {given}", is_on=True)
    count = settings[variable]
    if count == 0:
        if given is not None:
            raise _disagree(settings, variable, f"--speculative-config {given}", "no such flag")
        return Translated(feature="F1", origin=variable.name, text="no --speculative-config", is_on=False)
    wanted: dict[str, Any] = {"method": DRAFT_METHOD, "num_speculative_tokens": count}
    if not settings.batch_invariant:
        # DeepInfer draws its drafts; vLLM's own default takes the most likely token. Our drafter draws in any case, and
        # what vLLM keeps for its rejection sampler is not needed by an exact match.
        wanted["draft_sample_method"] = "probabilistic"
    for key, value in wanted.items():
        if given is not None and given.get(key, value) != value:
            raise _disagree(settings, variable, f"--speculative-config {given}", f"{key} {value}")
    args.speculative_config = {**(given or {}), **wanted}
    return Translated(feature="F1", origin=variable.name, text=f"--speculative-config {wanted}", is_on=True)


def _adaptive_verification(settings: Settings, args: Any) -> Translated | None:
    """F2: a key of the same configuration, so it comes after F1. Our model's workers choose themselves."""
    variable, key, config = variables.ENABLE_MTP_VARLEN, "enable_adaptive_verification", args.speculative_config
    given = (config or {}).get(key)
    if not settings.environment.is_set(variable):
        return None if given is None else _by_flag("F2", f"--speculative-config {{{key}: {given}}}", is_on=bool(given))
    is_on = settings[variable]
    if given is not None and bool(given) != is_on:
        raise _disagree(settings, variable, f"--speculative-config {{{key}: {given}}}", f"{key} {is_on}")
    if is_on and config is None:
        raise SettingError(
            f"settings: {settings.environment.describe(variable)}, which needs drafts, but there are none; set "
            f"{variables.USE_NEXTN_DECODE.name} or --speculative-config, or unset it"
        )
    if settings.batch_invariant:
        text = "drafts are verified by confidence" if is_on else "all drafts are verified"
        return Translated(feature="F2", origin=variable.name, text=text, is_on=is_on)
    if is_on:
        args.speculative_config = {**config, key: True}
    return Translated(feature="F2", origin=variable.name, text=f"{key} {is_on}", is_on=is_on)


def _curve_cache(settings: Settings, args: Any) -> Translated | None:
    """F4: no argument of vLLM; it is used where F2 is on."""
    del args
    variable = variables.DECODE_PERF_CACHE_DIR
    folder, is_used = settings[variable], settings[variables.ENABLE_MTP_VARLEN]
    if folder is None:
        return None
    text = f"step times are kept in {folder}" if is_used else f"no use without {variables.ENABLE_MTP_VARLEN.name}"
    return Translated(feature="F4", origin=variable.name, text=text, is_on=is_used)


def _scheduling(settings: Settings, args: Any) -> Translated | None:
    """F8: off by variable is off in vLLM; on by variable leaves the choice to vLLM, as its own default does."""
    variable, given = variables.ZERO_OVERHEAD_SCHEDULING, args.async_scheduling
    flag = None if given is None else "--async-scheduling" if given else "--no-async-scheduling"
    if not settings.environment.is_set(variable):
        return None if flag is None else _by_flag("F8", flag, is_on=bool(given))
    is_on = settings[variable]
    if flag is not None and bool(given) != is_on:
        raise _disagree(settings, variable, flag, "--async-scheduling" if is_on else "--no-async-scheduling")
    if not is_on:
        args.async_scheduling = False
    text = "vLLM decides" if is_on else "--no-async-scheduling"
    return Translated(feature="F8", origin=variable.name, text=text, is_on=is_on)


def _balancing(settings: Settings, args: Any) -> Translated | None:
    """F13: replicas of experts; all else of it has a flag of vLLM, or is ours alone."""
    from deepinfer_plugin.eplb.options import is_kept

    variable, feature = variables.OVERRIDE_NUM_EXTRA_EXPERTS, "F13"
    is_on = bool(args.enable_eplb) or is_kept(args)
    if not settings.environment.is_set(variable):
        return _by_flag(feature, "--enable-eplb", is_on=True) if is_on else None
    count = settings[variable]
    given = args.eplb_config.num_redundant_experts if args.eplb_config is not None else 0
    if given not in (0, count):
        raise _disagree(settings, variable, f"--eplb-config num_redundant_experts {given}", f"{count}")
    if count > 0 and not is_on:
        raise SettingError(
            f"settings: {settings.environment.describe(variable)}, which needs experts that move, but they stay; add "
            "--enable-eplb, or unset it"
        )
    if count > 0 and args.enable_eplb:
        args.eplb_config.num_redundant_experts = count
    text = f"--eplb-config num_redundant_experts {count}"
    return Translated(feature=feature, origin=variable.name, text=text, is_on=is_on)


def _engram(settings: Settings, args: Any) -> Translated | None:
    """F15: tables in device memory. Our model keeps them there in any case and reads no such configuration."""
    variable, given = variables.ENGRAM_FORCE_GPU_STORAGE, args.engram_config
    flag = f"--engram-config cpu_offload {given.cpu_offload}" if given is not None else ""
    if not settings.environment.is_set(variable):
        return None if given is None else _by_flag("F15", flag, is_on=not given.cpu_offload)
    is_forced = settings[variable]
    if given is not None and bool(given.cpu_offload) == is_forced:
        raise _disagree(settings, variable, flag, f"cpu_offload {not is_forced}")
    if is_forced and given is None and not settings.batch_invariant:
        from vllm.config.engram import EngramConfig

        args.engram_config = EngramConfig(cpu_offload=False)
    text = "--engram-config cpu_offload False" if is_forced else "vLLM's placement"
    return Translated(feature="F15", origin=variable.name, text=text, is_on=is_forced or settings.batch_invariant)


def _by_flag(feature: str, flag: str, *, is_on: bool) -> Translated:
    return Translated(feature=feature, origin="flag", text=flag, is_on=is_on)
