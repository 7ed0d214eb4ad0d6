"""The relations with bounded replay on: the same changes to a schedule, on probes that are computed by its function.

K is small here, so that most probes are cut. A probe whose prompt rows are asked for is computed without decoder
replay, so these probes ask for none. Loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deepinfer_determinism.relations import BY_NAME, SMALL_BLOCKS, Relation, Setting, alone
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import PAGES, Workload
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE

KEEP_TOKENS = {"nano": 20, "tiny": 28}
SEGMENT = f"segment:{PAGES[0]}"

# "decode" feeds a prompt's end as output and "logprobs" asks for prompt rows: both are another function of replay.
ANOTHER_FUNCTION = ("decode", "logprobs")
QUICK = ("neighbours", "chunks", "cache hit", "preemption")
QUICK_SEGMENT = ("chunks", "cache hit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCase:
    """One relation under one policy; ``encoder`` is the value of DEEPINFER_ENCODER_REPLAY."""

    relation: Relation
    encoder: str

    @property
    def name(self) -> str:
        return f"{self.relation.name} {self.encoder}"

    @property
    def alone_name(self) -> str:
        return alone_name(self.encoder)

    def schedule(self, workload: Workload, setting: Setting) -> Schedule:
        """The schedule of the relation with replay on."""
        return _with_replay(self.relation.schedule(workload, setting), self.name, self.encoder, setting)


def cases(depth: str, device: str) -> list[ReplayCase]:
    """Cases of a depth that exist on a device."""
    found = []
    for encoder, quick in (("exact", QUICK), (SEGMENT, QUICK_SEGMENT)):
        names = quick if depth == "quick" else tuple(name for name in BY_NAME if name not in ANOTHER_FUNCTION)
        found += [ReplayCase(relation=BY_NAME[name], encoder=encoder) for name in names]
    return [case for case in found if device not in case.relation.not_on]


def alone_name(encoder: str) -> str:
    """Name of the schedule of probes alone under a policy."""
    return f"alone {encoder}"


def alone_schedule(encoder: str, workload: Workload, setting: Setting) -> Schedule:
    """Every probe by itself, in one chunk, without a cache."""
    return _with_replay(alone(workload, setting), alone_name(encoder), encoder, setting)


def without_prompt_rows(workload: Workload) -> Workload:
    """The workload whose probes can be computed with decoder replay."""
    return replace(workload, probes=tuple(replace(probe, prompt_rows=False) for probe in workload.probes))


def variables(checkpoint: str, encoder: str) -> Mapping[str, str]:
    """Settings of an engine of these relations."""
    keep = KEEP_TOKENS[checkpoint.partition(":")[0]]
    return {MODE_VARIABLE: "compact", KEEP_VARIABLE: str(keep), ENCODER_VARIABLE: encoder}


def _with_replay(schedule: Schedule, name: str, encoder: str, setting: Setting) -> Schedule:
    # a segment is a multiple of the block, and short here
    flags = schedule.run.flags if encoder == "exact" else (*schedule.run.flags, SMALL_BLOCKS)
    run = replace(schedule.run, name=name, flags=flags, variables=variables(setting.checkpoint, encoder))
    return replace(schedule, run=run)
