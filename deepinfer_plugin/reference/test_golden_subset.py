"""The golden data in the package is a faithful and small part of the full folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from deepinfer_kernels.testing import golden_dir, packaged_golden_dir
from deepinfer_plugin.reference.golden import Checkpoint, GoldenCase, decode_cases, prefill_cases
from deepinfer_plugin.reference.golden_subset import main
from deepinfer_plugin.settings import Arithmetic

MAX_BYTES = 1_500_000


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_packaged_files_are_those_of_the_manifest_and_small() -> None:
    root = packaged_golden_dir()
    assert root is not None
    files = _files(root)
    manifest = json.loads(files.pop("manifest.json"))
    found = [(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in files.items()]
    assert found == [(entry["path"], entry["bytes"], entry["sha256"]) for entry in manifest["files"]]
    assert sum(len(content) for content in files.values()) < MAX_BYTES


def test_the_packaged_files_are_made_again_bit_by_bit(tmp_path: Path) -> None:
    full, packaged = golden_dir(), packaged_golden_dir()
    assert packaged is not None
    names = [name for name in _files(packaged) if name != "manifest.json"]
    missing = [name for name in names if full is None or not (full / name).is_file()]
    if full is None or missing:
        pytest.skip(f"the full golden folder shared/golden lacks {', '.join(missing)}")
    main(["--golden", str(full), "--out", str(tmp_path)])
    assert _files(tmp_path) == _files(packaged)


def test_the_packaged_files_read_as_cases() -> None:
    root, key = packaged_golden_dir(), Checkpoint("tiny", 0)
    assert root is not None
    cases: list[GoldenCase] = []
    for arithmetic in Arithmetic:
        cases += prefill_cases(root / key.folder / "prefill.safetensors", key, arithmetic)
        cases += decode_cases(root / key.folder / "decode.safetensors", key, arithmetic)
    assert len(cases) >= 15
    for case in cases:
        assert case.logits.shape[0] == case.rows.shape[0] == case.is_stable.shape[0] > 0
        assert int(case.rows.max()) == case.tokens.shape[0] - 1
