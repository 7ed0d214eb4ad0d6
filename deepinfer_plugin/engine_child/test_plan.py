from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from deepinfer_plugin.engine_child.plan import (
    Action,
    EngineRun,
    OutputFacts,
    Request,
    RequestFacts,
    RunFacts,
    check_names,
    facts_from_json,
    runs_from_json,
    runs_to_json,
)
from deepinfer_plugin.engine_child.run import run_engines
from deepinfer_plugin.errors import EngineError, InputError
from deepinfer_plugin.settings import Arithmetic

REQUEST = Request(name="a", tokens=(1, 2), forced=(3,), prompt_rows=True, priority=2, sampling={"top_k": 5})
RUN = EngineRun(
    name="one",
    model="folder",
    arithmetic=Arithmetic.S32,
    flags=("--block-size=32",),
    actions=(Action(add=(REQUEST,), steps=3), Action(abort=("a",), reset_prefix_cache=True)),
    faults=("module:function",),
)


def test_a_plan_survives_the_way_through_json() -> None:
    assert runs_from_json(json.loads(json.dumps(runs_to_json([RUN])))) == (RUN,)


def test_facts_survive_the_way_through_json() -> None:
    output = OutputFacts(text="x", finish_reason="stop", stop_reason=7)
    request = RequestFacts(
        outputs=(output,),
        num_cached_tokens=32,
        num_preemptions=1,
        chunks=((3, 1),),
        produced=((1, 1),),
        finished=True,
    )
    facts = RunFacts(
        steps=({"a": 3}, {"a": 1}), start_s=1.5, kv_usage=0.25, observed={"f": {"x": 4}}, requests={"a": request}
    )
    assert facts_from_json(json.loads(json.dumps(asdict(facts)))) == facts


def test_an_unknown_field_is_refused() -> None:
    (value,) = runs_to_json([RUN])
    with pytest.raises(InputError, match="flag"):
        runs_from_json([{**value, "flag": "x"}])


def test_equal_names_are_refused() -> None:
    with pytest.raises(InputError, match="engine 'one' is named twice"):
        check_names([RUN, RUN])
    twice = EngineRun(
        name="two", model="folder", arithmetic=Arithmetic.REF, actions=(Action(add=(REQUEST,)), Action(add=(REQUEST,)))
    )
    with pytest.raises(InputError, match="request 'a' is named twice"):
        check_names([twice])


def test_a_child_that_is_too_slow_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="was too slow"):
        run_engines([RUN], tmp_path, timeout_s=0.0)
