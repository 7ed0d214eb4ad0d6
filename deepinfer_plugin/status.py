"""One row per feature of DeepInfer: on or off, why, and from where; and the machine it holds for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from deepinfer_plugin import compat, envs, provenance
from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import Decision, current_decision
from deepinfer_plugin.settings import Accelerator, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One row. ``origin`` says who decided: the plugin, vLLM, a request, the environment, or a default."""

    key: str
    name: str
    is_on: bool
    why: str
    origin: str


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
            lines.append(f"  {row.key:<4} {'on ' if row.is_on else 'off'} {row.name:<36} {row.why} [{row.origin}]")
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"problem: {text}" for text in self.problems]
        return "\n".join(lines)


# Rows that are the same on every machine: key, name, on, why, who decided.
_VLLM, _PLUGIN, _REQUEST = "vLLM", "plugin", "request"
_FIXED: tuple[tuple[str, str, bool, str, str], ...] = (
    ("F1", "DSpark drafting", False, "our model has no draft model yet; every step makes one token", _PLUGIN),
    ("F2", "confidence-scheduled verification", False, "needs F1", _PLUGIN),
    ("F3", "confidence temperature", False, "needs F1", _PLUGIN),
    ("F4", "decode-time curve cache", False, "needs F2", _PLUGIN),
    ("F5", "decoder bounded replay", False, "every prompt row passes every layer", _PLUGIN),
    ("F6", "replay length", False, "needs F5", _PLUGIN),
    (
        "F7",
        "SWA bounded replay on a prefix hit",
        False,
        "windows are cached with their prefix: hits are exact",
        _PLUGIN,
    ),
    (
        "F8",
        "asynchronous scheduling",
        True,
        "vLLM's default on a GPU; on the CPU vLLM turns it off",
        _VLLM,
    ),
    ("F11", "structured output", True, "XGrammar: JSON schema, regex, grammar", _VLLM),
    (
        "F12",
        "grammar trigger and bound token ids",
        False,
        "vLLM has structural tags (text); token ids are not built",
        _PLUGIN,
    ),
    ("F13", "expert parallelism, EPLB", False, "our model runs on one device", _PLUGIN),
    ("F14", "attention DP, context parallelism", False, "our model runs on one device", _PLUGIN),
    ("F15", "Engram placement", False, "tables stay on the model's device", _PLUGIN),
    ("F16", "packed KV formats", True, "window MXFP8 528 B, compressed NVFP4 288 B, index MXFP4 68 B", _PLUGIN),
    ("F17", "forced top-k sampling", False, "not built; top_k of the request works", _PLUGIN),
    ("F18", "token blacklist", False, "not built; logit_bias and bad_words of the request work", _REQUEST),
    ("F19", "sum of smaller probabilities", False, "not built", _PLUGIN),
    ("F20", "golden tokens", True, "offline: python -m deepinfer_plugin score --decode-from", _PLUGIN),
    ("F21", "per-token draft facts", False, "needs F1", _PLUGIN),
    ("F22", "engine statistics", True, "vLLM's log line and /metrics; none of our own", _VLLM),
    ("F23", "on-demand traces", True, "vLLM's --profiler-config", _VLLM),
    ("F24", "prefill pacing", False, "vLLM mixes prefill and decode in one step", _VLLM),
    ("F25", "prefill context cap", False, "not built; --max-num-batched-tokens bounds a step", _PLUGIN),
    ("F26", "request encoding", True, "vLLM's deepseek_v41 tokenizer mode; user text can form control tokens", _VLLM),
    ("F27", "evaluation and sweep", False, "not built; vllm bench serve works", _PLUGIN),
    ("F28", "kernel cache root", False, "Triton's own cache is used; DEEPINFER_JIT_CACHE_DIR is not", _PLUGIN),
    ("X1", "images", False, "text only; the vision tensors of a checkpoint are checked and not loaded", _PLUGIN),
    ("X2", "prefix caching", True, "exact: a hit gives the bits of a full prefill; --no-enable-prefix-caching", _VLLM),
)


def features(settings: Settings, *, is_active: bool) -> tuple[Feature, ...]:
    """The rows F1-F28 and our own, in order.

    Args:
        settings: those of the process.
        is_active: whether the plugin takes part at all; if not, no row of it is on.
    """
    source = envs.sources()["DEEPINFER_BATCH_INVARIANT"]
    is_ours = is_active and settings.batch_invariant
    rows = [
        Feature(
            key="F9",
            name="batch invariance",
            is_on=is_ours,
            why="every operation of a forward pass is looked up in the table of proven ones at start"
            if is_ours
            else "vLLM's own model serves",
            origin=source,
        ),
        Feature(
            key="F10",
            name="deterministic sampling",
            is_on=is_ours,
            why="noise is a function of (seed, prompt, position, token); a request without seed gets one"
            if is_ours
            else "needs F9",
            origin=_REQUEST if is_ours else source,
        ),
    ]
    for key, name, is_on, why, origin in _FIXED:
        belongs_to_vllm = origin == _VLLM
        if is_ours or belongs_to_vllm:
            rows.append(Feature(key=key, name=name, is_on=is_on, why=why, origin=origin))
        else:
            rows.append(Feature(key=key, name=name, is_on=False, why="vLLM's own model serves", origin=source))
    return tuple(sorted(rows, key=lambda row: (row.key[0], int(row.key[1:]))))
