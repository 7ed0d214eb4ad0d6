"""Every broken input line ends in one error with file:line."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.scoring.inputs import read_records

VOCAB_SIZE = 10


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_lines_become_records_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a", "tokens": [0, 1, 2]}', "", '{"id": "b", "tokens": [9], "decode_from": 1}')
    a, b = read_records(path, VOCAB_SIZE, None)
    assert (a.name, a.prompt, a.continuation) == ("a", [0, 1, 2], [])
    assert (b.name, b.prompt, b.continuation) == ("b", [9], [])


def test_a_line_overrides_the_common_start_of_decoding(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a", "tokens": [0, 1, 2]}', '{"id": "b", "tokens": [3, 4, 5], "decode_from": 1}')
    a, b = read_records(path, VOCAB_SIZE, 2)
    assert (a.prompt, a.continuation) == ([0, 1], [2])
    assert (b.prompt, b.continuation) == ([3], [4, 5])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "the line is not JSON"),
        ("[1]", "the line is a JSON list"),
        ('{"id": "a", "tokens": [1], "text": "x"}', "field 'text' is unknown"),
        ('{"tokens": [1]}', "id is None"),
        ('{"id": "", "tokens": [1]}', "id is ''"),
        ('{"id": "__metadata__", "tokens": [1]}', "id is '__metadata__'"),
        ('{"id": "a"}', "tokens is missing or empty"),
        ('{"id": "a", "tokens": []}', "tokens is missing or empty"),
        ('{"id": "a", "tokens": [1, 10]}', r"tokens\[1\] is 10, expected an id from 0 to 9"),
        ('{"id": "a", "tokens": [-1]}', r"tokens\[0\] is -1"),
        ('{"id": "a", "tokens": [true]}', r"tokens\[0\] is True"),
        ('{"id": "a", "tokens": [1.0]}', r"tokens\[0\] is 1.0"),
        ('{"id": "a", "tokens": [1], "decode_from": 0}', "decode_from is 0, expected 1 to 1"),
        ('{"id": "a", "tokens": [1], "decode_from": 2}', "decode_from is 2, expected 1 to 1"),
        ('{"id": "a", "tokens": [1], "decode_from": "1"}', "decode_from is '1'"),
        ('{"id": "ok", "tokens": [1]}', "id 'ok' is also on line 1"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = write(tmp_path, '{"id": "ok", "tokens": [1]}', line)
    with pytest.raises(InputError, match=text) as caught:
        read_records(path, VOCAB_SIZE, None)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_a_common_start_beyond_a_short_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a", "tokens": [0, 1, 2]}', '{"id": "b", "tokens": [3]}')
    with pytest.raises(InputError, match=r":2: decode_from is 3, expected 1 to 1"):
        read_records(path, VOCAB_SIZE, 3)


def test_an_empty_or_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no record"):
        read_records(write(tmp_path, ""), VOCAB_SIZE, None)
    with pytest.raises(InputError, match="cannot be read"):
        read_records(tmp_path / "missing", VOCAB_SIZE, None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_records(tmp_path / "binary", VOCAB_SIZE, None)
