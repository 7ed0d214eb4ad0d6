"""Row hashes, the search for the first parting operation, and shrinking; the engine itself in one slow test."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_determinism import locate, replay, row_hashes, shrink
from deepinfer_determinism.replay import Pair
from deepinfer_determinism.row_hashes import Recorder, RowHashes, RowName, Target, row_hash
from deepinfer_determinism.schedule import Schedule, save
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.errors import InputError
from deepinfer_plugin.settings import Arithmetic

FAULT = "deepinfer_plugin.engine_child.faults:window_short_after_the_first_request"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn)


def request(name: str, length: int, outputs: int = 4) -> Request:
    generator = random.Random(name)
    tokens = tuple(generator.randrange(3, 60) for _ in range(length))
    return Request(name=name, tokens=tokens, max_tokens=outputs)


def schedule(name: str, *actions: Action, faults: tuple[str, ...] = ()) -> Schedule:
    run = EngineRun(name=name, model="nano:0", arithmetic=Arithmetic.REF, actions=actions, faults=faults)
    return Schedule(run=run)


def crowded(num_others: int = 5, faults: tuple[str, ...] = ()) -> Pair:
    probe = request("p", 40, 6)
    others = tuple(request(f"n{index}", 5 + 9 * index) for index in range(num_others))
    return Pair(
        a=schedule("A", Action(add=(probe,))),
        b=schedule("B", Action(add=(*others, replace(probe, name="p@crowd"))), faults=faults),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_hash_is_a_function_of_the_bits_of_the_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, 7, generator=generator).mul(20).to(dtype)
    whole = row_hash(x)
    assert whole.dtype == torch.int64
    assert torch.equal(whole[3:5], row_hash(x[3:5].clone()))
    assert torch.equal(whole[::2], row_hash(x[::2]))  # strided rows
    assert len(set(whole.tolist())) == 9
    bits = x.clone()
    bits.view(torch.uint8)[4, 2, 1] ^= 1
    assert (row_hash(bits) != whole).tolist() == [False] * 4 + [True] + [False] * 4
    swapped = x.clone()
    swapped[0, 0] = x[0, 0, torch.arange(6, -1, -1)]
    assert row_hash(swapped)[0] != whole[0]


def test_signed_zeros_and_nan_payloads_are_told_apart() -> None:
    x = torch.tensor([[0.0], [-0.0], [torch.nan], [-torch.nan]])
    assert len(set(row_hash(x).tolist())) == 4


def test_what_follows_the_longest_request_is_left_out() -> None:
    narrow = torch.tensor([[1.0, -torch.inf]])
    wide = torch.tensor([[1.0, -torch.inf, -torch.inf]])
    assert torch.equal(row_hash(narrow, operation="indexer_logits"), row_hash(wide, operation="indexer_logits"))
    assert not torch.equal(row_hash(narrow), row_hash(wide))
    slots = torch.tensor([[7, 9, -1]])
    assert torch.equal(row_hash(slots, operation="window_slots"), row_hash(slots + 0, operation="window_slots"))
    assert torch.equal(
        row_hash(slots, operation="window_slots"), row_hash(torch.tensor([[2, 30, -1]]), operation="window_slots")
    )


class FakeBatch:
    """The fields of vLLM's InputBatch that a recorder reads."""

    def __init__(self, owners: Sequence[tuple[str, int, int]], padding: int = 0) -> None:
        self.req_ids = [f"{name}-0123abcd" for name, _, _ in owners]
        self.num_reqs = len(owners)
        starts = np.cumsum([0, *(count for _, _, count in owners)])
        self.query_start_loc_np = starts
        positions = [start + index for _, start, count in owners for index in range(count)] + [0] * padding
        self.positions = torch.tensor(positions)
        self.num_tokens_after_padding = len(positions)
        self.logits_indices = torch.tensor(starts[1:] - 1)


def test_a_recorder_names_rows_by_request_and_position(tmp_path: Path) -> None:
    recorder = Recorder()
    x = torch.arange(8.0).view(4, 2)
    recorder.begin(FakeBatch([("a", 5, 2), ("b-b", 0, 1)], padding=1), max_rows=16)
    recorder.write("first", (x, x + 1))
    recorder.write("first", (x + 2, x))
    recorder.write("other rows", x[:2])
    recorder.logits_begin()
    recorder.write("linear", x[:2])
    recorder.logits_begin()  # prompt scores: rows of another kind
    recorder.write("linear", x[:2])
    recorder.collect()
    recorder.save(tmp_path / "rows.npz")
    found = row_hashes.read(tmp_path / "rows.npz")
    keys = ("sampler/first.0", "sampler/first.1", "sampler/first.0#2", "sampler/first.1#2", "sampler/linear")
    assert found.operations == keys
    assert found.rows == (RowName("a", 5, 0), RowName("a", 6, 0), RowName("b-b", 0, 0))
    assert found.present[:, 4].tolist() == [False, True, True]
    assert found.hashes[:, 0].tolist() == row_hash(x)[:3].tolist()
    assert found.hashes[1:, 4].tolist() == row_hash(x)[:2].tolist()


