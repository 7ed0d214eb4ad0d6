"""A relation in a configuration: one cell of the report, as data. Loads neither torch nor vLLM.

A configuration is a way to set up all engines of its relations. Its rows are compared with the probes alone in the same
way of engine, or in that of ``base`` where the configuration itself is what must not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deepinfer_determinism import relations
from deepinfer_determinism.engine_facts import CAPTURED_SIZES
from deepinfer_determinism.relations import Relation, Setting
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload
from deepinfer_plugin.engine_child.plan import KNOW_ANSWERS
from deepinfer_plugin.settings import Arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One column of the report.

    Attributes:
        label: stands behind names of relations; empty for what the command line asks for.
        setting: of every engine.
        workload: whose probes are repeated.
        relations: tried in it.
        required: least counts of mechanisms that every relation needs here, beside its own.
        base: the configuration in which the probes run alone; None: this one.
        not_applicable: why nothing can be tried in it on this machine; empty where it can.
    """

    label: str
    setting: Setting
    workload: Workload
    relations: tuple[Relation, ...]
    required: Mapping[str, int] = field(default_factory=dict)
    base: Configuration | None = None
    not_applicable: str = ""

    @property
    def alone_name(self) -> str:
        """Name of the schedule that its rows are compared with."""
        return f"{relations.ALONE} {(self.base or self).label}".strip()

    @property
    def alone(self) -> Schedule:
        """That schedule."""
        base = self.base or self
        return named(relations.alone(base.workload, base.setting), self.alone_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One relation in one configuration."""

    relation: Relation
    configuration: Configuration

    @property
    def name(self) -> str:
        """Unique in a session; also the name of its schedule."""
        return f"{self.relation.name} {self.configuration.label}".strip()

    @property
    def required(self) -> Mapping[str, int]:
        """The least count of every mechanism without which the case shows nothing."""
        return {**self.relation.required, **self.configuration.required}

    @property
    def not_applicable(self) -> str:
        """Why it cannot be tried on the device; empty where it can."""
        if self.configuration.not_applicable:
            return self.configuration.not_applicable
        setting = self.configuration.setting
        if CAPTURED_SIZES in self.required and setting.arithmetic is not Arithmetic.REF:
            return f"{setting.arithmetic.value} runs without graphs: its plain products ask the device for sizes"
        return self.relation.not_on.get(setting.device, "")

    @property
    def schedule(self) -> Schedule:
        """The schedule whose rows are compared with those of the probes alone."""
        made = named(self.relation.schedule(self.configuration.workload, self.configuration.setting), self.name)
        alone = self.configuration.alone_name
        needs_answers = self.configuration.setting.drafter in KNOW_ANSWERS
        return replace(
            made, apart_from=alone if self.relation.has_own_process else "", beside=alone if needs_answers else ""
        )


def named(item: Schedule, name: str) -> Schedule:
    """The schedule under another name."""
    return replace(item, run=replace(item.run, name=name))
