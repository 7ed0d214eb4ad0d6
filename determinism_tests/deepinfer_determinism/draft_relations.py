"""The relations with drafts: the same changes to a schedule, and drafts of which any number stand.

What they are compared with is an engine without drafts that has each probe alone. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_determinism.relations import BY_NAME, Relation, Setting
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload
from deepinfer_plugin.engine_child.plan import Request

# Rows that are compared are those of outputs: drafts are verified there.
NUM_OUTPUTS = {"quick": 6, "full": 24}
FIXED, RAGGED, CONFIDENCE = "fixed", "random", "confidence"
WITHOUT_OUTPUTS = ("decode", "restart")  # one feeds the outputs, the other is about processes
GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"structured_outputs": {"regex": "[0-9a-f]{20,40}"}, "temperature": 1.0, "seed": 31},
    {"structured_outputs": {"regex": "(ab|cd){3}[0-9]{2,30}"}},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCase:
    """One relation with ``num_drafts`` drafts a step, of which a drafter decides how many stand.

    ``lengths`` says how many are verified: all of them, a random number for each request, or what confidences say.
    """

    relation: Relation
    num_drafts: int
    drafter: str | None
    lengths: str

    @property
    def name(self) -> str:
        return f"{self.relation.name} {self.num_drafts} {self.drafter or 'n-grams'} {self.lengths}"

    def schedule(self, workload: Workload, setting: Setting) -> Schedule:
        """The schedule of the relation in an engine with drafts."""
        made = self.relation.schedule(workload, setting)
        run = replace(
            made.run,
            name=self.name,
            flags=(*made.run.flags, speculative_flag(self.num_drafts)),
            drafter=self.drafter,
            lengths=None if self.lengths == FIXED else self.lengths,
        )
        return replace(made, run=run)


def speculative_flag(num_drafts: int) -> str:
    """Drafts of n-grams, which any checkpoint can have; an injected drafter takes their place."""
    value = {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    return f"--speculative-config={json.dumps(value)}"


def _case(name: str, num_drafts: int, drafter: str | None, lengths: str) -> DraftCase:
    return DraftCase(relation=BY_NAME[name], num_drafts=num_drafts, drafter=drafter, lengths=lengths)


QUICK: tuple[DraftCase, ...] = (
    _case("arrival", 5, "partly", FIXED),
    _case("chunks", 5, "partly", RAGGED),
    _case("cache hit", 3, "partly", FIXED),
    _case("preemption", 5, "right", RAGGED),
    _case("structured output", 1, "partly", FIXED),
)


def cases(depth: str, device: str) -> list[DraftCase]:
    """Cases of a depth that exist on a device."""
    found = list(QUICK)
    if depth == "full":
        names = [name for name in BY_NAME if name not in WITHOUT_OUTPUTS]
        found = [_case(name, count, "partly", FIXED) for name in names for count in (1, 3, 5)]
        found += [_case(name, 5, "partly", RAGGED) for name in names]
        found += [
            _case("arrival", 5, drafter, FIXED) for drafter in ("right", "wrong", "nan", "outside", "random", None)
        ]
    return [case for case in found if device not in case.relation.not_on]


def with_outputs(workload: Workload, depth: str) -> Workload:
    """The workload with longer answers, none of them scored as a prompt, and with answers under a grammar.

    The quick set takes every second probe.
    """
    count = NUM_OUTPUTS[depth]
    longer = tuple(
        replace(probe, prompt_rows=False, max_tokens=count + number % 3) for number, probe in enumerate(workload.probes)
    )
    bound = tuple(_bound(workload, number, count) for number in range(len(GRAMMARS)))
    step = 2 if depth == "quick" else 1
    return replace(workload, probes=(*longer[:-4:step], *bound, *longer[-4:]))


def _bound(workload: Workload, number: int, count: int) -> Request:
    return workload.neighbour(f"bound{number}", 9 + 30 * number, count, **GRAMMARS[number], ignore_eos=False)