def test_operations_stand_in_the_order_of_a_step_after_a_run_that_left_some_out(tmp_path: Path) -> None:
    """A run that measures memory has no caches and skips attention; it comes before the first step."""
    recorder = Recorder()
    x = torch.arange(4.0).view(2, 2)
    for operations in (("norm", "project", "experts"), ("norm", "slots", "attend", "project", "experts", "norm")):
        recorder.begin_dummy(2, max_rows=16)
        for operation in operations:
            recorder.write(operation, x)
    recorder.save(tmp_path / "rows.npz")
    found = row_hashes.read(tmp_path / "rows.npz").operations
    assert found == tuple(f"sampler/{name}" for name in ("norm", "slots", "attend", "project", "experts", "norm#2"))


def test_a_graph_that_repeats_the_writes_is_read_too() -> None:
    """What a CUDA graph does: Python writes during capture only, later steps change the buffers alone."""
    recorder = Recorder(target=Target("a", 1, "sampler/captured"))
    x = torch.arange(8.0).view(4, 2)
    recorder.begin_dummy(4, max_rows=16)
    recorder.write("captured", x)
    recorder.begin(FakeBatch([("a", 0, 3)], padding=1), max_rows=16)
    recorder.buffers["sampler/captured"][:4].copy_(row_hash(x + 7))  # the replay
    recorder._held_by_rows[4].values[:4].copy_(x + 7)
    recorder.collect()
    assert [values["sampler/captured"] for _, values in recorder.found] == row_hash(x + 7)[:3].tolist()
    assert recorder.replayed == 3
    assert recorder.captured is not None
    assert recorder.captured.tolist() == [9.0, 10.0]


def test_what_stands_before_a_graph_does_not_hide_it_and_belongs_to_its_step() -> None:
    """A model that takes images embeds its rows before the inputs of the graph are prepared, outside of it."""
    recorder = Recorder()
    x = torch.arange(8.0).view(4, 2)
    recorder.begin_dummy(4, max_rows=16)
    recorder.write("captured", x)
    for start in (0, 3):
        batch = FakeBatch([("a", start, 3)], padding=1)
        recorder.begin_with_embedding(batch, max_rows=16)
        recorder.write("embedding", x + start)
        recorder.begin(batch, max_rows=16)
        recorder.buffers["sampler/captured"][:4].copy_(row_hash(x + start + 7))  # the replay
    recorder.collect()
    for key, shift in (("sampler/embedding", 0), ("sampler/captured", 7)):
        want = [*row_hash(x + shift)[:3].tolist(), *row_hash(x + 3 + shift)[:3].tolist()]
        assert [values[key] for _, values in recorder.found] == want, key
    assert recorder.replayed == 6
    assert recorder._order == ["sampler/embedding", "sampler/captured"]


def test_the_head_is_read_where_a_graph_computes_it_and_where_it_follows_the_graph() -> None:
    """Its rows are those of the logits in a step of prompts, and those of the graph within one."""
    recorder = Recorder()
    x = torch.arange(8.0).view(4, 2)
    recorder.begin_dummy(4, max_rows=16)  # a run that measures memory
    recorder.write("norm", x)
    recorder.logits_begin()
    recorder.write("head", x)
    recorder.begin_dummy(4, max_rows=16)  # the capture
    recorder.write("norm", x)
    recorder.write("head", x)
    batch = FakeBatch([("a", 0, 1), ("b", 5, 1), ("c", 2, 1)], padding=1)
    recorder.begin(batch, max_rows=16)
    recorder.buffers["sampler/norm"][:4].copy_(row_hash(x + 1))  # the replay, head included
    recorder.buffers["sampler/head"][:4].copy_(row_hash(x + 2))
    recorder.begin(FakeBatch([("a", 1, 2), ("b", 6, 1)], padding=1), max_rows=16)  # not every row is sampled
    recorder.buffers["sampler/norm"][:4].copy_(row_hash(x + 3))
    recorder.logits_begin()
    recorder.write("head", x[:2] + 4)
    recorder.collect()
    norms = [values["sampler/norm"] for _, values in recorder.found]
    assert norms == [*row_hash(x + 1)[:3].tolist(), *row_hash(x + 3)[:3].tolist()]
    heads = [values.get("sampler/head") for _, values in recorder.found]
    assert heads == [*row_hash(x + 2)[:3].tolist(), None, *row_hash(x[:2] + 4).tolist()]
    assert recorder.replayed == 6


