"""Rows become questions: ids, prompts byte for byte, option order, seeds; and errors that say what to do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from deepinfer_evals import data, mini
from deepinfer_evals.benchmark import filled
from deepinfer_evals.seeds import SEED_BITS, keyed_subset, sample_seed
from deepinfer_evals.tasks import BENCHMARKS
from deepinfer_evals.tasks.gpqa_diamond import LETTERS
from deepinfer_plugin.errors import InputError

AIME, GPQA, HLE = (BENCHMARKS[name] for name in ("aime2026", "gpqa_diamond", "hle"))


def test_a_seed_is_a_function_of_its_four_names() -> None:
    assert (
        sample_seed(0, "aime2026", "7", 1) == 4_500_617_999_845_460
    )  # sha256 of str:sample\0int:0\0str:aime2026\0str:7\0int:1, first 53 bits
    seeds = {
        sample_seed(run, task, question, epoch)
        for run in (0, 1, -1)
        for task in ("a", "b")
        for question in ("1", "11", "111")
        for epoch in range(1, 40)
    }
    assert len(seeds) == 3 * 2 * 3 * 39
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)


def test_a_larger_subset_contains_the_smaller_one() -> None:
    ids = [str(index) for index in range(50)]
    small, large = keyed_subset(ids, 10, "k"), keyed_subset(ids, 20, "k")
    assert len(small) == 10
    assert set(small) < set(large)
    assert keyed_subset(ids, 10, "other") != small


def test_a_question_is_the_same_in_any_order_of_the_rows() -> None:
    rows = mini.gpqa_rows(30)
    first = {question.id: question for question in GPQA.questions(rows)}
    random.Random(5).shuffle(rows)
    assert {question.id: question for question in GPQA.questions(rows)} == first


def test_the_right_option_stands_where_the_gold_letter_says_and_every_letter_occurs() -> None:
    golds = []
    for row, question in zip(mini.gpqa_rows(60), GPQA.questions(mini.gpqa_rows(60)), strict=True):
        options = dict(line.split(") ", 1) for line in question.prompt.splitlines() if line[1:3] == ") ")
        assert options[question.gold] == row["Correct Answer"]
        assert sorted(options) == list(LETTERS)
        golds.append(question.gold)
    assert {golds.count(letter) > 4 for letter in LETTERS} == {True}


def test_a_prompt_is_the_template_with_the_question_in_it() -> None:
    question = AIME.questions(mini.aime_rows(1))[0]
    assert question.prompt == AIME.template().replace("{question}", question.question)
    assert "\\mathbb{Z}" in question.prompt


def test_slots_inside_a_question_stay_text() -> None:
    assert filled("<{a}|{b}>", {"a": "{b}{a}", "b": "x"}) == "<{b}{a}|x>"


def test_questions_with_an_image_are_left_out() -> None:
    assert len(HLE.questions(mini.hle_rows(10))) == 8


@pytest.mark.parametrize(("change", "text"), [
    ({"problem_idx": 1}, "id '1' of an earlier row"),
    ({"problem": ""}, "empty id, question or answer"),
])  # fmt: skip
def test_rows_that_cannot_be_asked_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        AIME.questions([*mini.aime_rows(1), {**mini.aime_rows(2)[1], **change}])


def test_columns_that_are_not_read_do_not_change_a_row_hash() -> None:
    rows = mini.gpqa_rows(1)
    first = GPQA.questions(rows)[0].row_hash
    assert GPQA.questions([{**rows[0], "Explanation": "other"}])[0].row_hash == first
    assert GPQA.questions([{**rows[0], "Incorrect Answer 3": "other"}])[0].row_hash != first


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_local_copy_is_read_in_every_form(kind: str, tmp_path: Path) -> None:
    import datasets

    rows = mini.aime_rows(5)
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / f"train-00000.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "csv":
        table.to_csv(path, index=False)
    else:
        text = json.dumps(rows) if kind == "json" else "\n".join(json.dumps(row) for row in rows)
        path.write_text(text, encoding="utf-8")
    loaded = data.load(AIME, revision=None, data_dir=tmp_path)
    assert AIME.questions(loaded.rows) == AIME.questions(rows)
    assert loaded.source == "local"


def test_the_file_that_names_the_configuration_is_taken(tmp_path: Path) -> None:
    mini.write_rows(tmp_path, mini.gpqa_rows(9)).joinpath("rows.jsonl").rename(tmp_path / "gpqa_main.jsonl")
    mini.write_rows(tmp_path, mini.gpqa_rows(4)).joinpath("rows.jsonl").rename(tmp_path / "gpqa_diamond.jsonl")
    assert len(data.load(GPQA, revision=None, data_dir=tmp_path).rows) == 4


@pytest.mark.parametrize(("content", "text"), [
    ({}, "holds no .csv, .json"),
    ({"a.jsonl": '{"problem": "x"}'}, "column 'problem_idx'"),
    ({"a.jsonl": "{"}, "cannot be read"),
    ({"a.jsonl": "{}", "b.csv": "a"}, "expected one kind"),
])  # fmt: skip
def test_a_bad_local_copy_is_named(content: dict[str, str], text: str, tmp_path: Path) -> None:
    for name, body in content.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    with pytest.raises(InputError, match=text):
        data.load(AIME, revision=None, data_dir=tmp_path)


def test_a_data_set_that_cannot_be_had_says_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(InputError) as gated:
        data.load(GPQA, revision=None, data_dir=None)
    for part in ("accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa", "hf auth login", "--data-dir"):
        assert part in str(gated.value)
    with pytest.raises(InputError) as plain:
        data.load(AIME, revision=None, data_dir=None)
    assert "terms" not in str(plain.value)
    assert "huggingface.co" in str(plain.value)


def test_offline_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    def offline(*_: object, **__: object) -> None:
        raise OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled.")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(InputError, match="unset HF_HUB_OFFLINE, or name a commit"):
        data.load(AIME, revision=None, data_dir=None)
