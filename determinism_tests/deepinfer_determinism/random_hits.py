"""Random triples of prompt, cached beginning and chunks: a hit must equal a miss. Loads neither torch nor vLLM."""

from __future__ import annotations

import random
from dataclasses import replace

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.relations import SMALL_BLOCKS, Actions, Relation
from deepinfer_determinism.workload import Sizes, Workload
from deepinfer_plugin.engine_child.plan import Action

BUDGETS = (16, 47, 33, 512)  # tokens of a step; the quick set takes the first two
WAVE = 30  # requests at once
MAX_PROMPT = 150


def num_prompts(depth: str) -> int:
    """Prompts of a policy, each computed once per budget."""
    return 8 if depth == "quick" else 250


def random_hits_workload(sizes: Sizes, seed: int, count: int) -> Workload:
    """Probes of random lengths, more of them long, since only these can hit; greedy, without prompt rows."""
    draw = random.Random(f"random hits {seed}")
    workload = Workload(sizes=sizes, seed=seed, probes=())
    lengths = [round(draw.triangular(1, MAX_PROMPT, MAX_PROMPT)) for _ in range(count)]
    return replace(workload, probes=tuple(workload.neighbour(f"t{i}", length) for i, length in enumerate(lengths)))


def _actions(workload: Workload) -> Actions:
    """Waves of prompts, each wave into a cache that holds a random beginning of each prompt and nothing else."""
    actions = []
    for first in range(0, len(workload.probes), WAVE):
        wave = workload.probes[first : first + WAVE]
        cuts = []
        for probe in wave:
            length = random.Random(f"cut {workload.seed} {probe.name}").randint(1, len(probe.tokens))
            cuts.append(replace(probe, name=f"n{probe.name}", tokens=probe.tokens[:length], max_tokens=1))
        actions += [Action(reset_prefix_cache=True), Action(add=tuple(cuts)), Action(add=wave)]
    return actions


RANDOM_HITS: tuple[Relation, ...] = tuple(
    Relation(
        name=f"random hits {budget}",
        promise=f"a random cached beginning of the prompt, at {budget} tokens a step",
        actions=_actions,
        required={m.CACHED_REQUESTS: 4, m.HIT_LENGTHS: 2, m.CHUNKED_PROMPTS: 8},
        flags=(SMALL_BLOCKS, f"--max-num-batched-tokens={budget}", f"--max-num-seqs={min(budget, WAVE)}"),
    )
    for budget in BUDGETS
)
