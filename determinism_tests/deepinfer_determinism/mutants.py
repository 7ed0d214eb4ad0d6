"""Planted faults: each breaks one thing that the promise rests on, proves that it ran, and must be caught.

Faults are context managers (``mutants_operations.py``, ``mutants_engine.py``); what they yield counts how often the
changed code ran where it changes something. Operation mutants are caught by the row property of one operation, engine
mutants by a relation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deepinfer_determinism.patching import Function, replaced
from deepinfer_plugin.engine_child.faults import Calls

Change = Callable[[Function, Calls], Function]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: unique.
        what: one sentence on what is broken.
        fault: import path ``module:function`` of the context manager.
        operation: ``folder.function`` whose row property must catch it, or empty.
        variant: of the operation's inputs.
        relation: relation that must catch it, or empty.
        engine: which engine and schedule of ``mutant_runs.py`` it runs in, or empty.
    """

    name: str
    what: str
    fault: str
    operation: str = ""
    variant: str = ""
    relation: str = ""
    engine: str = ""

    @property
    def catcher(self) -> str:
        """What must catch it, in words."""
        return self.relation or f"operation {self.operation}"


@contextmanager
def changed(path: str, change: Change) -> Iterator[Calls]:
    """Put ``change(original, calls)`` in the place of a function of ours, wherever it is named."""
    calls = Calls()
    with replaced(path, lambda original: change(original, calls)):
        yield calls


def all_mutants() -> tuple[Mutant, ...]:
    """Operation mutants, then those of the engine, of images and of verification."""
    from deepinfer_determinism.mutants_drafts import DRAFT_MUTANTS
    from deepinfer_determinism.mutants_engine import ENGINE_MUTANTS
    from deepinfer_determinism.mutants_images import IMAGE_MUTANTS
    from deepinfer_determinism.mutants_operations import OPERATION_MUTANTS

    return OPERATION_MUTANTS + ENGINE_MUTANTS + IMAGE_MUTANTS + DRAFT_MUTANTS
