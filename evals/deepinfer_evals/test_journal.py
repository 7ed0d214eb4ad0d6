"""A journal keeps whole lines through anything, and lets one process write."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_evals.journal import Journal, read_lines
from deepinfer_plugin.errors import InputError


def test_every_cut_of_the_file_leaves_the_whole_lines_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"n": index, "text": "ä\n" * index} for index in range(4)]
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    data = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        kept = sum(end <= size for end in ends)
        assert read_lines(path) == records[:kept]
        with Journal(path) as journal:
            journal.append({"n": "new"})
        assert read_lines(path) == [*records[:kept], {"n": "new"}]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl"), pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "a.jsonl").__enter__()


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": \n{"c": 3}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        read_lines(tmp_path / "a.jsonl")


def test_an_absent_journal_holds_nothing(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl") == []
    assert not (tmp_path / "none.jsonl").exists()
