"""What a judge's reply says."""

from __future__ import annotations

import re

from deepinfer_evals.graders.verdict import Outcome, Verdict, final_text

_LINE = re.compile(r"^[\s*_`]*(?P<name>final answer|same)[\s*_`]*:[\s*_`]*(?P<value>.*?)[\s*_`.]*$", re.IGNORECASE)


def verdict_of_reply(reply: str) -> Verdict:
    """Verdict in the last "same:" line of a judge's reply; UNJUDGED where it holds no clear one."""
    said: dict[str, str] = {}
    for line in final_text(reply).splitlines():
        match = _LINE.match(line)
        if match is not None:
            said[match["name"].lower()] = match["value"].strip()
    found = said.get("final answer", "")
    same = said.get("same", "").lower()
    is_missing = found.lower() in ("none", "")
    if same not in ("yes", "no") or (same == "yes" and is_missing):
        return Verdict.of(Outcome.UNJUDGED, found)
    if same == "yes":
        return Verdict.of(Outcome.CORRECT, found)
    return Verdict.of(Outcome.NO_ANSWER if is_missing else Outcome.WRONG, "" if is_missing else found)
