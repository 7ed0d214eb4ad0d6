"""What must not change an answer, asked of a server over HTTP: relations, the probes they compare, and the comparison.

A row is one output token with its chosen and its best log-probabilities; an answer's text and reason to stop count as
one more. Over HTTP only returned numbers can be compared, not the whole vocabulary.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deepinfer_determinism.client import Answer, Ask, Endpoint, EndpointError, double_bits
from deepinfer_determinism.results import FirstDifference, RelationResult

NUM_TOKENS = 12  # output tokens of a probe
TOP = 5
NUM_NEIGHBOURS = 20
PROBE_WORDS = (1, 3, 9, 33, 70, 130)  # lengths of the probes' prompts, cut to the longest the server takes
NUM_SAMPLES = 32  # prompts under one seed in ``samples``
ASKED = (0, 1, 5, 20)  # log-probabilities asked for
WORDS = ("river", "stone", "garden", "window", "yellow", "market", "signal", "winter", "copper", "engine", "letter")
AT_ONCE = "answers at the same time"
SEED_MATTERS = "answers that another seed changed"


@dataclass(slots=True)
class Comparison:
    """Answers compared so far in one relation."""

    rows: int = 0
    differences: int = 0
    first: FirstDifference | None = None

    def add(self, name: str, got: Answer, want: Answer) -> None:
        """Compare two answers to one request; top lists of different lengths are compared where both have an entry."""
        names_tokens = all(answer.tokens or not answer.text for answer in (got, want))
        rows = max(len(got.tokens), len(want.tokens)) if names_tokens else 0  # else only texts can be compared
        for position in range(rows):
            self._row(name, position, _row_words(got, want, position), _row_words(want, got, position))
        self._row(name, rows, _end_words(got), _end_words(want))

    def _row(self, name: str, position: int, got: str, want: str) -> None:
        self.rows += 1
        if got != want:
            self.differences += 1
            self.first = self.first or FirstDifference(request=name, position=position, got=got, want=want)


def _row_words(answer: Answer, other: Answer, position: int) -> str:
    """One row of ``answer`` as far as ``other`` has the same kinds of numbers."""
    if position >= len(answer.tokens):
        return "no token"
    words = [answer.tokens[position]]
    if position < len(answer.logprobs) and other.logprobs:
        value = answer.logprobs[position]
        words.append(f"log-probability {value!r} ({double_bits(value)})")
    top = dict(answer.top[position]) if position < len(answer.top) else {}
    other_top = dict(other.top[position]) if position < len(other.top) else {}
    shared = sorted(top.keys() & other_top.keys()) if len(top) != len(other_top) else sorted(top)
    words += [f"{token} {top[token]!r} ({double_bits(top[token])})" for token in shared if token != words[0]]
    return ", ".join(words)


def _end_words(answer: Answer) -> str:
    return f"text {answer.text!r}, finish reason {answer.finish_reason}"


@dataclass(slots=True)
class Session:
    """One certification in progress: the server, its probes, their answers alone, and every answer's canaries.

    Attributes:
        max_words: longest prompt, in words.
        alone: answer of each probe on an idle server, by name.
    """

    endpoint: Endpoint
    seed: int
    max_words: int
    num_copies: int
    earlier: Mapping[str, Answer] | None = None
    alone: dict[str, Answer] = field(default_factory=dict)
    probes: dict[str, Ask] = field(default_factory=dict)
    num_answers: int = 0
    canaries: dict[str, str] = field(default_factory=dict)  # canary -> request that owns it
    seen_texts: list[tuple[str, str]] = field(default_factory=list)  # (request, text)

    def __post_init__(self) -> None:
        for index, words in enumerate(PROBE_WORDS):
            generator = random.Random(f"{self.seed} probe {index}")
            prompt = _prompt(generator, min(words, self.max_words))
            self.probes[f"greedy {index}"] = Ask(prompt=prompt, max_tokens=NUM_TOKENS, logprobs=TOP)
            self.probes[f"sampled {index}"] = Ask(
                prompt=prompt, max_tokens=NUM_TOKENS, logprobs=TOP, temperature=1.0, seed=self.seed + index
            )

    @property
    def configuration(self) -> str:
        return f"{self.endpoint.model} at {self.endpoint.base_url}"

    def neighbours(self, label: str, count: int = NUM_NEIGHBOURS) -> dict[str, Ask]:
        """Requests of mixed lengths, temperatures and budgets, each with a text of its own in its prompt.

        Every second one begins like a probe, so that a prefix cache has something to share.
        """
        found: dict[str, Ask] = {}
        for index in range(count):
            generator = random.Random(f"{self.seed} {label} {index}")
            name, canary = f"{label} neighbour {index}", f"{generator.getrandbits(64):016x}"
            self.canaries[canary] = name
            head = list(self.probes.values())[generator.randrange(len(self.probes))].prompt if index % 2 else ""
            words = generator.randrange(1, max(2, self.max_words // 2))
            prompt = f"{head[: self.max_words * 3]} the code is {canary} {_prompt(generator, words)}".strip()
            found[name] = Ask(
                prompt=prompt,
                max_tokens=generator.randrange(1, 2 * NUM_TOKENS),
                temperature=generator.choice((0.0, 0.7, 1.5)),
                seed=generator.randrange(2**31),
                logprobs=generator.choice((None, 0, TOP)),
            )
        return found

    async def ask(self, name: str, ask: Ask) -> Answer:
        """One answer, watched for the canaries of others."""
        return self._seen(name, await self.endpoint.complete(ask))

    async def stream(self, name: str, ask: Ask, cut_after: int | None = None) -> Answer:
        """One streamed answer, watched as well."""
        return self._seen(name, await self.endpoint.stream(ask, cut_after))

    async def together(self, asks: Mapping[str, Ask], gap_s: float = 0.0) -> dict[str, Answer]:
        """All requests at once, sent in the order of the mapping, ``gap_s`` apart."""

        async def one(index: int, name: str, ask: Ask) -> Answer:
            await asyncio.sleep(index * gap_s)
            return await self.ask(name, ask)

        return await gather({name: one(index, name, ask) for index, (name, ask) in enumerate(asks.items())})

    def leak(self) -> FirstDifference | None:
        """The first answer that holds the canary of another request."""
        for name, text in self.seen_texts:
            for canary, owner in self.canaries.items():
                if owner != name and canary in text:
                    return FirstDifference(
                        request=name, position=0, got=f"the text {canary} of {owner!r}", want="no text of another"
                    )
        return None

    def _seen(self, name: str, answer: Answer) -> Answer:
        self.num_answers += 1
        self.seen_texts.append((name, answer.text))
        return answer


async def gather(jobs: Mapping[str, Awaitable[Answer]]) -> dict[str, Answer]:
    """Await all jobs; where one fails the others are cancelled and its error is raised alone."""
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_awaited(job)) for name, job in jobs.items()}
    return {name: task.result() for name, task in tasks.items()}


async def _awaited(job: Awaitable[Answer]) -> Answer:
    return await job


def _prompt(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


def _overlaps(answers: Iterable[Answer], others: Iterable[Answer]) -> int:
    """How many pairs of an answer and another ran at the same time."""
    others = list(others)
    return sum(a.begin_s < b.end_s and b.begin_s < a.end_s for a in answers for b in others if a is not b)


def _result(
    session: Session, relation: str, compared: Comparison, begin_s: float, mechanisms: Mapping[str, int], need: str = ""
) -> RelationResult:
    return RelationResult(
        relation=relation,
        configuration=session.configuration,
        rows_compared=compared.rows,
        differences=compared.differences,
        first_difference=compared.first,
        mechanisms=dict(mechanisms),
        exercised=not need or mechanisms[need] > 0,
        seconds=time.monotonic() - begin_s,
    )


async def repeat(session: Session) -> RelationResult:
    """Every probe alone, then alone again."""
    begin_s, compared = time.monotonic(), Comparison()
    for name, ask in session.probes.items():
        session.alone[name] = await session.ask(name, ask)
    for name, ask in session.probes.items():
        compared.add(name, await session.ask(name, ask), session.alone[name])
    return _result(session, "repeat", compared, begin_s, {"probes": len(session.probes)})


async def crowd(session: Session) -> RelationResult:
    """Probes among neighbours of other lengths, sent in one shuffled burst."""
    begin_s, compared = time.monotonic(), Comparison()
    overlaps = 0
    for label in ("crowd a", "crowd b"):
        asks = list({**session.probes, **session.neighbours(label)}.items())
        random.Random(f"{session.seed} {label}").shuffle(asks)
        answers = await session.together(dict(asks))
        overlaps += _overlaps([answers[name] for name in session.probes], answers.values())
        for name in session.probes:
            compared.add(name, answers[name], session.alone[name])
    return _result(
        session, "crowd", compared, begin_s, {"answers at the same time": overlaps}, "answers at the same time"
    )


async def order(session: Session) -> RelationResult:
    """One set of requests in two orders, the second spread over time; every answer is compared, neighbours too."""
    begin_s, compared = time.monotonic(), Comparison()
    asks = {**session.probes, **session.neighbours("order")}
    forward = await session.together(asks)
    backward = await session.together(dict(reversed(asks.items())), gap_s=0.02)
    for name in asks:
        compared.add(name, backward[name], forward[name])
    overlaps = _overlaps(forward.values(), forward.values()) // 2
    return _result(
        session, "order", compared, begin_s, {"answers at the same time": overlaps}, "answers at the same time"
    )


async def streams(session: Session) -> RelationResult:
    """Streamed answers against whole ones."""
    begin_s, compared = time.monotonic(), Comparison()
    answers = await gather({name: session.stream(name, ask) for name, ask in session.probes.items()})
    for name, answer in answers.items():
        compared.add(name, answer, session.alone[name])
    return _result(session, "streams", compared, begin_s, {"streams": len(answers)})


async def logprobs_asked(session: Session) -> RelationResult:
    """Log-probabilities asked for: none, 0, 1, 5 and 20 beside each other; a server may refuse 20."""
    begin_s, compared = time.monotonic(), Comparison()
    names = [name for name in session.probes if name.endswith((" 1", " 3"))]
    answered: Counter[str] = Counter()

    async def one(name: str, count: int | None) -> tuple[str, int | None, Answer | None]:
        try:
            return name, count, await session.ask(name, replace(session.probes[name], logprobs=count))
        except EndpointError:
            if count != ASKED[-1]:
                raise
            return name, count, None  # more than this server gives

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(name, count)) for name in names for count in (None, *ASKED)]
    for task in tasks:
        name, count, answer = task.result()
        if answer is not None:
            answered[f"asked {'none' if count is None else count}"] += 1
            compared.add(name, answer, session.alone[name])
    return _result(session, "logprobs_asked", compared, begin_s, answered)


async def seeds(session: Session) -> RelationResult:
    """One seed several times at once repeats the answer; other seeds must bring other answers, or nothing was drawn."""
    begin_s, compared = time.monotonic(), Comparison()
    names = [name for name in session.probes if name.startswith("sampled")][:3]
    same = {f"{name} again {index}": session.probes[name] for name in names for index in range(4)}
    other = {f"seed {index}": replace(session.probes[names[0]], seed=1000 + index) for index in range(8)}
    answers = await session.together({**same, **other})
    for name in same:
        compared.add(name, answers[name], session.alone[name.partition(" again")[0]])
    distinct = len({answers[name].text for name in other}) - 1
    return _result(session, "seeds", compared, begin_s, {SEED_MATTERS: distinct}, SEED_MATTERS)


async def samples(session: Session) -> RelationResult:
    """One seed over many prompts: their noise must be independent.

    Prompts that differ in their last word are sampled hot, under one seed and under a seed each. Shared noise makes
    far more of the first answers agree than of the second.
    """
    begin_s = time.monotonic()
    base = _prompt(random.Random(f"{session.seed} samples"), 8)
    asks: dict[str, Ask] = {}
    for index in range(NUM_SAMPLES):
        ask = Ask(prompt=f"{base} {index}", max_tokens=4, temperature=2.0, seed=session.seed, logprobs=0)
        asks[f"one seed {index}"] = ask
        asks[f"own seed {index}"] = replace(ask, seed=session.seed + 1 + index)
    answers = await session.together(asks)
    one, own = (
        Counter(answers[f"{kind} seed {index}"].tokens for index in range(NUM_SAMPLES)).most_common(1)[0]
        for kind in ("one", "own")
    )
    compared = Comparison(rows=sum(len(answer.tokens) for answer in answers.values()))
    if one[1] - own[1] >= NUM_SAMPLES // 2:
        compared.differences = one[1]
        compared.first = FirstDifference(
            request="one seed",
            position=0,
            got=f"{one[1]} of {NUM_SAMPLES} prompts with one seed sampled {' '.join(one[0])}",
            want=f"no more than with a seed each: {own[1]}",
        )
    return _result(
        session, "samples", compared, begin_s, {"largest group, one seed": one[1], "largest group, own seeds": own[1]}
    )


async def disconnect(session: Session) -> RelationResult:
    """Clients that leave in the middle of their stream, while probes run and after."""
    begin_s, compared = time.monotonic(), Comparison()
    leaving = {name: replace(ask, max_tokens=20 * NUM_TOKENS) for name, ask in session.neighbours("leaving").items()}
    jobs = {name: session.stream(name, ask, 1 + index % 3) for index, (name, ask) in enumerate(leaving.items())}
    staying = {name: session.ask(name, ask) for name, ask in session.probes.items()}
    answers = await gather({**jobs, **staying})
    after = await session.together(session.probes)
    for name in session.probes:
        compared.add(name, answers[name], session.alone[name])
        compared.add(name, after[name], session.alone[name])
    cut = sum(answers[name].was_cut for name in leaving)
    return _result(session, "disconnect", compared, begin_s, {"streams cut": cut}, "streams cut")


async def copies(session: Session) -> RelationResult:
    """Many copies of one sampled request at once, a neighbour after every fiftieth."""
    begin_s, compared = time.monotonic(), Comparison()
    ask = replace(next(ask for name, ask in session.probes.items() if name == "sampled 2"), max_tokens=8)
    want = await session.ask("copy", ask)
    asks: dict[str, Ask] = {}
    others = iter(session.neighbours("copies", session.num_copies // 50).items())
    for index in range(session.num_copies):
        asks[f"copy {index}"] = ask
        if index % 50 == 49:
            name, other = next(others)
            asks[name] = other
    answers = await session.together(asks)
    group = [answers[f"copy {index}"] for index in range(session.num_copies)]
    for index, answer in enumerate(group):
        compared.add(f"copy {index}", answer, want)
    mechanisms = {
        "copies": len(group),
        "distinct answers": len({answer.digest for answer in (want, *group)}),
        "most at once": _most_at_once(group),
    }
    return _result(session, "copies", compared, begin_s, mechanisms)


async def restart(session: Session) -> RelationResult:
    """Answers of an earlier run, before the server was started again."""
    begin_s, compared = time.monotonic(), Comparison()
    earlier = session.earlier
    if earlier is None:
        return replace(
            _result(session, "restart", compared, begin_s, {}),
            not_applicable="needs an earlier run: start the server again, then run with --compare FILE",
        )
    for name, answer in session.alone.items():
        if name in earlier:
            compared.add(name, answer, earlier[name])
    return _result(session, "restart", compared, begin_s, {"answers of the earlier run": len(earlier)})


async def canaries(session: Session) -> RelationResult:
    """No answer so far holds a text that only another request has sent."""
    begin_s = time.monotonic()
    compared = Comparison(rows=session.num_answers, first=session.leak())
    compared.differences = int(compared.first is not None)
    return _result(session, "canaries", compared, begin_s, {"canaries": len(session.canaries)}, "canaries")


def _most_at_once(answers: Sequence[Answer]) -> int:
    events = sorted([(a.begin_s, 1) for a in answers] + [(a.end_s, -1) for a in answers])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


RELATIONS: Mapping[str, Callable[[Session], Awaitable[RelationResult]]] = {
    "repeat": repeat,
    "restart": restart,
    "crowd": crowd,
    "order": order,
    "streams": streams,
    "logprobs_asked": logprobs_asked,
    "seeds": seeds,
    "samples": samples,
    "disconnect": disconnect,
    "copies": copies,
    "canaries": canaries,
}
"""In the order in which they run; the first fills ``Session.alone``, the last reads every answer."""
