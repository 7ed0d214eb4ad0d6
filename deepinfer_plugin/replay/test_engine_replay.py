"""Bounded replay through vLLM's engine: bits, mechanisms, and planted faults that each comparison notices.

All engines run in two children. K is 20 here, so that short prompts are cut: window 8, blocks of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.replay.settings import ALLOW_VARIABLE, ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.replay.faults"
KEEP, WINDOW, BLOCK, NUM_OUTPUT = 20, 8, 32, 5
NUM_DECODER_LAYERS = 3  # of nano: layers 4 to 6
# prompts around K, the window behind K, and the block behind K
LENGTHS = (1, 8, 19, 20, 21, 27, 28, 29, 33, 51, 52, 53, 85, 131, 200)
LONG = tuple(length for length in LENGTHS if length - KEEP >= BLOCK)  # they can hit
CHUNKED = ("--max-num-batched-tokens=33", "--max-num-seqs=8")
SMALL = ("--max-num-batched-tokens=7", "--max-num-seqs=3")


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())


def _probe(length: int, suffix: str = "", *, prompt_rows: bool = False) -> Request:
    name = f"p{length}{suffix}"
    return Request(name=name, tokens=_tokens(length, length), max_tokens=NUM_OUTPUT, prompt_rows=prompt_rows)


def _engine(
    name: str,
    model: Path,
    actions: list[Action],
    *flags: str,
    mode: str = "compact",
    encoder: str = "exact",
    faults: tuple[str, ...] = (),
) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.REF,
        flags=(f"--block-size={BLOCK}", *flags),
        actions=tuple(actions),
        faults=tuple(f"{FAULTS}:{fault}" for fault in faults),
        variables={
            MODE_VARIABLE: mode,
            KEEP_VARIABLE: str(KEEP),
            ENCODER_VARIABLE: encoder,
            ALLOW_VARIABLE: "1" if encoder == "bounded" else "0",
        },
    )


def _cold() -> list[Action]:
    """All probes in one step, then among requests at other phases."""
    others = tuple(Request(name=f"o{i}", tokens=_tokens(900 + i, 40 + 37 * i), max_tokens=9) for i in range(4))
    mixed = [Action(add=others[:2], steps=3), Action(add=(others[2], _probe(85, "@mixed"), _probe(200, "@mixed")))]
    return [Action(add=tuple(_probe(length) for length in LENGTHS)), *mixed]


def _hits() -> list[Action]:
    """The cold probes, the same again, and hits of every block length of one long prompt."""
    long = _tokens(200, 200)
    shorter = [
        Action(add=(Request(name=f"cut {blocks}", tokens=long[: blocks * BLOCK + 1], max_tokens=1),))
        for blocks in range(1, 6)
    ]
    again = []
    for blocks, cut in enumerate(shorter, start=1):
        probe = _probe(200, f"@{blocks}")
        again += [Action(reset_prefix_cache=True), cut, Action(add=(probe,))]
    return [
        Action(add=tuple(_probe(length) for length in LENGTHS)),
        Action(add=tuple(_probe(length, "@hit") for length in LENGTHS)),
        *again,
    ]


def _twins() -> list[Action]:
    """The second of two equal prompts hits, in the same step, the blocks that the first one is about to fill."""
    return [Action(add=(_probe(131, "@first"), _probe(131, "@second")))]


def _runs(model: Path) -> list[EngineRun]:
    counted, hashed = ("decoder_rows_counted",), ("cached_pages_hashed",)
    return [
        _engine("mask", model, _cold(), mode="mask"),
        _engine("compact", model, _cold(), faults=counted),
        _engine("chunks", model, _cold(), *CHUNKED, faults=counted),
        _engine("small chunks", model, [Action(add=tuple(_probe(length) for length in LENGTHS[3:13]))], *SMALL),
        _engine("off", model, [Action(add=tuple(_probe(length) for length in LENGTHS))], mode="off"),
        _engine("rows", model, [Action(add=tuple(_probe(length, prompt_rows=True) for length in LENGTHS))], *CHUNKED),
        _engine("hits", model, _hits(), faults=hashed),
        _engine("segment cold", model, _cold(), "--no-enable-prefix-caching", encoder=f"segment:{BLOCK}"),
        _engine("segment mask", model, _cold(), *CHUNKED, mode="mask", encoder=f"segment:{BLOCK}"),
        _engine("segment hits", model, _hits(), encoder=f"segment:{BLOCK}", faults=hashed),
        _engine("segment chunks", model, _hits(), *CHUNKED, encoder=f"segment:{BLOCK}", faults=hashed),
        _engine("segment graph", model, _graph(), *SINGLE, encoder=f"segment:{BLOCK}", faults=("as_if_in_a_graph",)),
        _engine("twins", model, _twins()),
        _engine("segment twins", model, _twins(), encoder=f"segment:{BLOCK}"),
        _engine("bounded", model, _hits(), encoder="bounded", faults=hashed),
    ]


SINGLE = ("--max-num-batched-tokens=1", "--max-num-seqs=1")


def _graph() -> list[Action]:
    """One token a step, over borders inside the prompt and behind it, and behind a hit."""
    return [*(Action(add=(_probe(length),)) for length in (29, 53, 85)), Action(add=(_probe(85, "@hit"),))]


def _faulty(model: Path) -> list[EngineRun]:
    segment = f"segment:{BLOCK}"
    few = tuple(_probe(length) for length in (53, 85, 131))
    cold, hits = [Action(add=few)], [Action(add=few), Action(add=tuple(_probe(length, "@hit") for length in (85, 131)))]
    return [
        _engine("floor_of_the_chunk", model, cold, *CHUNKED, faults=("floor_of_the_chunk",)),
        _engine("floor_only_in_the_first_chunk", model, cold, *CHUNKED, faults=("floor_only_in_the_first_chunk",)),
        _engine("hits_not_limited", model, hits, faults=("hits_not_limited",)),
        _engine("decoder_windows_not_hidden", model, cold, faults=("decoder_windows_not_hidden",)),
        _engine("cached_entries_rewritten", model, hits, encoder=segment, faults=("cached_entries_rewritten",)),
        _engine("passes_by_request", model, _twins(), encoder=segment, faults=("passes_by_request",)),
        _engine("hit_without_replay", model, hits, encoder=segment, faults=("hit_without_replay",)),
    ]


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    model = checkpoint("nano", 0)
    return run_engines([*_runs(model), *_faulty(model)], num_children=2)


def _differing(results: Results, name: str, reference: str) -> list[str]:
    """Probes of an engine whose rows differ from those of the same probe in the reference."""
    wrong, compared = [], 0
    for request, result in results[name].requests.items():
        base = results[reference].requests.get(request.partition("@")[0])
        if base is None or request.startswith("o"):
            continue
        compared += 1
        if not torch.equal(result.logits[0], base.logits[0]) or not torch.equal(result.tokens[0], base.tokens[0]):
            wrong.append(request)
    assert compared > 0
    return wrong


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("compact", "mask"),
        ("chunks", "mask"),
        ("small chunks", "mask"),
        ("hits", "mask"),
        ("twins", "mask"),
        ("segment mask", "segment cold"),
        ("segment hits", "segment cold"),
        ("segment chunks", "segment cold"),
        ("segment twins", "segment cold"),
        ("segment graph", "segment cold"),
    ],
)
def test_every_kept_row_has_the_bits_of_the_reference(name: str, reference: str, results: Results) -> None:
    assert _differing(results, name, reference) == []


def test_replay_changes_exactly_the_prompts_that_it_cuts(results: Results) -> None:
    # a prompt of at most K tokens is not cut; one of up to K + 1 may still agree where the floor hides nothing
    changed = {int(name[1:]) for name in _differing(results, "off", "compact")}
    assert changed == {length for length in LENGTHS if length > KEEP}
    segmented = {int(name.partition("@")[0][1:]) for name in _differing(results, "segment cold", "compact")}
    assert segmented == {length for length in LENGTHS if length + NUM_OUTPUT - 1 > BLOCK}


def test_the_decoder_computes_k_rows_of_a_prompt_and_no_more(results: Results) -> None:
    prompts = [*LENGTHS, 85, 200, 40, 77, 114]
    outputs = NUM_OUTPUT * (len(LENGTHS) + 2) + 9 * 3
    rows = sum(min(KEEP, length) for length in prompts) + outputs - len(prompts)
    for name in ("compact", "chunks"):
        facts = results[name].facts
        assert facts.replay["decoder_rows"] == rows
        assert facts.fault_calls[f"{FAULTS}:decoder_rows_counted"] == rows * NUM_DECODER_LAYERS
        cached = sum(result.facts.num_cached_tokens for result in results[name].requests.values())
        assert cached > 0
        assert facts.replay["skipped_decoder_rows"] == sum(max(0, length - KEEP) for length in prompts) - cached
    assert results["mask"].facts.replay["skipped_decoder_rows"] == 0


def test_requests_stood_at_different_phases_in_one_step(results: Results) -> None:
    long = results["chunks"].requests["p200"].facts.chunks[0]
    assert len([size for size in long if size > 1]) > 3
    assert any(len(step) > 2 and len(set(step.values())) > 1 for step in results["chunks"].facts.steps)


def test_prompt_rows_come_from_an_unreplayed_prefill(results: Results) -> None:
    rows, off = results["rows"], results["off"]
    assert rows.facts.replay["unreplayed_requests"] == len(LENGTHS) - 1  # a prompt of one token has no row to ask for
    assert rows.facts.replay["skipped_decoder_rows"] == 0
    assert _differing(results, "rows", "off") == []
    prompt_logits = rows.requests["p200"].prompt_logits
    assert prompt_logits is not None
    assert prompt_logits.shape[0] == 199
    assert bool((prompt_logits.abs().amax(dim=1) > 0).all()), "a prompt row was left out"
    assert off.facts.replay["skipped_decoder_rows"] == 0


@pytest.mark.parametrize("name", ["hits", "segment hits", "segment chunks", "bounded"])
def test_hits_end_at_the_floor_and_leave_cached_pages_alone(name: str, results: Results) -> None:
    result = results[name]
    for length in LENGTHS:
        cached = result.requests[f"p{length}@hit"].facts.num_cached_tokens
        assert cached == max(0, length - KEEP) // BLOCK * BLOCK, length
    lengths = [result.requests[f"p200@{blocks}"].facts.num_cached_tokens for blocks in range(1, 6)]
    assert lengths == [BLOCK * blocks for blocks in range(1, 6)]
    kind = {"hits": "exact", "bounded": "bounded"}.get(name, "segment")
    counts = result.facts.replay
    assert counts[f"{kind}_hits"] == len(LONG) + 5
    assert sum(counts[f"{other}_hits"] for other in ("exact", "segment", "bounded")) == counts[f"{kind}_hits"]
    assert result.facts.fault_calls[f"{FAULTS}:cached_pages_hashed"] > 0
    assert (counts["replayed_encoder_rows"] > 0) == (kind != "exact")


@pytest.mark.parametrize("name", ["twins", "segment twins"])
def test_a_request_hit_blocks_that_were_filled_in_its_own_step(name: str, results: Results) -> None:
    assert results[name].requests["p131@second"].facts.num_cached_tokens == (131 - KEEP) // BLOCK * BLOCK
    assert {"p131@first": 131, "p131@second": 131 - 96} in results[name].facts.steps


def test_a_bounded_hit_is_another_function(results: Results) -> None:
    wrong = _differing(results, "bounded", "mask")
    assert wrong
    assert all("@" in name for name in wrong)
    assert results["bounded"].facts.replay["replayed_encoder_rows"] == WINDOW * (len(LONG) + 5)


def test_the_path_of_a_graph_was_taken_at_borders(results: Results) -> None:
    facts = results["segment graph"].facts
    assert facts.fault_calls[f"{FAULTS}:as_if_in_a_graph"] > 100
    assert facts.replay["segment_hits"] == 1
    assert facts.replay["replayed_encoder_rows"] == WINDOW * (1 + 1 + 2 + 1)  # the border of p29 lies behind its prompt


@pytest.mark.parametrize(
    ("fault", "reference"),
    [
        ("floor_of_the_chunk", "mask"),
        ("floor_only_in_the_first_chunk", "mask"),
        ("hits_not_limited", "mask"),
        ("decoder_windows_not_hidden", "mask"),
        ("cached_entries_rewritten", "segment cold"),
        ("passes_by_request", "segment cold"),
        ("hit_without_replay", "segment cold"),
    ],
)
def test_a_planted_fault_is_noticed(fault: str, reference: str, results: Results) -> None:
    assert results[fault].facts.fault_calls[f"{FAULTS}:{fault}"] > 0
    assert _differing(results, fault, reference) != []


def test_equal_requests_in_one_step_give_equal_rows(results: Results) -> None:
    first, second = (results["compact"].requests[name].logits[0] for name in ("p85", "p85@mixed"))
    assert_bitwise_equal(first, second, label="p85 among others")
