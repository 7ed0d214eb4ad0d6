"""What happened in an engine, counted from the scheduler's decisions: a relation counts only if its mechanism did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from deepinfer_determinism.engine_facts import CAPTURED_SIZES, CONCURRENT_BATCHES, RANKS

if TYPE_CHECKING:
    from deepinfer_determinism.engine import ScheduleResult

REQUESTS_IN_ONE_STEP = "requests in one step"
MIXED_STEPS = "steps that mix prompt and output tokens"
CHUNKED_PROMPTS = "prompts computed in several chunks"
ODD_BORDERS = "chunk borders at odd positions"
CACHED_TOKENS = "prompt tokens found in the prefix cache"
CACHED_REQUESTS = "requests that hit the prefix cache"
PREEMPTIONS = "preemptions"
WAITED = "requests that waited for a place"
LATE_SLOTS = "requests that began after another had ended beside running ones"
ABORTED_IN_PROMPT = "requests aborted inside their prompt"
ABORTED_IN_OUTPUT = "requests aborted inside their output"
STRUCTURED = "structured outputs"
STRUCTURED_STEPS = "steps of a probe beside a structured output"
COMPLETIONS = "completions of requests with n > 1"
SAMPLED = "requests drawn with a seed"
INVERTED_PAIRS = "pairs of requests in another order than the probes'"
LONGEST_CONTEXT = "longest context beside a probe"
FORCED = "forced output tokens"
KINDS_OF_LOGPROBS = "different numbers of log-probabilities asked for"
HIT_LENGTHS = "different lengths of prefix hits, none included"
LEFT_OUT_ROWS = "prompt rows that the decoder layers left out"
REPLAYED_ROWS = "rows that passed the encoder layers again"
VERIFIED_AT_ONCE = "most drafts of a request verified in one step"
ACCEPTED_DRAFTS = "drafts accepted"
REJECTED_DRAFTS = "drafts rejected"
SHORTENED = "verifications of fewer drafts than the most"
IMAGES = "images of finished requests"
LOST_HITS = "cached prompt tokens that were evicted before the retry"


def count(result: ScheduleResult) -> dict[str, int]:
    """Every mechanism by name."""
    return {name: counter(result) for name, counter in COUNTERS.items()}


def _requests_in_one_step(result: ScheduleResult) -> int:
    return max((len(step) for step in result.facts.steps), default=0)


def _prompt_tokens(result: ScheduleResult) -> dict[str, int]:
    return {name: len(request.tokens) for name, request in result.schedule.requests.items()}


def _mixed_steps(result: ScheduleResult) -> int:
    prompt = _prompt_tokens(result)
    done = {name: result.requests[name].facts.num_cached_tokens for name in prompt if name in result.requests}
    mixed = 0
    for step in result.facts.steps:
        kinds = {done[name] < prompt[name] for name in step}
        mixed += len(kinds) == 2
        for name, tokens in step.items():
            done[name] += tokens
    return mixed


def _borders(result: ScheduleResult) -> list[list[int]]:
    """Per request the positions inside its prompt at which a chunk ended."""
    found = []
    for name, num_tokens in _prompt_tokens(result).items():
        facts = result.requests[name].facts
        position, borders = facts.num_cached_tokens, []
        for size in facts.chunks[0] if facts.chunks else ():
            position += size
            if position >= num_tokens:
                break
            borders.append(position)
        found.append(borders)
    return found


def _chunked_prompts(result: ScheduleResult) -> int:
    return sum(len(borders) > 0 for borders in _borders(result))


def _odd_borders(result: ScheduleResult) -> int:
    return sum(border % 2 for borders in _borders(result) for border in borders)


def _cached_tokens(result: ScheduleResult) -> int:
    return sum(request.facts.num_cached_tokens for request in result.requests.values())


def _cached_requests(result: ScheduleResult) -> int:
    return sum(request.facts.num_cached_tokens > 0 for request in result.requests.values())


def _images(result: ScheduleResult) -> int:
    """Images of requests that finished."""
    requests = result.schedule.requests
    return sum(len(requests[name].images) for name, found in result.requests.items() if found.facts.finished)


def _preemptions(result: ScheduleResult) -> int:
    return sum(request.facts.num_preemptions for request in result.requests.values())


def _spans(result: ScheduleResult) -> dict[str, tuple[int, int]]:
    """First and last step of every request that ran."""
    spans: dict[str, tuple[int, int]] = {}
    for number, step in enumerate(result.facts.steps):
        for name in step:
            spans[name] = (spans.get(name, (number, number))[0], number)
    return spans


def _waited(result: ScheduleResult) -> int:
    """Requests of the first action that added any, and that began after its first step."""
    spans = _spans(result)
    for action in result.schedule.run.actions:
        if action.add:
            first = min((spans[request.name][0] for request in action.add if request.name in spans), default=0)
            return sum(spans[request.name][0] > first for request in action.add if request.name in spans)
    return 0


def _late_slots(result: ScheduleResult) -> int:
    spans = _spans(result)
    late = 0
    for begin, _ in spans.values():
        has_ended = any(last < begin for _, last in spans.values())
        is_running = any(first < begin <= last for first, last in spans.values())
        late += has_ended and is_running
    return late


def _aborted(result: ScheduleResult, in_prompt: bool) -> int:
    prompt = _prompt_tokens(result)
    aborted = {name for action in result.schedule.run.actions for name in action.abort}
    found = 0
    for name in aborted:
        facts = result.requests[name].facts
        computed = facts.num_cached_tokens + sum(facts.chunks[0] if facts.chunks else ())
        found += computed > 0 and (computed < prompt[name]) == in_prompt
    return found


def _sampling(result: ScheduleResult, key: str) -> list[object]:
    return [request.sampling[key] for request in result.schedule.requests.values() if key in request.sampling]


def _structured(result: ScheduleResult) -> int:
    requests = result.schedule.requests
    return sum(
        "structured_outputs" in requests[name].sampling and request.facts.finished
        for name, request in result.requests.items()
    )


def _structured_steps(result: ScheduleResult) -> int:
    requests = result.schedule.requests
    bound = {name for name, request in requests.items() if "structured_outputs" in request.sampling}
    return sum(bool(bound & step.keys()) and bool(step.keys() - bound) for step in result.facts.steps)


def _completions(result: ScheduleResult) -> int:
    return sum(len(request.tokens) for request in result.requests.values() if len(request.tokens) > 1)


def _inverted_pairs(result: ScheduleResult) -> int:
    """Pairs of one step that stand there in another order than their prompts' lengths, the order of the probes."""
    prompt = _prompt_tokens(result)
    inverted = 0
    for step in result.facts.steps:
        lengths = [prompt[name] for name in step if not name.startswith("n")]
        inverted += sum(left > right for left, right in itertools.pairwise(lengths))
    return inverted


