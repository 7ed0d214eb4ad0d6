"""Plans: what is refused and why, how loads add up, and that more of anything never carries less."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise

import pytest

from deepinfer_plugin.__main__ import main
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.sizing.devices import GPUS, find_gpu
from deepinfer_plugin.sizing.loads import Load, Mix
from deepinfer_plugin.sizing.plan import Options, Plan, layouts, plan, plan_all
from deepinfer_plugin.sizing.steps import Layout

RELEASED = ModelConfig.from_dict(released_config_dict())
H200 = GPUS["H200"]
EIGHT = Layout(tensor=8, replicas=1, shares_experts=False)


def mix(*texts: str) -> Mix:
    return Mix(loads=tuple(Load.parse(text) for text in texts))


def planned(load: str = "4096:512:1", layout: Layout = EIGHT, options: Options | None = None, gib: float = 140) -> Plan:
    return plan(RELEASED, find_gpu("H200", gib), layout, mix(load), options or Options())


def test_layouts_use_every_gpu() -> None:
    for count in (1, 2, 3, 6, 8, 16, 64):
        found = layouts(count)
        assert found
        assert {layout.num_gpus for layout in found} == {count}
        assert len(set(found)) == len(found)


def test_the_released_model_needs_its_engram_tables_cut_over_four_ranks() -> None:
    plans = plan_all(RELEASED, H200, 8, mix("4096:512:1"), Options())
    fit = {(one.layout.tensor, one.layout.shares_experts) for one in plans if one.refusal is None}
    assert fit == {(8, False), (4, True), (4, False)}
    assert all("GiB too little" in str(one.refusal) for one in plans if one.layout.tensor < 4)
    assert [one.refusal is None for one in plans] == sorted((one.refusal is None for one in plans), reverse=True)


def test_a_size_that_does_not_divide_the_model_is_refused_as_at_a_start() -> None:
    plans = plan_all(RELEASED, H200, 40, mix("4096:512:1"), Options())
    refused = next(one for one in plans if one.layout == Layout(tensor=8, replicas=5, shares_experts=True))
    assert "number of ranks that share the experts is 40, expected a divisor of n_routed_experts, 384" in str(
        refused.refusal
    )


def test_a_carried_load_is_steady() -> None:
    found = planned("4096:512:0.5")
    assert found.factor > 1
    assert found.requests is not None
    assert 0 < found.requests <= found.most_requests
    tokens_per_s = found.requests / (found.decode_us * 1e-6) * (1 - found.prefill_share)
    assert tokens_per_s == pytest.approx(0.5 * 512, rel=0.01)
    assert found.batch >= found.requests + 3 * found.requests**0.5


def test_the_factor_is_the_border() -> None:
    factor = planned("4096:512:1").factor
    assert planned(f"4096:512:{factor * 0.99}").requests is not None
    assert planned(f"4096:512:{factor * 1.02}").requests is None


def test_a_load_split_in_two_is_the_same_load() -> None:
    whole = plan(RELEASED, H200, EIGHT, mix("4096:512:1"), Options())
    halves = plan(RELEASED, H200, EIGHT, mix("4096:512:0.5", "4096:512:0.5"), Options())
    assert halves.factor == pytest.approx(whole.factor, rel=2e-3)
    assert halves.requests == pytest.approx(whole.requests)


@pytest.mark.parametrize(
    "plans",
    [
        [planned(gib=gib) for gib in (70, 80, 100, 140)],
        [planned(f"4096:{answer}:1") for answer in (2048, 512, 128)],
        [planned(f"{prompt}:512:1") for prompt in (65536, 16384, 4096)],
        [planned("16384:4096:1", gib=gib) for gib in (71, 72, 80)],
    ],
    ids=["memory", "answers", "prompts", "little memory"],
)
def test_more_memory_and_shorter_requests_never_carry_less(plans: list[Plan]) -> None:
    for name in ("factor", "most_requests"):
        values = [getattr(one, name) for one in plans]
        assert all(low <= high for low, high in pairwise(values)), name
    assert plans[-1].factor > plans[0].factor


def test_accepted_drafts_carry_more_than_rejected_ones() -> None:
    found = [planned(options=Options(num_drafts=3, acceptance=acceptance)).factor for acceptance in (0.0, 0.5, 1.0)]
    assert found == sorted(found)
    assert found[2] > found[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus", "0"], "--gpus is 0, expected 1 to 4096"),
        (["--gpu", "A100"], "--gpu is 'A100', expected H200, H100, H20, B200, B300"),
        (["--gpu", "Ascend950"], "no other kind serves our model (Ascend neither)"),
        (["--memory-gib", "-1"], "--memory-gib is -1, expected above 0"),
        (["--memory-gib", "nan"], "--memory-gib is nan, expected above 0"),
        (["--load", "4096"], "--load is '4096', expected PROMPT:ANSWER"),
        (["--load", "4096:x:1"], "--load is '4096:x:1', expected PROMPT:ANSWER"),
        (["--load", "4096:512:fast"], "--load is '4096:512:fast', expected PROMPT:ANSWER"),
        (["--load", "0:512:1"], "expected a prompt and an answer of 1 token or more"),
        (["--load", "4096:512:0"], "expected a rate above 0"),
        (["--load", "4096:512:inf"], "expected a rate above 0"),
        (["--load", "1048576:512"], "requests of 1049088 tokens, expected at most 1048576"),
        (["--step-tokens", "64"], "--step-tokens is 64, expected 128 to 1048576"),
        (["--utilization", "1.5"], "--utilization is 1.5, expected 0.1 to 1"),
        (["--drafts", "6"], "--drafts is 6, expected 0 to 5"),
        (["--acceptance", "2"], "--acceptance is 2, expected 0 to 1"),
        (["--config", "/no/such/place"], "/no/such/place/config.json is unreadable"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sizing", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sizing", "--gpus", "8", "--load", "4096:512:1", "--drafts", "3"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    text = capsys.readouterr().out
    for one in found["plans"]:
        assert one["layout"] in text
        if one["refusal"] is not None:
            assert f"no: {one['refusal']}" in text
            continue
        assert f"{one['kv_tokens']:,}" in text
        assert sum(one["memory"]["parts"].values()) == one["memory"]["total"]
    best = found["plans"][0]
    assert shlex.join(best["flags"]) in text
    assert "'--speculative-config={" in text
    assert "Engram tables: in device memory" in text
    assert {part["source"] for part in best["decode_parts"].values()} == {"measured", "estimate"}


def test_without_the_image_tower_the_flags_leave_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sizing", "--gpus", "8", "--json"]
    for option, has_flag in (([], False), (["--text-only"], True)):
        assert main([*command, *option]) == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        assert ('--limit-mm-per-prompt={"image":0}' in best["flags"]) is has_flag


def test_a_model_that_fits_nowhere_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizing", "--gpus", "1"]) == 1
    assert "no: " in capsys.readouterr().out


def test_a_load_that_is_too_much_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizing", "--gpus", "8", "--load", "4096:512:500"]) == 0
    assert "does not carry the load" in capsys.readouterr().out


def test_the_check_of_the_command_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizing", "--check"]) == 0
    text = capsys.readouterr().out
    assert "WRONG" not in text
    assert main(["sizing", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tolerance"] == 0.25
