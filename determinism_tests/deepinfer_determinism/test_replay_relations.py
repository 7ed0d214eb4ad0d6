"""Relations of the promise with bounded replay on, and random triples of prompt, hit and chunks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from deepinfer_determinism import mechanisms, replay_relations
from deepinfer_determinism.engine import Children, ScheduleResult
from deepinfer_determinism.harness import compare_probes, make_workload
from deepinfer_determinism.relations import NO_CACHE, SMALL_BLOCKS, Setting, make_schedule
from deepinfer_determinism.replay_relations import SEGMENT, ReplayCase
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import PAGES, Workload
from deepinfer_plugin.engine_child.plan import Action, Request

Results = Mapping[str, ScheduleResult]

CHECKPOINT = "nano:0"
POLICIES = ("exact", SEGMENT)
TRIPLE_POLICIES = ("exact", f"segment:{2 * PAGES[0]}")
NUM_CHILDREN = 2
TRIPLES = {"quick": 60, "full": 1000}  # of each policy
BUDGETS = {"quick": (16, 47), "full": (16, 33, 47, 512)}
MAX_PROMPT = 150
WAVE = 30  # requests at once


def run_all(schedules: Sequence[Schedule], device: str) -> dict[str, ScheduleResult]:
    """Run schedules in two children, results by name."""
    parts = [schedules[number::NUM_CHILDREN] for number in range(NUM_CHILDREN)]
    with Children(device) as children:
        streams = [children.start(part) for part in parts if part]
        return {result.schedule.name: result for stream in streams for result in stream}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "replayed" in metafunc.fixturenames:
        option = metafunc.config.getoption
        cases = replay_relations.cases(option("--depth"), option("--device"))
        metafunc.parametrize("replayed", cases, ids=[case.name for case in cases])


@pytest.fixture(scope="module")
def setting(device: str) -> Setting:
    return Setting(checkpoint=CHECKPOINT, device=device)


@pytest.fixture(scope="module")
def workload(setting: Setting, depth: str, workload_seed: int) -> Workload:
    return replay_relations.without_prompt_rows(make_workload(setting, depth, workload_seed))


@pytest.fixture(scope="module")
def related(setting: Setting, workload: Workload, depth: str, device: str) -> Results:
    schedules = [replay_relations.alone_schedule(policy, workload, setting) for policy in POLICIES]
    schedules += [case.schedule(workload, setting) for case in replay_relations.cases(depth, device)]
    return run_all(schedules, device)


def test_a_probe_keeps_its_bits_with_replay_on(replayed: ReplayCase, workload: Workload, related: Results) -> None:
    comparison = compare_probes(workload, related[replayed.alone_name], related[replayed.name])
    assert comparison.rows > 0
    assert comparison.differences == 0, comparison.first
    counts = mechanisms.count(related[replayed.name])
    missing = {key: counts[key] for key, least in replayed.relation.required.items() if counts[key] < least}
    assert missing == {}
    replay = related[replayed.name].facts.replay
    assert replay["skipped_decoder_rows"] > 0
    assert (replay["replayed_encoder_rows"] > 0) == (replayed.encoder != "exact")


def test_the_policies_are_two_functions(workload: Workload, related: Results) -> None:
    exact, segment = (related[replay_relations.alone_name(policy)] for policy in POLICIES)
    assert compare_probes(workload, exact, segment).differences > 0


def _triples(depth: str, seed: int) -> list[tuple[Request, Request]]:
    """Prompts, each with the beginning of it that another request leaves in the cache."""
    draw = random.Random(f"triples {seed}")
    found = []
    for number in range(TRIPLES[depth] // len(BUDGETS[depth])):
        tokens = tuple(draw.randint(3, 250) for _ in range(draw.randint(1, MAX_PROMPT)))
        cut = tokens[: draw.randint(1, len(tokens))]
        found.append(
            (
                Request(name=f"cut{number}", tokens=cut, max_tokens=1),
                Request(name=f"t{number}", tokens=tokens, max_tokens=2),
            )
        )
    return found


def _triple_schedules(policy: str, depth: str, seed: int, setting: Setting) -> list[Schedule]:
    triples = _triples(depth, seed)
    variables = replay_relations.variables(CHECKPOINT, policy)
    waves = [triples[first : first + WAVE] for first in range(0, len(triples), WAVE)]
    cold = [Action(add=tuple(request for _, request in wave)) for wave in waves]
    warm = []
    for wave in waves:
        warm += [
            Action(reset_prefix_cache=True),
            Action(add=tuple(cut for cut, _ in wave)),
            Action(add=tuple(request for _, request in wave)),
        ]
    schedules = [
        make_schedule(
            f"cold {policy}", cold, setting, (NO_CACHE, SMALL_BLOCKS, "--max-num-batched-tokens=8192"), variables
        )
    ]
    for budget in BUDGETS[depth]:
        flags = (SMALL_BLOCKS, f"--max-num-batched-tokens={budget}", "--max-num-seqs=16")
        schedules.append(make_schedule(f"warm {policy} {budget}", warm, setting, flags, variables))
    return schedules


@pytest.fixture(scope="module", params=TRIPLE_POLICIES)
def triples(
    request: pytest.FixtureRequest, setting: Setting, depth: str, workload_seed: int, device: str
) -> tuple[str, Results]:
    """A policy, and its engines."""
    return request.param, run_all(_triple_schedules(request.param, depth, workload_seed, setting), device)


def test_a_hit_equals_a_miss_whatever_the_chunks(depth: str, triples: tuple[str, Results]) -> None:
    policy, found = triples
    cold = found[f"cold {policy}"].requests
    compared = hits = chunked = 0
    for budget in BUDGETS[depth]:
        for name, warm in found[f"warm {policy} {budget}"].requests.items():
            if name not in cold:
                continue
            compared += 1
            hits += warm.facts.num_cached_tokens > 0
            chunked += len(warm.facts.chunks[0]) > 2
            assert torch.equal(warm.tokens[0], cold[name].tokens[0]), (name, budget)
            assert torch.equal(warm.logits[0].view(torch.int32), cold[name].logits[0].view(torch.int32)), (name, budget)
    assert compared == TRIPLES[depth]
    assert hits > compared // 10
    assert chunked > compared // 4
    lengths = {warm.facts.num_cached_tokens for warm in found[f"warm {policy} {BUDGETS[depth][0]}"].requests.values()}
    assert {0, 2 * PAGES[0]} <= lengths
