"""Measured step times on disk, so that a later start of the same engine need not measure them again.

A file is named by a hash of its key: model, graphs, parallel sizes, versions and device. It holds the key, too:
what was put under its name by hand is foreign and not used. The next write replaces a file that cannot be used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.speculative.step_time import StepTimeCurve

FORM = 1  # of the files; another number is foreign
_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveCache:
    """The file of one engine.

    Attributes:
        folder: made if missing.
        key: what the times depend on, as JSON values.
        lifetime_s: age in seconds from which a curve is measured again.
        warn: takes the sentence about a file that cannot be used or written.
    """

    folder: Path
    key: Mapping[str, Any]
    lifetime_s: float
    warn: Callable[[str], None]

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"step-times-{hashlib.sha256(self._key_text.encode()).hexdigest()[:_DIGITS]}.json"

    def load(self, now_s: float) -> StepTimeCurve | None:
        """The stored curve; None, with one warning if there is a file, where it must be measured.

        Args:
            now_s: seconds since 1970.
        """
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn_unused(f"it cannot be read ({error})")
            return None
        if not isinstance(value, dict) or value.get("form") != FORM or value.get("key") != json.loads(self._key_text):
            self._warn_unused("it belongs to another engine")
            return None
        try:
            age_s = now_s - float(value["measured_s"])
            curve = StepTimeCurve(
                rows=tuple(int(rows) for rows in value["rows"]),
                times_s=tuple(float(time_s) for time_s in value["times_s"]),
                largest_graph=int(value["largest_graph"]),
            )
        except (KeyError, TypeError, ValueError, InputError) as error:
            self._warn_unused(f"a field is wrong ({error})")
            return None
        if not 0 <= age_s < self.lifetime_s:
            self._warn_unused(f"it is {age_s:.0f} s old, expected 0 to {self.lifetime_s:.0f}")
            return None
        return curve

    def store(self, curve: StepTimeCurve, now_s: float) -> None:
        """Write a curve under a temporary name, then rename it; what cannot be written is a warning."""
        value = {
            "form": FORM,
            "key": self.key,
            "measured_s": now_s,
            "rows": curve.rows,
            "times_s": curve.times_s,
            "largest_graph": curve.largest_graph,
        }
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self.warn(f"step times: {self.path} cannot be written ({error}); the next start measures again")

    @property
    def _key_text(self) -> str:
        return json.dumps(self.key, sort_keys=True)

    def _warn_unused(self, why: str) -> None:
        self.warn(f"step times: {self.path} is not used: {why}; they are measured again")