def _longest_context(result: ScheduleResult) -> int:
    return max((len(request.tokens) for request in result.schedule.requests.values()), default=0)


def _lost_hits(result: ScheduleResult) -> int:
    """Hits of requests named ``…@again`` that the same request did not have when it came once more as ``…@retry``."""
    cached = {name: request.facts.num_cached_tokens for name, request in result.requests.items()}
    again = {name.removesuffix("@again"): tokens for name, tokens in cached.items() if name.endswith("@again")}
    return sum(max(0, tokens - cached.get(f"{name}@retry", tokens)) for name, tokens in again.items())


def _shortened(verified: Sequence[int]) -> int:
    """Of counts by draft position: how many of those with a first draft had no last one."""
    return verified[0] - min((count for count in verified if count > 0), default=0)


COUNTERS: Mapping[str, Callable[[ScheduleResult], int]] = {
    REQUESTS_IN_ONE_STEP: _requests_in_one_step,
    MIXED_STEPS: _mixed_steps,
    CHUNKED_PROMPTS: _chunked_prompts,
    ODD_BORDERS: _odd_borders,
    CACHED_TOKENS: _cached_tokens,
    CACHED_REQUESTS: _cached_requests,
    PREEMPTIONS: _preemptions,
    IMAGES: _images,
    WAITED: _waited,
    LATE_SLOTS: _late_slots,
    ABORTED_IN_PROMPT: lambda result: _aborted(result, True),
    ABORTED_IN_OUTPUT: lambda result: _aborted(result, False),
    STRUCTURED: _structured,
    STRUCTURED_STEPS: _structured_steps,
    COMPLETIONS: _completions,
    SAMPLED: lambda result: len(_sampling(result, "seed")),
    INVERTED_PAIRS: _inverted_pairs,
    LONGEST_CONTEXT: _longest_context,
    FORCED: lambda result: sum(len(request.forced) for request in result.schedule.requests.values()),
    KINDS_OF_LOGPROBS: lambda result: len(set(_sampling(result, "logprobs"))),
    LOST_HITS: _lost_hits,
    HIT_LENGTHS: lambda result: len({request.facts.num_cached_tokens for request in result.requests.values()}),
    LEFT_OUT_ROWS: lambda result: result.facts.replay["skipped_decoder_rows"],
    VERIFIED_AT_ONCE: lambda result: sum(count > 0 for count in result.facts.drafts["verified"]),
    ACCEPTED_DRAFTS: lambda result: sum(result.facts.drafts["accepted"]),
    REJECTED_DRAFTS: lambda result: sum(result.facts.drafts["verified"]) - sum(result.facts.drafts["accepted"]),
    SHORTENED: lambda result: (
        result.facts.drafts["verified"][0] - min(filter(None, result.facts.drafts["verified"]), default=0)
    ),
    REPLAYED_ROWS: lambda result: result.facts.replay["replayed_encoder_rows"],
    CONCURRENT_BATCHES: lambda result: result.engine[CONCURRENT_BATCHES],
    CAPTURED_SIZES: lambda result: result.engine[CAPTURED_SIZES],
    RANKS: lambda result: result.engine[RANKS],
}
