"""Rules of the repository that no linter knows: who imports whom, sizes, one user of the environment, free names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

FOLDERS = {  # package -> folder that holds it
    "deepinfer_plugin": ".",
    "deepinfer_kernels": "kernels",
    "deepinfer_batch_invariant": "batch_invariant",
    "deepinfer_determinism": "determinism_tests",
    "deepinfer_evals": "evals",
}
ALLOWED = {  # package -> packages of ours, and vLLM, that it may import
    "deepinfer_kernels": set(),
    "deepinfer_batch_invariant": {"deepinfer_kernels"},
    "deepinfer_plugin": {"deepinfer_batch_invariant", "deepinfer_kernels", "vllm"},
    "deepinfer_determinism": {"deepinfer_plugin", "deepinfer_batch_invariant", "deepinfer_kernels", "vllm"},
    "deepinfer_evals": {"deepinfer_plugin", "deepinfer_batch_invariant", "deepinfer_kernels", "vllm"},
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150


def repository() -> Path:
    """The checkout this file belongs to; the installed copy finds it above its virtual environment."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "pyproject.toml").exists() and (folder / "kernels").is_dir():
            return folder
    pytest.skip("no checkout above this file: pyproject.toml and kernels/ were not found")


def sources() -> Iterator[tuple[str, Path, ast.Module]]:
    root = repository()
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            yield package, path, ast.parse(path.read_text(encoding="utf-8"))


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level if node.level else str(node.module).split(".")[0]


def test_imports_point_down_and_are_absolute() -> None:
    wrong = []
    for package, path, tree in sources():
        for name in imported_names(tree):
            is_ours = name in FOLDERS or name == "vllm"
            if name.startswith(".") or (is_ours and name != package and name not in ALLOWED[package]):
                wrong.append(f"{path}: imports {name}")
    assert wrong == []


def test_files_end_before_500_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for _, path, _ in sources()}
    assert {path: length for path, length in lengths.items() if length >= MAX_FILE_LINES} == {}


def test_functions_end_before_60_lines() -> None:
    wrong = []
    for _, path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                length = node.end_lineno - node.lineno + 1
                if length > (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES):
                    wrong.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    assert wrong == []


# NCCL reads the environment itself, and this bench times communicators made in two environments.
SETS_OF_NCCL = ("exchanges.py", "test_exchanges.py")


def test_only_envs_touches_the_environment() -> None:
    words = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    wrong = []
    for package, path, tree in sources():
        if (package == "deepinfer_plugin" and path.name == "envs.py") or path.name in SETS_OF_NCCL:
            continue
        for node in ast.walk(tree):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in words and ast.unparse(node.value) == "os"
            is_import = (
                isinstance(node, ast.ImportFrom) and node.module == "os" and words & {a.name for a in node.names}
            )
            if is_attribute or is_import:
                wrong.append(f"{path}:{getattr(node, 'lineno', 0)}")
    assert wrong == []


def test_folders_that_hold_a_package_hold_no_module_of_their_own() -> None:
    root = repository()
    assert [str(path) for folder in FOLDERS.values() if folder != "." for path in (root / folder).glob("*.py")] == []


def test_no_other_distribution_owns_our_names() -> None:
    owners = packages_distributions()
    foreign = {name: owners[name] for name in FOLDERS if set(owners.get(name, [])) - {"deepinfer-plugin"}}
    assert foreign == {}


def test_no_path_of_one_machine_is_in_the_sources() -> None:
    words = ["/" + "work/main", "/" + "opt/dev", "/" + "work/shared"]
    root = repository()
    texts = [path for _, path, _ in sources()] + [root / "build.sh", root / ".ci" / "run", *root.glob("*.md")]
    assert [f"{path}: {word}" for path in texts for word in words if word in path.read_text(encoding="utf-8")] == []


def test_importing_the_plugin_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, deepinfer_plugin; chosen = deepinfer_plugin.platform();"
        "import deepinfer_plugin.status, deepinfer_plugin.registration, deepinfer_plugin.__main__;"
        "loaded = sorted({'torch', 'vllm', 'triton'} & set(sys.modules)); sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
