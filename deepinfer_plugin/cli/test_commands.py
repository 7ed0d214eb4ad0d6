"""The small commands: what they print, and one line with exit code 2 for what they cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_plugin import __version__, envs, settings_table, variables
from deepinfer_plugin.__main__ import main
from deepinfer_plugin.test_layers import repository

NANO_HASH = "68163115d64722536fb83cbfa0fc4f591935d72db27b22fa2369e2d706fba9f8"  # golden manifest, nano, seed 0
DEMO_TIMEOUT_S = 500


def test_tiny_writes_the_golden_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nano"
    assert main(["tiny", "--config", "nano", "--seed", "0", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: nano, seed 0, content hash {NANO_HASH}\n"
    assert len(list(out.glob("*.safetensors"))) == 2
    assert main(["tiny", "--config", "nano", "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny", "--seed", "-1", "--out", "x"], "--seed is -1, expected 0 or more"),
        (["tiny", "--out", "/proc/no/such/place"], "--out is /proc/no/such/place, which cannot be written"),
        (["demo", "--port", "0"], "--port is 0, expected 1 to 65535"),
        (["demo", "--dir", "/proc/no/such/place"], "--dir is /proc/no/such/place, which cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["fly"], ["tiny"], ["score"], ["tiny", "--config", "huge", "--out", "x"]])
def test_a_bad_command_line_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"deepinfer-plugin {__version__}\n"


def test_the_readme_lists_every_variable_and_command() -> None:
    text = (repository() / "README.md").read_text(encoding="utf-8")
    words = [variable.name for variable in variables.VARIABLES] + ["status", "tiny", "score", "demo", "sizing"]
    assert [word for word in words if f"`{word}`" not in text and f"deepinfer_plugin {word} " not in text] == []


def test_the_table_of_variables_in_the_readme_is_the_one_in_the_code() -> None:
    text = (repository() / "README.md").read_text(encoding="utf-8")
    assert text == settings_table.renewed(text)


@pytest.mark.slow
def test_the_demonstration_runs_and_its_answers_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepinfer_plugin", "demo", "--config", "nano", "--dir", str(tmp_path)]
    environment = envs.child_environment({"CUDA_VISIBLE_DEVICES": "", "VLLM_NO_USAGE_STATS": "1"})
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=DEMO_TIMEOUT_S, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    agree = ("tokens agree: yes", "log-probability bits agree: yes")
    for text in ("healthy after", "48 tokens in", "prompt tokens with the picture's, 24 tokens in", *agree, "stopped"):
        assert text in result.stdout
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert f"deepinfer_plugin {__version__} serves DeepseekV41ForCausalLM; kernel set: " in log
