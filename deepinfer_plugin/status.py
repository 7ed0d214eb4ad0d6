"""One row per feature of DeepInfer: on, off or not built, why, and from where; and the machine it holds for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_plugin import compat, envs, provenance
from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.features import OFF, ROWS, VLLM, Row, State
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import Decision, current_decision
from deepinfer_plugin.replay.status_rows import cost_lines, with_replay
from deepinfer_plugin.settings import Accelerator, Settings
from deepinfer_plugin.variables import BATCH_INVARIANT, VARIABLES, Variable


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
    decision: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    features: tuple[Feature, ...]

    @classmethod
    def from_process(cls) -> Status:
        """Look at this process's environment and machine.

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
        is_active = not settings.disable and not problems
        if not settings.disable:
            problems += envs.refusals(settings.environment, is_our_model=settings.batch_invariant)
        return cls(
            provenance=provenance.collect(settings, Capabilities.from_decision(decision)),
            decision=decision.why,
            problems=tuple(problems),
            warnings=tuple(envs.warnings()),
            features=features(settings, is_active=is_active),
        )

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    def to_text(self) -> str:
        """The table a person reads."""
        lines: list[str] = []
        for section in ("versions", "machine", "settings"):
            values = self.provenance[section]
            assert isinstance(values, dict)
            lines.append(section)
            lines += [f"  {name:<20} {value}" for name, value in values.items()]
        lines.append(f"  {'decision':<20} {self.decision}")
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


def features(settings: Settings, *, is_active: bool) -> tuple[Feature, ...]:
    """The rows F1-F28 and our own, in order.

    Args:
        settings: those of the process.
        is_active: whether the plugin takes part at all; if not, no row of it is on.
    """
    is_ours = is_active and settings.batch_invariant
    return tuple(_feature(with_replay(row, settings.replay), settings, is_ours=is_ours) for row in ROWS)


def _feature(row: Row, settings: Settings, *, is_ours: bool) -> Feature:
    deciding = BATCH_INVARIANT if not is_ours else _deciding(row.key, settings)
    origin = "environment" if deciding is not None and settings.environment.is_set(deciding) else None
    if not is_ours and row.decided_by != VLLM:
        why = "vLLM's own model serves"
        return Feature(key=row.key, name=row.name, state=OFF, why=why, origin=origin or "default", values={})
    values = {v.name: settings.environment.texts[v.name] for v in VARIABLES if _is_set(v, row.key, settings)}
    if row.key == BATCH_INVARIANT.feature and origin is None:
        origin = "default"
    return Feature(
        key=row.key, name=row.name, state=row.state, why=row.why, origin=origin or row.decided_by, values=values
    )


def _deciding(key: str, settings: Settings) -> Variable[Any] | None:
    """The first variable of the feature that is set."""
    return next((variable for variable in VARIABLES if _is_set(variable, key, settings)), None)


def _is_set(variable: Variable[Any], key: str, settings: Settings) -> bool:
    return variable.feature == key and settings.environment.is_set(variable)