def table(rows: dict[tuple[str, int], list[int]], operations: Sequence[str]) -> RowHashes:
    hashes = np.array(list(rows.values()), dtype=np.int64)
    names = tuple(RowName(name, position, position) for name, position in rows)
    return RowHashes(
        operations=tuple(operations), rows=names, hashes=hashes, present=np.ones(hashes.shape, np.bool_), captured=None
    )


def test_the_first_parting_is_the_lowest_position_then_the_first_operation() -> None:
    a = table({("p", 0): [1, 2, 3], ("p", 1): [4, 5, 6], ("p", 2): [7, 8, 9]}, ("x", "y", "z"))
    b = table({("p@b", 2): [0, 0, 0], ("p@b", 1): [4, 0, 0], ("q", 0): [0, 0, 0]}, ("x", "y", "z"))
    found = locate.first_parting(a, b, [("p", "p@b")])
    assert found is not None
    assert (found.request, found.position, found.operation, found.agreeing) == ("p@b", 1, "y", 1)
    assert (found.a_hash, found.b_hash) == (f"{5:016x}", f"{0:016x}")
    assert locate.first_parting(a, a, [("p", "p")]) is None


def test_both_values_are_shown() -> None:
    a, b = np.array([1.0, 2.0, -0.0]), np.array([1.0, 2.5, 0.0])
    lines = list(locate.value_lines(a, b))
    assert lines[0] == "2 of 3 elements differ"
    assert lines[1] == "element 1: A 2.0 (0x1.0000000000000p+1), B 2.5 (0x1.4000000000000p+1)"


def needs(name: str, prompt: int, other_prompt: int) -> shrink.Test:
    """A pair parts while it has the request ``name`` and both prompts are at least so long."""

    def test(candidates: Sequence[Pair]) -> list[bool]:
        return [
            name in pair.b.requests
            and len(pair.b.requests["p@crowd"].tokens) >= prompt
            and len(pair.b.requests[name].tokens) >= other_prompt
            for pair in candidates
        ]

    return test


def test_shrinking_reaches_the_smallest_pair() -> None:
    pair = crowded(num_others=20)
    *_, last = shrink.shrink(pair, "p", needs("n13", 17, 3), shrink.Budget(1000))
    assert set(last.b.requests) == {"n13", "p@crowd"}
    assert set(last.a.requests) == {"p"}
    assert len(last.b.requests["p@crowd"].tokens) == len(last.a.requests["p"].tokens)
    assert len(last.b.requests["p@crowd"].tokens) == 17
    assert len(last.b.requests["n13"].tokens) == 3
    assert last.b.requests["n13"].max_tokens == 1


def test_shrinking_keeps_to_its_budget() -> None:
    budget = shrink.Budget(6)
    list(shrink.shrink(crowded(num_others=20), "p", needs("n13", 17, 3), budget))
    assert budget.spent == 6


def test_chained_schedules_keep_their_faults_and_empty_the_cache() -> None:
    probe = request("p", 4)
    one = replace(schedule("A", Action(add=(probe,), steps=1), Action(abort=("p",))), action_faults={1: ("f:g",)})
    chain, names = shrink.chained([one, one], "chain")
    assert list(chain.requests) == ["0.p", "1.p"]
    assert names[1] == {"p": "1.p"}
    assert chain.action_faults == {1: ("f:g",), 5: ("f:g",)}
    assert chain.run.actions[5].abort == ("1.p",)
    assert chain.run.actions[3].reset_prefix_cache


def test_a_pair_is_stored_and_read_back(tmp_path: Path) -> None:
    pair = replace(crowded(faults=(FAULT,)), found={"operation": "x"})
    replay.save_pair(pair, tmp_path / "pair.json")
    assert replay.load_pair(tmp_path / "pair.json") == pair
    save(pair.a, tmp_path / "one.json")
    assert replay.load_pair(tmp_path / "one.json") == Pair(a=pair.a, b=pair.a)


@pytest.mark.parametrize("text", ["", '{"kind": "deepinfer_determinism pair", "form', "[]", '{"kind": "x"}'])
def test_a_half_written_file_is_one_clear_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"half\.json"):
        replay.load_pair(path)


@pytest.mark.slow
def test_a_planted_fault_is_located_and_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = crowded(num_others=2, faults=(FAULT,))
    save(pair.a, tmp_path / "a.json")
    save(pair.b, tmp_path / "b.json")
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    locate.add_parser(commands)
    replay.add_parser(commands)
    out = tmp_path / "located.json"
    parsed = parser.parse_args(
        ["locate", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out), "--engines", "2"]
    )
    assert parsed.run(parsed) == 1
    said = capsys.readouterr().out
    assert "probes: A run twice without and once with them gives the same bits" in said
    assert "first operation that differs: layers.0.attn/window_slots, request 'p@crowd', position 1\n" in said
    assert "element 0: A 1, B 0" in said
    assert len(replay.load_pair(out).b.requests) == 2
    again = parser.parse_args(["replay", str(out)])
    assert again.run(again) == 1
