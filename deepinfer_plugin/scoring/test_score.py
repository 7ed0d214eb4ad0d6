"""``score`` as a program, on the nano checkpoint: prompt rows and forced rows carry the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from deepinfer_plugin import envs
from deepinfer_plugin.__main__ import main
from deepinfer_plugin.cli import resumed
from deepinfer_plugin.cli import score as command
from deepinfer_plugin.scoring.store import ResultStore

TIMEOUT_S = 400
TOKENS = [0, 5, 9, 17, 33, 2, 8, 100, 7, 7, 250]


@pytest.fixture(scope="module")
def nano(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("nano", 0)


def write_input(folder: Path, records: list[dict[str, object]]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_plugin", "score", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=envs.child_environment(variables),
        check=False,
    )


@pytest.fixture(scope="module")
def full(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("full")
    records: list[dict[str, object]] = [
        {"id": "prompt", "tokens": TOKENS},
        {"id": "forced", "tokens": TOKENS, "decode_from": 3},
        {"id": "forced from the first", "tokens": TOKENS, "decode_from": 1},
        {"id": "single", "tokens": [7]},
    ]
    out = folder / "out.safetensors"
    result = run("--model", str(nano), "--input", str(write_input(folder, records)), "--out", str(out))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "4 records, 34 tokens" in result.stdout
    rows: dict[str, np.ndarray] = load_file(out)
    return rows


def test_every_token_has_a_normalised_row(full: dict[str, np.ndarray]) -> None:
    for name, length in (("prompt", 11), ("forced", 11), ("single", 1)):
        rows = full[f"{name}.logprobs"]
        assert rows.dtype == np.float32
        assert rows.shape == (length, 256)
        np.testing.assert_allclose(np.exp(rows.astype(np.float64)).sum(-1), 1.0, rtol=1e-5)
    assert full["prompt.tokens"].tolist() == TOKENS


@pytest.mark.parametrize("name", ["forced", "forced from the first"])
def test_forced_rows_have_the_bits_of_prompt_rows(full: dict[str, np.ndarray], name: str) -> None:
    assert full[f"{name}.logprobs"].tobytes() == full["prompt.logprobs"].tobytes()


def test_top_rows_are_part_of_the_full_rows(nano: Path, full: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = write_input(tmp_path, [{"id": "a", "tokens": TOKENS}])
    out = tmp_path / "out.safetensors"
    flags = ("--top", "4", "--decode-from", "6", "--", "--max-num-batched-tokens", "32")
    result = run("--model", str(nano), "--input", str(path), "--out", str(out), *flags)
    assert result.returncode == 0, result.stderr[-3000:]
    top = load_file(out)
    rows = full["prompt.logprobs"]
    assert top["a.top_ids"].shape == top["a.top_logprobs"].shape == (11, 4)
    assert top["a.top_logprobs"].tobytes() == np.take_along_axis(rows, top["a.top_ids"].astype(np.int64), -1).tobytes()
    assert top["a.top_logprobs"].tobytes() == (-np.sort(-rows, axis=-1))[:, :4].tobytes()
    assert top["a.token_logprobs"].tobytes() == rows[np.arange(10), TOKENS[1:]].tobytes()


def test_an_interrupt_keeps_what_is_finished_and_says_so(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_input(tmp_path, [{"id": "a", "tokens": [1]}, {"id": "b", "tokens": [2]}])
    out = tmp_path / "out.safetensors"
    rows = {"tokens": np.array([1]), "logprobs": np.zeros((1, 256), dtype=np.float32)}
    asked: list[list[str]] = []

    def one_then_stop(arguments: object, vocab_size: int, missing: list[object], store: ResultStore) -> None:
        asked.append([record.name for record in missing])  # type: ignore[attr-defined]
        store.put(asked[-1][0], rows)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "_score_missing", one_then_stop)
    arguments = ["score", "--model", str(nano), "--input", str(path), "--out", str(out)]
    assert main(arguments) == resumed.INTERRUPTED
    assert "1 of 2 records are kept" in capsys.readouterr().out
    assert main(arguments) == 0
    assert asked == [["a", "b"], ["b"]]
    assert set(load_file(out)) == {"a.tokens", "a.logprobs", "b.tokens", "b.logprobs"}
    assert main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out
    path.write_text('{"id": "a", "tokens": [3]}', encoding="utf-8")
    assert main(arguments) == 2
    assert "has input" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--top", "0"], "--top is 0, expected 1 to 256"),
        (["--top", "257"], "--top is 257, expected 1 to 256"),
        (["--decode-from", "9"], "in.jsonl:1: decode_from is 9, expected 1 to 1"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    path = write_input(tmp_path, [{"id": "a", "tokens": [1]}])
    assert main(["score", "--model", str(nano), "--input", str(path), "--out", str(tmp_path / "o"), *flags]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_input(tmp_path, [{"id": "a", "tokens": [1]}])
    assert main(["score", "--model", str(tmp_path), "--input", str(path), "--out", str(tmp_path / "o")]) == 2
    assert f"{tmp_path}/config.json gives no vocab_size" in capsys.readouterr().err
