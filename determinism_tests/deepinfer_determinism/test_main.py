"""The command line: bad input is one line on standard error and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_determinism.__main__ import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["locate", "FILE", "FILE"], "error: schedule: "),
        (["replay", "FILE"], "error: replay: "),
        (["certificate", "verify", "FILE"], "error: certificate: "),
        (["certificate", "make", "FILE"], "error: run result: "),
        (["report", "FILE"], "error: run result: "),
        (["certify", "--base-url", "http://127.0.0.1:9", "--model", "m"], "error: certify: http://127.0.0.1:9 cannot"),
        (["certify", "--base-url", "http://127.0.0.1:9", "--model", "m", "--compare", "FILE"], "error: certify: --com"),
        (["certify", "--base-url", "http://127.0.0.1:99999", "--model", "m"], "error: certify: --base-url is "),
        (["certify", "--base-url", "http://[", "--model", "m"], "error: certify: --base-url is "),
        (["run", "--out", "FOLDER"], "error: run: --out is "),
        (["run", "--out", "/proc/nowhere/run.json"], "error: run: --out is "),
        (["run", "--device", "tpu"], "error: run: --device is 'tpu', expected cpu or cuda"),
        (["run", "--checkpoint", "nano:x"], "error: run: --checkpoint is 'nano:x'"),
        (["run", "--jobs", "-1"], "error: run: --jobs is -1, expected "),
        (["run", "--relation", "nope"], "error: run: --relation is 'nope', expected one of: neighbours, "),
        (["locate", "FILE", "FILE", "--device", "tpu"], "error: --device is 'tpu'"),
        (["locate", "FILE", "FILE", "--out", "FOLDER"], "error: --out is "),
        (["replay", "FILE", "--device", "tpu"], "error: --device is 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half.json"
    half.write_text('{"kind": ', encoding="utf-8")
    places = {"FILE": str(half), "FOLDER": str(tmp_path)}
    assert main([places.get(word, word) for word in words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(message)
    assert said.count("\n") == 1
    assert half.read_text(encoding="utf-8") == '{"kind": '


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", "--device", "cuda"]) == 2
    assert "this machine has no NVIDIA GPU that this process may use" in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["prove"])
    assert caught.value.code == 2
    assert "prove" in capsys.readouterr().err
