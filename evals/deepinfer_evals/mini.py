"""Made-up rows with the columns of the real data sets, for tests and for a trial run without any data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def aime_rows(count: int) -> list[dict[str, Any]]:
    """Sums whose answers are 0 to 3."""
    return [
        {
            "problem_idx": index,
            "problem": f"What is {index} - {index - index % 4}, in \\mathbb{{Z}}?",
            "answer": index % 4,
        }
        for index in range(1, count + 1)
    ]


def gpqa_rows(count: int) -> list[dict[str, Any]]:
    """Questions whose right option is a number of the question, with a column that no task reads."""
    return [
        {
            "Record ID": f"rec{index:03}",
            "Question": f"Which number follows {index}?",
            "Correct Answer": str(index + 1),
            "Incorrect Answer 1": str(index),
            "Incorrect Answer 2": str(index + 2),
            "Incorrect Answer 3": str(index - 1),
            "Explanation": "counting",
        }
        for index in range(1, count + 1)
    ]


def hle_rows(count: int) -> list[dict[str, Any]]:
    """Questions with a word as answer; every fifth has an image and is left out by the task."""
    return [
        {
            "id": f"q{index:04}",
            "question": f"{index}. Which letter is number {index % 4} of ABCD, from 0?",
            "image": "data:image/png;base64,AA==" if index % 5 == 0 else "",
            "answer": "ABCD"[index % 4],
            "answer_type": "exactMatch",
            "rationale": "counting",
        }
        for index in range(1, count + 1)
    ]


def write_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as a local copy of a data set; returns the folder for ``--data-dir``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
