"""What a child runs and what it reports, as data that travels as JSON. Loads neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.settings import Arithmetic

KNOW_ANSWERS = ("right", "partly", "systematic", "wrong")  # drafters that follow answers of engines before them
ACTED = "planted fault acts: "  # in the log, in front of the name of a worker class of faults
FACTS_KEY = "facts"  # of the metadata of the results file: RunFacts by engine, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    ``forced`` are its first output tokens, fed one at a time; ``max_tokens`` counts all output tokens and is
    ``len(forced) + 1`` unless it is given, so that every forced token is also read. Logits are reported for every
    output token, and with ``prompt_rows`` for every prompt token but the last (the prefix cache is not read then).
    ``images`` are recipes of ``reference.pictures``, one for every image placeholder of ``tokens``.
    ``sampling`` holds further fields of vLLM's SamplingParams; greedy without EOS is the default. With
    ``--scheduling-policy=priority`` the request of the largest ``priority`` is preempted first.
    """

    name: str
    tokens: tuple[int, ...]
    forced: tuple[int, ...] = ()
    max_tokens: int | None = None
    prompt_rows: bool = False
    priority: int = 0
    images: tuple[tuple[int, int, int], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something done between two engine steps: first the aborts, then the additions, then ``steps`` engine steps.

    ``steps`` None runs until no request is left. ``reset_image_caches`` forgets processed and encoded images. ``sleep``
    gives the memory of the GPU back and takes it again, weights before the cache, as trainers do; the flag
    ``--enable-sleep-mode`` allows it, and vLLM aborts what runs.
    """

    add: tuple[Request, ...] = ()
    abort: tuple[str, ...] = ()
    reset_prefix_cache: bool = False
    reset_image_caches: bool = False
    sleep: bool = False
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One engine from start to shutdown.

    ``flags`` are those of ``vllm serve`` and stand after the defaults of ``child.py``. ``faults`` are import paths
    ``module:function`` of context managers without arguments, entered when the engine has started: its own proof of
    batch invariance at start-up would refuse some of them. ``variables`` are DEEPINFER_* and VLLM_* variables for this
    engine. ``drafter`` and ``lengths`` name one of ``drafters.py`` for an engine with drafts; None leaves the engine's
    own.
    """

    name: str
    model: str
    arithmetic: Arithmetic
    flags: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    faults: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    drafter: str | None = None
    lengths: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFacts:
    """One completion of a request; its tokens and logits are arrays beside this record."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What happened to a request.

    ``chunks`` lists, per completion, how many tokens of it each engine step computed, and ``produced`` how many output
    tokens each step that brought any did; ``error`` is the text with which vLLM refused it. ``num_cached_tokens`` is
    the hit of its first scheduling only, as vLLM reports it.
    ``draft_facts`` are those of its answer, None where it did not ask for them.
    """

    outputs: tuple[OutputFacts, ...] = ()
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()
    draft_facts: tuple[Mapping[str, Any], ...] | None = None
    produced: tuple[tuple[int, ...], ...] = ()
    finished: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What happened in an engine. ``steps`` lists per engine step the tokens computed for each request.

    ``kv_usage`` is the share of cache blocks still held at the end, 0 unless requests are left. ``fault_calls`` counts
    per planted fault how often its changed code ran; ``observed`` holds what observers among them saw. ``replay`` are
    the counts of ``replay.counters`` by name, ``drafts`` those of ``speculative.counters``: drafted, verified and
    accepted by draft position, ``confidence_error`` its sums, ``schedule`` those of ``speculative.schedule``.
    """

    steps: tuple[Mapping[str, int], ...] = ()
    start_s: float = 0.0
    run_s: float = 0.0
    num_unfinished: int = 0
    kv_usage: float = 0.0
    fault_calls: Mapping[str, int] = field(default_factory=dict)
    observed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    requests: Mapping[str, RequestFacts] = field(default_factory=dict)
    replay: Mapping[str, int] = field(default_factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    schedule: Mapping[str, float] = field(default_factory=dict)
    confidence_error: tuple[float, ...] = ()


def runs_to_json(runs: Sequence[EngineRun]) -> list[dict[str, Any]]:
    """Plain values of a plan."""
    return [{**asdict(run), "arithmetic": run.arithmetic.value} for run in runs]


def runs_from_json(values: list[dict[str, Any]]) -> tuple[EngineRun, ...]:
    """The plan that ``runs_to_json`` wrote.

    Raises:
        InputError: a field is missing or unknown.
    """
    try:
        return tuple(_run(value) for value in values)
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"engine plan: a field is wrong ({error}), expected what runs_to_json writes") from None


def check_names(runs: Sequence[EngineRun]) -> None:
    """Refuse a plan whose results would overwrite each other.

    Raises:
        InputError: two engines, or two requests of one engine, have one name.
    """
    _require_unique("engine", [run.name for run in runs])
    for run in runs:
        _require_unique(f"engine {run.name}: request", [item.name for action in run.actions for item in action.add])


def facts_from_json(value: Mapping[str, Any]) -> RunFacts:
    """The record that the child wrote with ``dataclasses.asdict``."""
    requests = {
        name: RequestFacts(
            **{
                **facts,
                "outputs": tuple(OutputFacts(**output) for output in facts["outputs"]),
                "chunks": tuple(tuple(sizes) for sizes in facts["chunks"]),
                "draft_facts": None if facts["draft_facts"] is None else tuple(facts["draft_facts"]),
                "produced": tuple(tuple(counts) for counts in facts["produced"]),
            }
        )
        for name, facts in value["requests"].items()
    }
    drafts = {name: tuple(counts) for name, counts in value["drafts"].items()}
    others = {"steps": tuple(value["steps"]), "confidence_error": tuple(value["confidence_error"])}
    return RunFacts(**{**value, **others, "requests": requests, "drafts": drafts})


def _run(value: dict[str, Any]) -> EngineRun:
    actions = tuple(
        Action(
            **{
                **action,
                "add": tuple(
                    Request(
                        **{
                            **item,
                            "tokens": tuple(item["tokens"]),
                            "forced": tuple(item["forced"]),
                            "images": tuple(tuple(recipe) for recipe in item["images"]),
                        }
                    )
                    for item in action["add"]
                ),
                "abort": tuple(action["abort"]),
            }
        )
        for action in value["actions"]
    )
    return EngineRun(
        **{
            **value,
            "arithmetic": Arithmetic(value["arithmetic"]),
            "flags": tuple(value["flags"]),
            "faults": tuple(value["faults"]),
            "actions": actions,
        }
    )


def _require_unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{what} {twice[0]!r} is named twice, expected unique names; rename one")
