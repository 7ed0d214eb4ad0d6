"""What ``offline`` and ``score`` share: compute what is not stored yet, say what is kept, join the output."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from deepinfer_plugin import envs, provenance
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.line_input import Named
from deepinfer_plugin.platforms.detect import current_decision, platform_class
from deepinfer_plugin.resumable import PartialResults, model_files
from deepinfer_plugin.settings import Accelerator, Settings

INTERRUPTED = 130


def complete[T: Named](
    store: PartialResults, records: Sequence[T], compute: Callable[[list[T]], object], kind: str
) -> int | None:
    """Compute the records that the store lacks, then join all of them into the output.

    Args:
        store: of the program; is closed in any case.
        records: all of them, in the order of the output.
        compute: stores the results of those that it is given.
        kind: what they are called, in the plural.

    Returns:
        The exit code where there is nothing more to say: the output was complete, or Ctrl-C has come; None otherwise.
    """
    if not store.open():
        say(f"{store.program}: {store.out} is complete, nothing to do")
        return 0
    try:
        finished = store.finished()
        missing = [record for record in records if record.name not in finished]
        if missing:
            try:
                compute(missing)
            except KeyboardInterrupt:
                kept = len(store.finished())
                say(f"\n{store.program}: stopped; {kept} of {len(records)} {kind} are kept, the same command goes on")
                return INTERRUPTED
        store.merge([record.name for record in records])
    finally:
        store.close()
    return None


def prepare_engine(program: str) -> bool:
    """Make this process ready for an engine, before torch, Triton and vLLM are imported.

    Returns:
        Whether it computes on the CPU.

    Raises:
        PlatformError: the plugin is switched off.
    """
    platform_class()
    envs.keep_engine_in_this_process()
    decision = current_decision()
    if decision is None:
        raise PlatformError(f"{program}: DEEPINFER_DISABLE is 1, expected 0; unset it")
    return decision.accelerator is Accelerator.CPU


def manifest(arguments: argparse.Namespace, model: Path, flags: Sequence[str], **own: object) -> dict[str, object]:
    """Everything that results depend on, ``own`` of the program; a partial result of another one is not continued."""
    return {
        "input": hashlib.sha256(arguments.input.read_bytes()).hexdigest(),
        "model": model_files(model),
        **own,
        "engine_flags": list(flags),
        "settings": Settings.from_envs().answer_settings(),
        "versions": provenance.versions(),
    }
