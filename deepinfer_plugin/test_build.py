"""build.sh: what it refuses before it downloads anything, what it skips, and the wheel it will not ship.

Each test runs a copy in its own folder, with stand-ins on PATH; nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.test_layers import repository

TOOLS = ["awk", "bash", "cat", "chmod", "dirname", "find", "mkdir", "mktemp", "rm", "sed"]
TOOLS += ["sha256sum", "sort", "tar", "xargs"]
TIMEOUT_S = 60


class Checkout:
    """A folder with build.sh and the smallest sources, and a bin folder that is all of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.bin = folder / "bin"
        self.home = folder / "home"
        for path in (self.folder, self.bin, self.home):
            path.mkdir()
        shutil.copy(repository() / "build.sh", self.folder)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            (self.folder / name).write_text(name)
        for name in ("deepinfer_plugin", "kernels", "batch_invariant", "determinism_tests", "evals"):
            (self.folder / name).mkdir()
            (self.folder / name / "module.py").write_text(name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, f"{tool} is not installed"
            (self.bin / tool).symlink_to(found)
        self.stub("uname", 'case "$1" in -s) echo Linux ;; -m) echo x86_64 ;; esac')
        self.stub("df", 'echo header; echo "disk 1 1 $((100 << 20)) 1% /"')

    def stub(self, name: str, body: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        unset = dict.fromkeys(("DEEPINFER_ACCELERATOR", "PYENV_VERSION", "TMPDIR", "ASCEND_HOME_PATH"))
        base = {"PATH": str(self.bin), "HOME": str(self.home), "PYENV_ROOT": str(self.home / ".pyenv")}
        environment = envs.child_environment({**unset, **base, **variables})
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def build(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "build.sh", *words, **variables)

    def call(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``code`` with the functions of build.sh."""
        return self.run("bash", "-c", f"source ./build.sh; {code}", **variables)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def assert_refused(result: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert result.returncode == 2, result
    assert [text for text in texts if text not in result.stderr] == [], result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_another_system_is_refused(checkout: Checkout) -> None:
    checkout.stub("uname", "echo Darwin")
    assert_refused(checkout.build(), "the system is Darwin, expected Linux")
    assert not (checkout.folder / ".venv").exists()


def test_another_processor_is_refused(checkout: Checkout) -> None:
    checkout.stub("uname", 'case "$1" in -s) echo Linux ;; -m) echo riscv64 ;; esac')
    assert_refused(checkout.build("test"), "the processor is riscv64, expected x86_64 or aarch64")


def test_too_little_disk_is_refused_with_need_and_what_is_there(checkout: Checkout) -> None:
    checkout.stub("df", 'echo header; echo "disk 1 1 $((7 << 20)) 1% /"')
    assert_refused(checkout.build("demo"), str(checkout.folder), "has 7 GiB free, expected 13 GiB")
    assert not (checkout.folder / ".venv").exists()


def test_too_little_temporary_space_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    checkout.stub("df", '[ "$2" = . ] && size=100 || size=3; echo header; echo "disk 1 1 $((size << 20)) 1% /"')
    assert_refused(checkout.build(TMPDIR=str(tmp_path)), f"{tmp_path} has 3 GiB free, expected 4 GiB", "set TMPDIR")


@pytest.mark.parametrize("word", ["deploy", "--demo", "TEST"])
def test_an_unknown_word_is_refused(checkout: Checkout, word: str) -> None:
    assert_refused(checkout.build(word), f"the word is '{word}', expected demo, test, wheel or none")


def test_help_is_the_head_of_the_file(checkout: Checkout) -> None:
    result = checkout.build("--help")
    assert result.returncode == 0
    assert "./build.sh demo" in result.stdout
    assert "DEEPINFER_ACCELERATOR" in result.stdout


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ("gpu", "DEEPINFER_ACCELERATOR is 'gpu', expected auto, nvidia, ascend or cpu"),
        ("nvidia", "DEEPINFER_ACCELERATOR is nvidia, but nvidia-smi finds no GPU"),
        ("ascend", "lacks the NPU driver (npu-smi), CANN in /usr/local/Ascend, a vllm-ascend release for vLLM 0.33"),
    ],
)
def test_an_accelerator_that_is_not_there_is_refused(checkout: Checkout, wish: str, text: str) -> None:
    if wish == "ascend" and Path("/usr/local/Ascend").exists():
        pytest.skip("CANN is installed on this machine")
    assert_refused(checkout.build(DEEPINFER_ACCELERATOR=wish), text)


def test_a_gpu_that_is_there_is_accepted(checkout: Checkout) -> None:
    checkout.stub("nvidia-smi", "exit 0")
    assert checkout.call("check_accelerator", DEEPINFER_ACCELERATOR="nvidia").returncode == 0


def test_no_python_says_how_to_get_one(checkout: Checkout) -> None:
    checkout.stub("python3", "exit 1")  # an older Python, or one without venv
    assert_refused(
        checkout.build(), "no Python 3.12", "uv python install 3.12", "pyenv install 3.12", "python3.12-venv"
    )
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="needs to run under Python 3.12")
@pytest.mark.parametrize("place", ["PATH", "pyenv", "PYENV_VERSION", "uv"])
def test_a_python_is_found(checkout: Checkout, place: str) -> None:
    real = Path(os.path.realpath(sys.executable))
    versions = checkout.home / ".pyenv" / "versions"
    variables = {}
    if place == "PATH":
        path = checkout.bin / "python3.12"
        path.symlink_to(real)
    elif place == "uv":
        path = real
        checkout.stub("uv", f'[ "$*" = "python find 3.12" ] && echo {real}')
    else:
        path = versions / ("3.12.7" if place == "pyenv" else "mine") / "bin" / "python"
        path.parent.mkdir(parents=True)
        path.symlink_to(real)
        variables = {"PYENV_VERSION": "mine"} if place == "PYENV_VERSION" else {}
    checkout.stub("python3", "exit 1")
    result = checkout.call("find_python", **variables)
    assert (result.returncode, result.stdout.strip()) == (0, str(path)), result.stderr


def test_a_virtual_environment_of_somebody_else_is_kept(checkout: Checkout) -> None:
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "mine").write_text("x")
    assert_refused(checkout.call("make_venv"), ".venv was not made by build.sh")
    assert (checkout.folder / ".venv" / "mine").exists()


INSTALL = """
make_venv() {
    mkdir -p .venv/bin
    printf '#!/bin/bash\\necho Python 3.12.1\\n' > .venv/bin/python
    chmod +x .venv/bin/python
}
build_wheel() { echo dist/ours.whl; }
pip() { echo "pip $*" >> calls; }
install $WORD >/dev/null
[ ! -e calls ] || cat calls
rm -f calls
"""


def test_a_second_run_does_only_what_changed(checkout: Checkout) -> None:
    def install(word: str = "") -> list[str]:
        result = checkout.call(INSTALL, WORD=word)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    reinstall = "pip install --quiet --no-deps --force-reinstall dist/ours.whl"
    assert install() == [reinstall, "pip install dist/ours.whl"]
    assert install() == []
    (checkout.folder / "kernels" / "module.py").write_text("changed")
    assert install() == [reinstall]
    assert install("test") == [reinstall, "pip install dist/ours.whl[test]"]
    assert install() == install("test") == []
    (checkout.folder / "pyproject.toml").write_text("changed")
    assert install() == [reinstall, "pip install dist/ours.whl"]


def test_an_interrupted_installation_is_repeated(checkout: Checkout) -> None:
    broken = INSTALL.replace('pip() { echo "pip $*" >> calls; }', "pip() { return 1; }")
    assert checkout.call(broken, WORD="").returncode != 0
    assert "pip install dist/ours.whl" in checkout.call(INSTALL, WORD="").stdout


@pytest.mark.parametrize(
    ("name", "is_ours"), [("deepinfer_plugin/a.py", True), ("kernels/deepinfer_kernels/a.py", False)]
)
def test_a_wheel_with_foreign_names_is_refused(checkout: Checkout, name: str, is_ours: bool) -> None:
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    (checkout.folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    with zipfile.ZipFile(checkout.folder / "a.whl", "w") as wheel:
        wheel.writestr(name, "")
        wheel.writestr("deepinfer_plugin-0.1.0.dist-info/METADATA", "")
    result = checkout.call("check_wheel a.whl")
    assert (result.returncode == 0) == is_ours, result.stderr
    if not is_ours:
        assert "top-level names ['kernels'], expected deepinfer* only" in result.stderr


@pytest.mark.parametrize("code", [0, 7])
def test_ci_runs_the_tests_without_input_and_passes_the_exit_code_on(checkout: Checkout, code: int) -> None:
    (checkout.folder / ".ci").mkdir()
    shutil.copy(repository() / ".ci" / "run", checkout.folder / ".ci")
    (checkout.folder / "build.sh").write_text(f'echo "$PWD $*"; cat; exit {code}\n')
    result = checkout.run("bash", ".ci/run")
    assert (result.returncode, result.stdout) == (code, f"{checkout.folder} test\n")
