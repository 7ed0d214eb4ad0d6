"""What must not matter, as data: one relation per item of the promise, each a change to the schedule.

Every relation is one schedule that repeats probes of the workload; their rows must have the bits they have in the
schedule ``ALONE``, where each probe is the only request of an engine that has never seen another prefix.
Loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.engine_facts import CAPTURED_SIZES, CONCURRENT_BATCHES
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import PAGES, Sizes, Workload, renamed
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.replay.settings import MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

ALONE = "alone"
BASE_FLAGS = ("--logprobs-mode=raw_logprobs", "--max-num-seqs=64")
SMALL_BLOCKS = f"--block-size={PAGES[0]}"
NO_CACHE = "--no-enable-prefix-caching"
# A probe with prompt rows is computed without decoder replay, the same probe without them is another function.
WITHOUT_REPLAY = {MODE_VARIABLE: "off"}
ODD_BUDGET = 33
ROOMY = "--max-num-batched-tokens=16384"  # all prompts of the full workload in one step
FEW_PAGES = 7  # of a request that just fits into few blocks
LONGEST_IN_FEW_BLOCKS = 200
BACKTRACKING = 12  # kept prompt rows beyond the window: few, so that most probes are cut; 128 + 12 is the released 140
CROWD = 48  # requests at once: 44 co-resident ones were needed to show a fault in a served engine

Actions = Sequence[Action]


def steps_at_once(count: int) -> tuple[str, str]:
    """Flags with which the scheduler plans ``count`` steps before it has the result of the first."""
    # the first of these is for our CPU platform, where vLLM plans no step ahead; others do not read it
    options = {"async_scheduling_on_cpu": True, "max_concurrent_batches": count}
    return ("--async-scheduling", f"--additional-config={json.dumps(options)}")


ASYNC_SCHEDULING = steps_at_once(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all engines of a configuration share, in the words of ``EngineRun``; ``flags`` stand before a relation's."""

    checkpoint: str = "nano:0"
    arithmetic: Arithmetic = Arithmetic.REF
    device: str = "cpu"
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: WITHOUT_REPLAY)
    drafter: str | None = None
    lengths: str | None = None

    @property
    def label(self) -> str:
        return f"{self.checkpoint} {self.arithmetic.value} {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One item of the promise.

    Attributes:
        name: stands in results and on the command line.
        promise: what must not change a request's bits.
        actions: the schedule that repeats probes; a probe ``p`` may come as ``p`` or ``p@word``.
        required: the least count of every mechanism without which the relation shows nothing.
        flags: of ``vllm serve``, after BASE_FLAGS.
        has_few_blocks: the cache holds one long request and little more.
        has_own_process: it must not share one with the probes alone.
        is_kept_by_replay: its change keeps the prompt as it is, of which bounded replay makes the answer a function.
        not_on: device to the reason why the relation cannot be tried there.
    """

    name: str
    promise: str
    actions: Callable[[Workload], Actions]
    required: Mapping[str, int]
    flags: tuple[str, ...] = ()
    has_few_blocks: bool = False
    has_own_process: bool = False
    is_kept_by_replay: bool = True
    not_on: Mapping[str, str] = field(default_factory=dict)

    def schedule(self, workload: Workload, setting: Setting) -> Schedule:
        """The schedule of this relation."""
        few = few_blocks(workload.sizes, setting.arithmetic) if self.has_few_blocks else ()
        return make_schedule(self.name, self.actions(workload), setting, (*self.flags, *few))


def make_schedule(name: str, actions: Actions, setting: Setting, flags: Sequence[str] = ()) -> Schedule:
    """A schedule in the engine that all relations share but for ``flags``."""
    run = EngineRun(
        name=name,
        model=setting.checkpoint,
        arithmetic=setting.arithmetic,
        flags=(*BASE_FLAGS, *setting.flags, *flags),
        actions=tuple(actions),
        variables=setting.variables,
        drafter=setting.drafter,
        lengths=setting.lengths,
    )
    return Schedule(run=run, observe=True)


def few_blocks(sizes: Sizes, arithmetic: Arithmetic) -> tuple[str, ...]:
    """Flags for a pool of blocks in which a request of FEW_PAGES pages of 32 tokens just fits."""
    # All caches share the pool. vLLM 0.33 gives every window a group of its own where the records of a window are
    # smaller than the others', and makes four groups of equal records in s32.
    windows = 4 if arithmetic is Arithmetic.S32 else sizes.num_layers
    blocks = windows * (FEW_PAGES + 1) + FEW_PAGES + sizes.num_rings + 1
    return (f"--num-gpu-blocks-override={blocks}", f"--max-model-len={FEW_PAGES * PAGES[0]}")


def alone(workload: Workload, setting: Setting) -> Schedule:
    """Every probe by itself, whole prompt in one chunk, no prefix cache: what all others are compared with.

    On an accelerator it is also without graphs and asynchronous scheduling, which the others have.
    """
    actions = [Action(add=(probe,)) for probe in workload.probes]
    plain = () if setting.device == "cpu" else ("--enforce-eager", "--no-async-scheduling")
    return make_schedule(ALONE, actions, setting, (NO_CACHE, *plain))


def _neighbours(workload: Workload) -> Actions:
    lengths = [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 130, 40, 8, 9]
    probes = workload.probes
    count = max(CROWD - len(probes), len(lengths))
    crowd = [workload.neighbour(f"n{i}", lengths[i % len(lengths)], 1 + i % 4) for i in range(count)]
    mixed = [request for pair in zip(crowd, probes, strict=False) for request in pair]
    rest = crowd[len(probes) :] or list(probes[len(crowd) :])
    return [Action(add=tuple(mixed + rest))]


def _copies(workload: Workload) -> Actions:
    drawn = [probe for probe in workload.probes if probe.sampling.get("seed") is not None]
    above = workload.sizes.sliding_window + BACKTRACKING  # so that bounded replay leaves rows out
    probe = min((probe for probe in drawn if len(probe.tokens) > above), key=lambda probe: len(probe.tokens))
    return [Action(add=tuple(renamed(probe, f"copy{i}") for i in range(CROWD)))]


def _order(workload: Workload) -> Actions:
    reverse = workload.few(2)[::-1]
    shuffled = [renamed(probe, "again") for probe in workload.few(5)]
    random.Random(workload.seed).shuffle(shuffled)
    return [Action(add=reverse), Action(add=tuple(shuffled))]


def _lengths(workload: Workload) -> Actions:
    short = [workload.neighbour(f"n{i}", 1 + i, 2) for i in range(3)]
    long = [replace(workload.neighbour(f"n{9 + i}", 400 + 7 * i, 2), prompt_rows=i == 0) for i in range(3)]
    few = workload.few(4)
    return [
        Action(add=(*short, *few)),
        Action(add=(*long, *(renamed(probe, "long") for probe in few))),
    ]


def _arrival(workload: Workload) -> Actions:
    held = workload.neighbour("n0", 70, 30)
    actions = [Action(add=(held,), steps=2)]
    actions += [Action(add=(probe,), steps=1 + number % 2) for number, probe in enumerate(workload.few(2))]
    return [*actions, Action()]


def _chunks(workload: Workload) -> Actions:
    return [Action(add=(workload.neighbour("n0", 11, 20), *workload.probes))]


def _tiny_chunks(workload: Workload) -> Actions:
    return [Action(add=tuple(probe for probe in workload.few(3) if len(probe.tokens) <= 2 * PAGES[0]))]


def _cache_hit(workload: Workload) -> Actions:
    cold = tuple(renamed(_without_prompt_rows(probe), "cold") for probe in workload.probes)
    warm = tuple(_without_prompt_rows(probe) for probe in workload.probes)
    long = [probe for probe in warm if len(probe.tokens) > PAGES[0]]
    single = [Action(add=(renamed(probe, "one"),)) for probe in long[:3]]
    return [Action(add=cold), Action(add=warm), *single]


def _preemption(workload: Workload) -> Actions:
    long = [probe for probe in workload.probes if PAGES[0] < len(probe.tokens) <= LONGEST_IN_FEW_BLOCKS][:24]
    growing = [workload.neighbour(f"n{i}", 30 + i, 30) for i in range(9)]
    return [Action(add=tuple(growing), steps=4), Action(add=tuple(long), steps=3), Action()]


def _few_seqs(workload: Workload) -> Actions:
    return [Action(add=workload.few(2))]


def _slots(workload: Workload) -> Actions:
    first = tuple(workload.neighbour(f"n{i}", 5 + 9 * i, 1 + 2 * i) for i in range(5))
    few = workload.few(3)
    return [Action(add=first, steps=2), *(Action(add=(probe,), steps=2) for probe in few), Action()]


def _logprobs(workload: Workload) -> Actions:
    asked: list[Any] = [None, 0, 1, 5, 20, -1]
    probes = []
    for number, probe in enumerate(workload.probes):
        if probe.sampling.get("n", 1) == 1:
            sampling = {**probe.sampling, "logprobs": asked[number % len(asked)]}
            rows = probe.prompt_rows and sampling["logprobs"] == -1
            probes.append(replace(probe, sampling=sampling, prompt_rows=rows))
    scored = [workload.neighbour(f"n{i}", 40 + 260 * i, 2, prompt_logprobs=3 - i, logprobs=2) for i in range(2)]
    ids = list(range(5, 17))
    named = [workload.neighbour(f"n{2 + i}", 20, 3, logprob_token_ids=ids, logprobs=None) for i in range(2)]
    modest = [renamed(probe, "modest") for probe in probes if probe.sampling["logprobs"] not in (None, -1)]
    return [
        Action(add=(*scored, *probes, named[0])),
        Action(add=(named[1], *modest[:2])),
        Action(add=tuple(modest[2:])),
    ]


def _structured(workload: Workload) -> Actions:
    grammars: list[dict[str, Any]] = [{"regex": "[0-9]{3,6}"}, {"choice": ["yes", "no", "maybe"]}]
    crowd = [
        workload.neighbour(f"n{i}", 12 + i, 6, structured_outputs=grammars[i % 2], ignore_eos=False) for i in range(4)
    ]
    return [Action(add=tuple(crowd), steps=1), Action(add=workload.few(3))]


def _parameters(workload: Workload) -> Actions:
    wild: list[dict[str, Any]] = [
        {"temperature": 2.0, "seed": 1},
        {"temperature": 0.01, "seed": 2, "top_k": 1},
        {"temperature": 1.0, "seed": 11, "top_p": 0.1, "min_p": 0.5},
        {"repetition_penalty": 1.9, "frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"logit_bias": {"5": 100.0}},
        {"min_tokens": 3, "stop_token_ids": [5, 6, 7, 8]},
        {"temperature": 1.0, "seed": 11, "n": 2},
        {"allowed_token_ids": [9, 10, 11]},
    ]
    crowd = [workload.neighbour(f"n{i}", 20 + 5 * i, 4, **sampling) for i, sampling in enumerate(wild)]
    return [Action(add=(*crowd, *workload.few(3)))]


def _forced(workload: Workload) -> Actions:
    """The prompt of a probe, fed one token at a time after its first few: decode rows against prompt rows."""
    requests = []
    for probe in workload.probes:
        num_tokens = len(probe.tokens)
        if probe.prompt_rows and 8 < num_tokens <= 2 * PAGES[0] + 1:
            first = max(1, num_tokens - 18)
            requests.append(
                replace(
                    probe,
                    tokens=probe.tokens[:first],
                    forced=probe.tokens[first:],
                    max_tokens=num_tokens - first,
                    prompt_rows=True,
                    sampling={},
                )
            )
    return [Action(add=tuple(requests))]


def _lifecycle(workload: Workload) -> Actions:
    few = workload.few(3)
    victims = tuple(workload.neighbour(f"n{i}", 90 + 17 * i, 30) for i in range(6))
    dropped = tuple(renamed(probe, "dropped") for probe in few if len(probe.tokens) > 2)
    return [
        Action(add=victims, steps=3),
        Action(add=dropped[:3], abort=("n0", "n3"), steps=1),  # n3 is inside its prompt
        Action(add=few, abort=("n1", *(request.name for request in dropped[:2])), steps=2),
        Action(abort=("n2", "n5"), steps=1),
        Action(add=tuple(renamed(probe, "retry") for probe in few[:4]), abort=("n4", dropped[2].name)),
    ]


def _eviction(workload: Workload) -> Actions:
    lengths = range(2 * PAGES[0] + 1, LONGEST_IN_FEW_BLOCKS)
    plain = [_without_prompt_rows(probe) for probe in workload.probes if len(probe.tokens) in lengths]
    plain = [probe for probe in plain if probe.sampling.get("n", 1) == 1][:3]
    fillers = [workload.neighbour(f"n{i}", 140 + i, 2) for i in range(5)]
    actions = [Action(add=(renamed(probe, word),)) for word in ("cold", "again") for probe in plain]
    actions += [Action(add=(filler,)) for filler in fillers]
    return [*actions, *(Action(add=(renamed(probe, "retry"),)) for probe in plain)]


def canary_actions(workload: Workload, salt: str) -> Actions:
    """Probes among neighbours that hold secrets; with another salt all secrets differ and nothing else does."""
    few = workload.few(3)
    crowd = tuple(workload.neighbour(f"n{i}", 33 + 16 * i, 3 + i, salt=salt) for i in range(5))
    return [
        Action(add=crowd, steps=2),
        Action(add=few[: len(few) // 2], abort=("n1",), steps=1),
        Action(add=few[len(few) // 2 :], abort=("n3",)),
        Action(add=tuple(renamed(probe, "after") for probe in few)),
    ]


def _without_prompt_rows(request: Request) -> Request:
    """A request whose prompt rows are asked for does not read the prefix cache."""
    return replace(request, prompt_rows=False)


_CPU_EAGER = {"cpu": "the CPU lane has no graphs: every step is eager"}

RELATIONS: tuple[Relation, ...] = (
    Relation(
        name="neighbours",
        promise="other requests in the batch",
        actions=_neighbours,
        required={m.REQUESTS_IN_ONE_STEP: 44, m.SAMPLED: 3},
        flags=(ROOMY,),
    ),
    Relation(
        name="copies",
        promise="copies of the same request in the batch",
        actions=_copies,
        required={m.REQUESTS_IN_ONE_STEP: 44, m.SAMPLED: 1},
    ),
    Relation(
        name="order",
        promise="the order of requests",
        actions=_order,
        required={m.INVERTED_PAIRS: 5, m.REQUESTS_IN_ONE_STEP: 8},
        flags=(NO_CACHE,),
    ),
    Relation(
        name="lengths",
        promise="the lengths of other requests",
        actions=_lengths,
        required={m.LONGEST_CONTEXT: 400, m.REQUESTS_IN_ONE_STEP: 6},
        flags=(NO_CACHE,),
    ),
    Relation(
        name="arrival",
        promise="the times at which requests arrive",
        actions=_arrival,
        required={m.MIXED_STEPS: 6},
    ),
    Relation(
        name="chunks",
        promise="the token budget of a step and the borders of chunks",
        actions=_chunks,
        required={m.CHUNKED_PROMPTS: 8, m.ODD_BORDERS: 4, m.MIXED_STEPS: 4},
        flags=(f"--max-num-batched-tokens={ODD_BUDGET}", "--max-num-seqs=16", SMALL_BLOCKS),
    ),
    Relation(
        name="tiny chunks",
        promise="chunks smaller than a window, a row tile and a compressor pair",
        actions=_tiny_chunks,
        required={m.CHUNKED_PROMPTS: 3, m.ODD_BORDERS: 3},
        flags=("--max-num-batched-tokens=7", "--max-num-seqs=3"),
    ),
    Relation(
        name="cache hit",
        promise="whether a prefix is found in the cache",
        actions=_cache_hit,
        required={m.CACHED_REQUESTS: 8, m.CACHED_TOKENS: 8 * PAGES[0]},
        flags=(SMALL_BLOCKS,),
    ),
    Relation(
        name="preemption",
        promise="preemption and recomputation",
        actions=_preemption,
        required={m.PREEMPTIONS: 2},
        flags=(SMALL_BLOCKS,),
        has_few_blocks=True,
    ),
    Relation(
        name="max_num_seqs",
        promise="the number of requests that may run at once",
        actions=_few_seqs,
        required={m.WAITED: 5},
        flags=("--max-num-seqs=3",),
    ),
    Relation(
        name="slot",
        promise="the place of a request in the batch",
        actions=_slots,
        required={m.LATE_SLOTS: 5},
    ),
    Relation(
        name="logprobs",
        promise="the log-probabilities that a request, or another one, asks for",
        actions=_logprobs,
        required={m.KINDS_OF_LOGPROBS: 5, m.REQUESTS_IN_ONE_STEP: 8},
        is_kept_by_replay=False,  # asks for prompt rows
    ),
    Relation(
        name="structured output",
        promise="structured output of other requests",
        actions=_structured,
        required={m.STRUCTURED: 3, m.STRUCTURED_STEPS: 2},
    ),
    Relation(
        name="parameters",
        promise="sampling parameters and seeds of other requests",
        actions=_parameters,
        required={m.REQUESTS_IN_ONE_STEP: 10, m.SAMPLED: 6, m.COMPLETIONS: 2},
    ),
    Relation(
        name="decode",
        promise="whether a token was part of the prompt or generated before",
        actions=_forced,
        required={m.FORCED: 40},
        is_kept_by_replay=False,  # feeds the end of a prompt as output
    ),
    Relation(
        name="lifecycle",
        promise="requests that are cancelled, or whose client is gone, and come again",
        actions=_lifecycle,
        required={m.ABORTED_IN_PROMPT: 1, m.ABORTED_IN_OUTPUT: 2},
        flags=("--max-num-batched-tokens=129", SMALL_BLOCKS),
    ),
    Relation(
        name="eviction",
        promise="a cached prefix that is evicted before it is asked for again",
        actions=_eviction,
        required={m.CACHED_TOKENS: 2 * PAGES[0], m.LOST_HITS: PAGES[0]},
        flags=(SMALL_BLOCKS,),
        has_few_blocks=True,
    ),
    Relation(
        name="canaries",
        promise="what other requests, also cancelled ones, contain",
        actions=lambda workload: canary_actions(workload, "other secrets"),
        required={m.ABORTED_IN_PROMPT: 0, m.ABORTED_IN_OUTPUT: 2, m.MIXED_STEPS: 1},
        flags=(SMALL_BLOCKS,),
    ),
    Relation(
        name="restart",
        promise="a restart of the engine in a new process",
        actions=_neighbours,
        required={m.REQUESTS_IN_ONE_STEP: 44},
        flags=(ROOMY,),
        has_own_process=True,
    ),
    Relation(
        name="async scheduling",
        promise="asynchronous scheduling",
        actions=_arrival,
        required={m.MIXED_STEPS: 6, CONCURRENT_BATCHES: 2},
        flags=ASYNC_SCHEDULING,
    ),
    Relation(
        name="graphs",
        promise="captured graphs instead of eager steps",
        actions=_arrival,
        required={m.MIXED_STEPS: 6, CAPTURED_SIZES: 1},
        not_on=_CPU_EAGER,
    ),
)
BY_NAME: Mapping[str, Relation] = {relation.name: relation for relation in RELATIONS}
