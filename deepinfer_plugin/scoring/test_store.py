"""Results survive a stop, are never mixed with those of other inputs, and join into a valid safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.scoring.store import ResultStore

MANIFEST: dict[str, object] = {"input": "abc", "top": None, "model": {"a.safetensors": "1"}}
A = {"tokens": np.array([1, 2, 3]), "logprobs": np.array([[0.5, -1.5]] * 3, dtype=np.float32)}
B = {"tokens": np.array([4]), "logprobs": np.array([[-0.0, np.inf]], dtype=np.float32)}


def opened(out: Path, manifest: dict[str, object] = MANIFEST) -> ResultStore:
    store = ResultStore(out, manifest)
    assert store.open()
    return store


def test_the_joined_file_holds_every_bit_in_the_order_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    store = opened(out)
    store.put("b", B)
    store.put("a/ü", A)
    store.merge(["a/ü", "b"])
    found = load_file(out)
    assert list(found) == ["a/ü.tokens", "a/ü.logprobs", "b.tokens", "b.logprobs"]
    for name, arrays in (("a/ü", A), ("b", B)):
        for key, value in arrays.items():
            got = found[f"{name}.{key}"]
            assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())
    with safe_open(str(out), "np") as file:
        assert json.loads(file.metadata()["deepinfer_score"]) == MANIFEST
    assert list(tmp_path.iterdir()) == [out]


def test_a_stopped_run_goes_on_with_what_it_had(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    first = opened(out)
    first.put("a", A)
    first.close()
    (tmp_path / "out.safetensors.partial" / "half.safetensors.tmp").write_bytes(b"cut off")
    second = opened(out)
    assert second.finished() == {"a"}
    second.put("b", B)
    second.merge(["a", "b"])
    assert set(load_file(out)) == {"a.tokens", "a.logprobs", "b.tokens", "b.logprobs"}


def test_a_complete_output_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    store = opened(out)
    store.put("a", A)
    store.merge(["a"])
    before = out.read_bytes()
    assert ResultStore(out, MANIFEST).open() is False
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "text"), [({"input": "xyz"}, "input"), ({"top": 5}, "top"), ({"model": {"a.safetensors": "2"}}, "model")]
)
def test_what_changed_is_named_for_partial_and_complete_results(
    tmp_path: Path, change: dict[str, object], text: str
) -> None:
    out = tmp_path / "out.safetensors"
    store = opened(out)
    store.put("a", A)
    store.close()
    with pytest.raises(InputError, match=rf"partial results .* has {text} .*, this run has .*; choose another --out"):
        ResultStore(out, {**MANIFEST, **change}).open()
    store = opened(out)
    store.merge(["a"])
    with pytest.raises(InputError, match=rf"output .* has {text} "):
        ResultStore(out, {**MANIFEST, **change}).open()


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    save_file({"x": np.zeros(3)}, out)
    with pytest.raises(InputError, match="was not written by score"):
        ResultStore(out, MANIFEST).open()
    out.write_bytes(b"text")
    with pytest.raises(InputError, match="was not written by score"):
        ResultStore(out, MANIFEST).open()


def test_two_writers_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    store = opened(out)
    with pytest.raises(InputError, match="being written by another process"):
        ResultStore(out, MANIFEST).open()
    store.close()
    opened(out).close()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        ResultStore(tmp_path / "file" / "out.safetensors", MANIFEST).open()
