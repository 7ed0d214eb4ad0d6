"""A schedule: one engine and everything done to it, as data that is stored, loaded and run again.

Loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_plugin.engine_child.plan import EngineRun, Request, runs_from_json, runs_to_json
from deepinfer_plugin.errors import InputError

FORMAT = 1
KIND = "deepinfer_determinism schedule"
SMALL_CHECKPOINTS = ("nano", "tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One engine from start to shutdown.

    Attributes:
        run: flags and actions. ``run.model`` is a folder, or ``nano:0`` / ``tiny:0``, a small checkpoint and its seed,
            which is written anew wherever the schedule runs.
        action_faults: import paths of planted faults by number of the action they are in force in; those of
            ``run.faults`` are in force from before the engine is built.
        observe: count which side of every threshold is reached.
        apart_from: name of a schedule that must not have run in the same process before.
        beside: name of a schedule that must, because its answers are drafts here.
    """

    run: EngineRun
    action_faults: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    observe: bool = False
    apart_from: str = ""
    beside: str = ""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def requests(self) -> dict[str, Request]:
        """Requests by name, in the order in which they are added."""
        return {request.name: request for action in self.run.actions for request in action.add}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``json.dumps``."""
        (run,) = runs_to_json((self.run,))
        faults = {str(number): list(paths) for number, paths in self.action_faults.items()}
        return {
            "kind": KIND,
            "format": FORMAT,
            "run": run,
            "action_faults": faults,
            "observe": self.observe,
            "apart_from": self.apart_from,
            "beside": self.beside,
        }

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """The schedule that ``to_json`` wrote.

        Raises:
            InputError: it is something else, or a field is missing or unknown.
        """
        if not isinstance(value, dict) or value.get("kind") != KIND or value.get("format") != FORMAT:
            raise InputError(f"schedule: content is no {KIND} of format {FORMAT}, expected what save writes")
        try:
            (run,) = runs_from_json([value["run"]])
            faults = {int(number): tuple(paths) for number, paths in value["action_faults"].items()}
            wrong = [number for number in faults if not 0 <= number < len(run.actions)]
            if wrong:
                raise InputError(
                    f"schedule: action_faults names action {wrong[0]}, expected one of the {len(run.actions)} actions"
                )
            return cls(
                run=run,
                action_faults=faults,
                observe=bool(value["observe"]),
                apart_from=str(value.get("apart_from", "")),
                beside=str(value.get("beside", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"schedule: a field is wrong ({error}), expected what save writes") from None


def save(schedule: Schedule, path: Path) -> None:
    """Write the schedule whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(schedule.to_json(), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Schedule:
    """Read what ``save`` wrote.

    Raises:
        InputError: the file is missing, half-written, or holds something else; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"schedule: {path} cannot be read ({error}), expected a stored schedule") from None
    try:
        return Schedule.from_json(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def plan_to_json(schedules: Sequence[Schedule]) -> str:
    """Several schedules as one text, for a child."""
    return json.dumps([schedule.to_json() for schedule in schedules])


def plan_from_json(text: str) -> tuple[Schedule, ...]:
    """The schedules that ``plan_to_json`` wrote."""
    return tuple(Schedule.from_json(value) for value in json.loads(text))
