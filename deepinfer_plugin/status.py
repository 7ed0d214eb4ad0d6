"""One row per feature of DeepInfer: on, off or not built, why, and from where; and the machine it holds for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_plugin import compat, envs, provenance
from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.features import NOT_BUILT, OFF, ON, ROWS, VLLM, Row, State
from deepinfer_plugin.platforms.capabilities import Capabilities, check_kernel_set
from deepinfer_plugin.platforms.detect import Decision, current_decision
from deepinfer_plugin.replay.status_rows import cost_lines, with_replay
from deepinfer_plugin.settings import Accelerator, Settings
from deepinfer_plugin.translate import Flags, Translated, translate
from deepinfer_plugin.variables import BATCH_INVARIANT, VARIABLES

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One row. ``origin`` says who decided: the plugin, vLLM, a request, the environment, or a default."""

    key: str
    name: str
    state: State
    why: str
    origin: str
    values: Mapping[str, str]  # texts of its variables that are set


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What runs on this machine; ``problems`` are the reasons why a start of vLLM would be refused."""

    provenance: dict[str, object]
    settings: dict[str, object]  # all of them; provenance holds those that answers may depend on
    decision: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    features: tuple[Feature, ...]

    @classmethod
    def from_process(cls, flags: Any = None) -> Status:
        """Look at this process's environment and machine.

        Args:
            flags: vLLM's ``EngineArgs`` as a command line gave them; None where there are none.

        Raises:
            SettingError: a DEEPINFER_* variable has a value outside its rule.
        """
        settings = Settings.from_envs()
        problems: list[str] = []
        decision: Decision | None = None
        try:
            compat.check_vllm_version(compat.installed_vllm())
        except PlatformError as error:
            problems.append(str(error))
        try:
            decision = current_decision()
        except PlatformError as error:
            problems.append(str(error))
        if decision is None:
            reason = "DEEPINFER_DISABLE=1" if settings.disable else "the machine is refused, see the problems"
            decision = Decision(accelerator=Accelerator.CPU, platform=None, why=reason)
        is_active = not settings.disable and not problems and decision.model_refusal is None
        translated: list[Translated] = []
        if not settings.disable:
            try:
                check_kernel_set(settings, decision)
                translated = translate(settings, flags or Flags())
            except SettingError as error:
                problems.append(str(error))
        return cls(
            provenance=provenance.collect(settings, Capabilities.from_decision(decision)),
            settings=settings.to_json(),
            decision=decision.why,
            problems=tuple(problems),
            warnings=(*envs.warnings(), *decision.warnings),
            features=features(settings, is_active=is_active, translated=translated),
        )

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    def to_text(self) -> str:
        """The table a person reads."""
        lines: list[str] = []
        for section in ("versions", "machine", "settings"):
            values = self.settings if section == "settings" else self.provenance[section]
            assert isinstance(values, dict)
            lines.append(section)
            lines += [f"  {name:<34} {value}" for name, value in values.items()]
        lines.append(f"  {'decision':<34} {self.decision}")
        patches = self.provenance["patches"]
        assert isinstance(patches, list)
        lines += ["changes to vLLM", *(f"  {patch}" for patch in patches or ["none"])]
        lines.append("features")
        for row in self.features:
            values = "".join(f", {name}={text}" for name, text in row.values.items())
            lines.append(f"  {row.key:<4} {row.state:<9} {row.name:<36} {row.why} [{row.origin}{values}]")
        lines += ["cached prefix, released size", *(f"  {line}" for line in cost_lines())]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"problem: {text}" for text in self.problems]
        return "\n".join(lines)


def features(settings: Settings, *, is_active: bool, translated: Sequence[Translated] = ()) -> tuple[Feature, ...]:
    """The rows F1-F28 and our own, in order.

    Args:
        settings: those of the process.
        is_active: whether the plugin takes part at all; if not, no row of it is on.
        translated: what variables and flags decided in vLLM's arguments.
    """
    is_ours = is_active and settings.batch_invariant
    decided = {entry.feature: entry for entry in translated}
    rows = (with_replay(row, settings.replay) for row in ROWS)
    return tuple(_feature(row, settings, decided.get(row.key), is_ours=is_ours) for row in rows)


def _feature(row: Row, settings: Settings, decided: Translated | None, *, is_ours: bool) -> Feature:
    environment = settings.environment
    values = {v.name: environment.texts[v.name] for v in VARIABLES if v.feature == row.key and environment.is_set(v)}
    state, why, origin = row.state, row.why, "environment" if values else row.decided_by
    if not is_ours and row.decided_by != VLLM:
        state, why = OFF, "vLLM's own model serves"
        origin = "environment" if environment.is_set(BATCH_INVARIANT) else DEFAULT
    elif row.key == BATCH_INVARIANT.feature and not values:
        origin = DEFAULT
    if decided is not None and is_ours and state == NOT_BUILT:
        why += f"; the start refuses {decided.text}" if decided.is_on else ""
    elif decided is not None:
        state = ON if decided.is_on else OFF
        why = f"{why}; {decided.text}" if is_ours else f"vLLM's own model: {decided.text}"
        origin = "flag" if decided.origin == "flag" else "environment"
    return Feature(key=row.key, name=row.name, state=state, why=why, origin=origin, values=values)
