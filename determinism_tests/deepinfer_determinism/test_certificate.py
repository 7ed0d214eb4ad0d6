"""Certificates and reports: what was changed by hand is noticed, what was written is shown."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deepinfer_determinism import certificate, report
from deepinfer_determinism.results import (
    CoverageRow,
    FirstDifference,
    MutantResult,
    OperationResult,
    RelationResult,
    RunResult,
    write_result,
)
from deepinfer_plugin.errors import InputError, SettingError


def relation(name: str, differences: int = 0, rows: int = 10) -> RelationResult:
    first = FirstDifference(request="a<b", position=3, got="1.5 & bits", want="<2>") if differences else None
    return RelationResult(
        relation=name,
        configuration="nano ref cpu",
        rows_compared=rows,
        differences=differences,
        first_difference=first,
        mechanisms={"chunks": 4},
        exercised=True,
        seconds=1.5,
    )


def run(differences: int = 0) -> RunResult:
    return RunResult(
        depth="quick",
        device="cpu",
        checkpoint="elsewhere",
        workload_seed=3,
        seconds=61.0,
        relations=(relation("order", differences), relation("chunks")),
        operations=(OperationResult(operation="rms_norm", rows_compared=7, batches=2, differences=0),),
        mutants=(MutantResult(name="split_k", ran=4, caught_by="order"),),
        coverage=(CoverageRow(name="row tile", where="row_tiles.py", value="16 rows", below=3, above=9),),
    )


def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "certificate.json"
    value = certificate.make(run(), certificate.environment_here("abc"))
    certificate.write(value, path)
    return path, value


def verify(path: Path) -> int:
    parser = argparse.ArgumentParser()
    certificate.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["certificate", "verify", str(path)])
    return int(parsed.run(parsed))


def test_a_certificate_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, value = written(tmp_path)
    assert certificate.read(path) == value
    assert value["summary"]["rows_compared"] == 27
    assert value["environment"]["weights_hash"] == "abc"
    assert value["environment"]["machine"]["kernel_set"]
    assert verify(path) == 0
    assert "content hash and schema hold" in capsys.readouterr().out


def test_another_machine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = certificate.make(run(), certificate.environment_here(None))
    value["environment"]["versions"]["torch"] = "1.0"
    value["content_hash"] = certificate.content_hash(value)
    certificate.write(value, tmp_path / "other.json")
    assert verify(tmp_path / "other.json") == 1
    assert "differs from this machine: versions.torch: certificate '1.0', here '" in capsys.readouterr().out


def test_a_run_of_another_machine_is_refused(tmp_path: Path) -> None:
    """The certificate describes the machine it is made on, which must be that of the run."""
    file, out = tmp_path / "run.json", tmp_path / "certificate.json"
    file.write_text(json.dumps(replace(run(), device="cuda").to_json()), encoding="utf-8")
    parser = argparse.ArgumentParser()
    certificate.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["certificate", "make", str(file), "--out", str(out)])
    with pytest.raises(
        SettingError, match="a run on cuda and this process is on cpu, expected the same kind of device"
    ):
        parsed.run(parsed)
    assert not out.exists()


def test_every_change_by_hand_is_noticed(tmp_path: Path) -> None:
    path, value = written(tmp_path)
    changes = {
        "differences": value["run"]["relations"][0] | {"differences": 1},
        "rows": value["run"]["relations"][0] | {"rows_compared": 11},
    }
    for changed in changes.values():
        edited = json.loads(json.dumps(value))
        edited["run"]["relations"][0] = changed
        path.write_text(json.dumps(edited), encoding="utf-8")
        with pytest.raises(InputError, match="was changed after it was made"):
            certificate.read(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v["run"]["relations"][0].pop("seconds"), r"run.relations\[0\] has fields \['seconds'\] missing"),
        (lambda v: v["run"].update(more=1), r"run has fields \['more'\] missing or unknown"),
        (lambda v: v["run"]["mutants"][0].update(ran="many"), r"run.mutants\[0\].ran is 'many', expected an integer"),
        (lambda v: v["run"]["mutants"][0].update(ran=True), r"ran is True, expected an integer"),
        (lambda v: v["run"]["relations"][0].update(mechanisms=[]), r"mechanisms is list, expected an object"),
        (lambda v: v["summary"].update(rows_compared=28), "summary does not add up to the run"),
        (lambda v: v.pop("environment"), r"fields \['environment'\] are missing or unknown"),
    ],
)
def test_a_certificate_with_another_schema_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    path, value = written(tmp_path)
    edit(value)
    value["content_hash"] = certificate.content_hash(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        certificate.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "x"}'])
def test_a_file_that_is_no_certificate_is_one_clear_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"certificate: .*bad.json"):
        certificate.read(path)
    with pytest.raises(InputError, match=r"run result: "):
        certificate.read_run(path)


def test_weights_are_hashed_by_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    first = certificate.weights_hash("x", tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert certificate.weights_hash("x", tmp_path) != first
    assert certificate.weights_hash("x", None) is None
    assert certificate.weights_hash(str(tmp_path), None) == certificate.weights_hash("x", tmp_path)


def test_the_weights_of_a_small_checkpoint_are_hashed_by_name_and_seed() -> None:
    first = certificate.weights_hash("nano:0", None)
    assert first is not None
    assert first == certificate.weights_hash("nano", None)
    assert first != certificate.weights_hash("nano:1", None)


STORED = sorted((Path(certificate.__file__).parent / "certificates").glob("*.json"))


LEAST_ROWS = {"cpu-nano.json": ("full", 200_000), "h200-nano.json": ("quick", 8_000)}


def test_every_stored_certificate_is_known() -> None:
    assert {path.name for path in STORED} == set(LEAST_ROWS)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_a_stored_certificate_holds(path: Path) -> None:
    """Hash, schema and sums; and it is one of a whole set that passed, on the machine of its name."""
    value = certificate.read(path)
    run = RunResult.from_json(value["run"])
    depth, least_rows = LEAST_ROWS[path.name]
    assert value["summary"]["is_passed"]
    assert value["summary"]["differences"] == 0
    assert (run.depth, run.is_complete) == (depth, True)
    assert run.rows_compared >= least_rows
    assert run.seconds <= 3600
    device = value["environment"]["machine"]["device_name"]
    assert path.name.startswith("cpu" if run.device == "cpu" else device.split()[-1].lower())
    assert value["environment"]["weights_hash"] == certificate.weights_hash(run.checkpoint, None)
    edited = json.loads(json.dumps(value))
    edited["run"]["relations"][0]["rows_compared"] += 1
    assert certificate.content_hash(edited) != value["content_hash"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_without_scripts(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_result(run(differences=2), path)
    text = report.page(certificate.read_run(path))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert '<td class="bad">different<small>10 rows, 2 differ; chunks 4</small></td>' in text
    assert '<td class="good">equal' in text
    assert "a&lt;b" in text
    assert "1.5 &amp; bits" in text
    assert 'style="width:25.0%"' in text
    assert "did not pass" in text


def test_the_report_of_a_certificate_names_it(tmp_path: Path) -> None:
    path, value = written(tmp_path)
    out = tmp_path / "report.html"
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["report", str(path), "--out", str(out)])
    assert parsed.run(parsed) == 0
    assert value["content_hash"] in out.read_text(encoding="utf-8")
