"""Configurations with drafts: the same changes to a schedule, and drafts of which any number stand.

What they are compared with is an engine without drafts that has each probe alone. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.cases import Configuration
from deepinfer_determinism.engine_facts import CONCURRENT_BATCHES
from deepinfer_determinism.relations import ASYNC_SCHEDULING, BY_NAME, Relation, Setting
from deepinfer_determinism.workload import Workload
from deepinfer_plugin.engine_child.plan import Request

# Rows that are compared are those of outputs: drafts are verified there.
NUM_OUTPUTS = {"quick": 6, "full": 24}
RAGGED = "random"  # lengths
WITHOUT_OUTPUTS = ("decode", "restart")  # one feeds the outputs, the other is about processes
# Tried with every number of drafts; the relations that change nothing in the steps of a request are tried with one.
EVERY_NUMBER = ("neighbours", "arrival", "chunks", "cache hit", "preemption", "structured output", "lifecycle")
GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"structured_outputs": {"regex": "[0-9a-f]{20,40}"}, "temperature": 1.0, "seed": 31},
    {"structured_outputs": {"regex": "(ab|cd){3}[0-9]{2,30}"}},
)
QUICK: Sequence[tuple[int, str | None, str | None, tuple[str, ...]]] = (
    (5, "partly", None, ("arrival",)),
    (5, "right", RAGGED, ("preemption",)),
    (1, "partly", None, ("structured output",)),
)
"""Drafts a step, drafter, lengths of verification, None for all, and relations; chunks and hits: draft_matrix.py."""


def draft_configurations(first: Setting, workload: Workload, depth: str) -> list[Configuration]:
    """All configurations with drafts of a depth.

    Args:
        first: without drafts.
        workload: that of the quick set, whose answers are made longer here.
        depth: ``quick`` or ``full``.
    """
    longer = with_outputs(workload, depth)
    base = Configuration(label="longer answers", setting=first, workload=longer, relations=())
    table = list(QUICK)
    if depth == "full":
        names = tuple(name for name in BY_NAME if name not in WITHOUT_OUTPUTS)
        table = [(count, "partly", None, EVERY_NUMBER) for count in (1, 3, 5)]
        table.append((5, "partly", RAGGED, names))
        table += [(5, drafter, None, ("arrival",)) for drafter in ("right", "wrong", "nan", "outside", "random", None)]
    return [
        Configuration(
            label=" ".join([f"{count} drafts", drafter or "n-grams", *([lengths] if lengths else [])]),
            setting=replace(
                first,
                # where lengths are cut, a step ahead too: the host then counts drafts that do not stand
                flags=(*first.flags, *(ASYNC_SCHEDULING if lengths else ()), speculative_flag(count)),
                drafter=drafter,
                lengths=lengths,
            ),
            workload=longer,
            relations=_relations(names),
            required=_required(count, drafter, lengths),
            base=base,
        )
        for count, drafter, lengths, names in table
    ]


def _relations(names: Sequence[str]) -> tuple[Relation, ...]:
    return tuple(BY_NAME[name] for name in names)


def _required(num_drafts: int, drafter: str | None, lengths: str | None) -> Mapping[str, int]:
    required = {m.VERIFIED_AT_ONCE: num_drafts}
    if drafter in ("right", "partly"):
        required[m.ACCEPTED_DRAFTS] = 1
    if drafter not in ("right", None):
        required[m.REJECTED_DRAFTS] = 1
    if lengths is not None:
        required |= {m.SHORTENED: 1, CONCURRENT_BATCHES: 2}
    return required


def speculative_flag(num_drafts: int) -> str:
    """Drafts of n-grams, which any checkpoint can have; an injected drafter takes their place."""
    value = {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    return f"--speculative-config={json.dumps(value)}"


def with_outputs(workload: Workload, depth: str) -> Workload:
    """The workload with longer answers, none of them scored as a prompt, and with answers under a grammar.

    The quick set takes every second probe.
    """
    count = NUM_OUTPUTS[depth]
    longer = tuple(
        replace(probe, prompt_rows=False, max_tokens=count + number % 3) for number, probe in enumerate(workload.probes)
    )
    bound = bound_requests(workload, len(GRAMMARS), count)
    step = 2 if depth == "quick" else 1
    return replace(workload, probes=(*longer[:-4:step], *bound, *longer[-4:]))


def bound_requests(workload: Workload, count: int, num_outputs: int) -> tuple[Request, ...]:
    """Requests whose answers a grammar binds."""
    return tuple(
        workload.neighbour(
            f"bound{number}", 9 + 30 * number, num_outputs, **GRAMMARS[number % len(GRAMMARS)], ignore_eos=False
        )
        for number in range(count)
    )
