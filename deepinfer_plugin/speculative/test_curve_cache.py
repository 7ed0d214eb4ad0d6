"""A stored curve comes back for the same engine only; everything else is measured again, with one warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.speculative.curve_cache import CurveCache
from deepinfer_plugin.speculative.step_time import StepTimeCurve

CURVE = StepTimeCurve(rows=(1, 8), times_s=(0.25, 0.5), largest_graph=8)
KEY: dict[str, Any] = {"model": "a", "graphs": [1, 8], "sizes": {"tensor": 1}}
LIFETIME_S, NOW_S = 100.0, 1e9


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, warnings: list[str]) -> CurveCache:
    return CurveCache(folder=tmp_path / "new" / "folder", key=KEY, lifetime_s=LIFETIME_S, warn=warnings.append)


def test_a_curve_comes_back_until_it_is_too_old(cache: CurveCache, warnings: list[str]) -> None:
    assert cache.load(NOW_S) is None
    assert warnings == []
    cache.store(CURVE, NOW_S)
    assert cache.load(NOW_S) == CURVE
    assert cache.load(NOW_S + LIFETIME_S - 1) == CURVE
    assert warnings == []
    assert cache.load(NOW_S + LIFETIME_S) is None
    assert cache.load(NOW_S - 1) is None  # written in the future
    assert [text.split(" is not used: ")[1] for text in warnings] == [
        "it is 100 s old, expected 0 to 100; they are measured again",
        "it is -1 s old, expected 0 to 100; they are measured again",
    ]
    cache.store(CURVE, NOW_S + LIFETIME_S)
    assert cache.load(NOW_S + LIFETIME_S) == CURVE


def test_nothing_but_the_file_is_left_behind(cache: CurveCache) -> None:
    cache.store(CURVE, NOW_S)
    assert list(cache.folder.iterdir()) == [cache.path]


@pytest.mark.parametrize("changed", [{"model": "b"}, {"graphs": [1]}, {"sizes": {"tensor": 2}}])
def test_another_engine_has_another_file(changed: dict[str, Any], cache: CurveCache, warnings: list[str]) -> None:
    cache.store(CURVE, NOW_S)
    other = CurveCache(folder=cache.folder, key={**KEY, **changed}, lifetime_s=LIFETIME_S, warn=warnings.append)
    assert other.load(NOW_S) is None
    assert warnings == []
    other.path.write_bytes(cache.path.read_bytes())  # by hand, under its name
    assert other.load(NOW_S) is None
    assert len(warnings) == 1
    assert "belongs to another engine" in warnings[0]


def _with(**changed: object) -> Callable[[bytes], bytes]:
    return lambda found: json.dumps({**json.loads(found), **changed}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found[: len(found) // 2],
        lambda _: b"",
        lambda _: b"[]",
        lambda _: b"\xff\xfe",
        _with(form=2),
        _with(rows=[8, 1]),
        _with(rows=None),
        _with(times_s=[0.25]),
        _with(times_s=[0.25, float("inf")]),
        _with(measured_s="yesterday"),
        _with(largest_graph={}),
    ],
)
def test_a_damaged_file_is_one_warning_and_is_replaced(
    damage: Callable[[bytes], bytes], cache: CurveCache, warnings: list[str]
) -> None:
    cache.store(CURVE, NOW_S)
    cache.path.write_bytes(damage(cache.path.read_bytes()))
    assert cache.load(NOW_S) is None
    assert len(warnings) == 1
    assert str(cache.path) in warnings[0]
    cache.store(CURVE, NOW_S)
    assert cache.load(NOW_S) == CURVE


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").write_text("")
    cache = CurveCache(folder=tmp_path / "file", key=KEY, lifetime_s=LIFETIME_S, warn=warnings.append)
    cache.store(CURVE, NOW_S)
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]
