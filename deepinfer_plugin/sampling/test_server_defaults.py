"""The variables of F17-F19 for every request: what a request may change, and what a vocabulary does not have."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.sampling.extras import Extras, settle_extras
from deepinfer_plugin.sampling.server_defaults import check_server_defaults, server_defaults
from deepinfer_plugin.sampling.sums import SUMS_OF_RESPONSE
from deepinfer_plugin.settings import Settings

pytestmark = pytest.mark.usefixtures("vllm_variables")

VOCABULARY = 16
TOP, BANNED, SUMS = (
    "DEEPINFER_SAMPLER_FORCE_TOPK",
    "DEEPINFER_DECODE_TOKEN_BLACKLIST",
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS",
)


def settled(environ: dict[str, str], extra: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, Extras]:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(extra_args=extra, seed=1, temperature=1.0, **fields)
    return settle_extras(params, VOCABULARY, server_defaults(Settings.from_envs(environ), params))


@pytest.mark.parametrize(
    ("environ", "extra", "expected"),
    [
        ({}, None, None),
        ({TOP: "0", BANNED: "", SUMS: "0"}, None, None),
        ({TOP: "1"}, None, {"force_top_k": 1}),
        ({TOP: "1"}, {"other": 2}, {"other": 2, "force_top_k": 1}),
        ({TOP: "1"}, {"force_top_k": VOCABULARY}, {"force_top_k": VOCABULARY}),
        ({BANNED: "3,5-7"}, None, {"token_blacklist": [[3, 3], [5, 7]]}),
        ({BANNED: "3"}, {"token_blacklist": "15"}, {"token_blacklist": [[15, 15], [3, 3]]}),
        ({SUMS: "1"}, None, {"sum_smaller_probs": True}),
        ({SUMS: "1"}, {"sum_smaller_probs": 1}, {"sum_smaller_probs": True}),
        ({SUMS: "1", TOP: "2"}, {"sum_smaller_probs": 0}, {"force_top_k": 2}),
        ({SUMS: "0"}, {"sum_smaller_probs": 1}, {"sum_smaller_probs": True}),
    ],
)
def test_a_variable_holds_where_the_request_does_not_say_otherwise(
    environ: dict[str, str], extra: dict[str, Any] | None, expected: dict[str, Any] | None
) -> None:
    params, _ = settled(environ, extra)
    assert params.extra_args == expected
    assert params.logprobs == (0 if (expected or {}).get("sum_smaller_probs") else None)


def test_a_request_cannot_free_what_the_server_bans() -> None:
    from vllm.exceptions import VLLMValidationError

    environ = {BANNED: "0-7"}
    for extra, fields, text in (
        ({"token_blacklist": "8-15"}, {}, "is the whole vocabulary"),
        ({"golden_token_ids": [8, 7]}, {}, "golden_token_ids is with 7, which is in token_blacklist with that of the"),
        (None, {"allowed_token_ids": [0, 7]}, "is all of allowed_token_ids"),
    ):
        with pytest.raises(VLLMValidationError, match=re.escape(text)) as caught:
            settled(environ, extra, **fields)
        assert "that of the server" in str(caught.value)
    assert settled(environ, {"token_blacklist": "8-14"})[1].token_blacklist == ((8, 14), (0, 7))
    assert settled(environ, {"golden_token_ids": [8]})[1].golden_token_ids == (8,)
    settled(environ, None, allowed_token_ids=[7, 8])


def test_an_answer_that_cannot_carry_sums_comes_without_unless_it_asks() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    stream = {"output_kind": RequestOutputKind.DELTA}
    assert settled({SUMS: "1"}, **stream)[1].sum_smaller_probs, "no server, no stream of events"
    token = SUMS_OF_RESPONSE.set({})
    try:
        assert not settled({SUMS: "1"}, **stream)[1].sum_smaller_probs
        assert settled({SUMS: "1"})[1].sum_smaller_probs
    finally:
        SUMS_OF_RESPONSE.reset(token)
    assert not settled({SUMS: "1"}, n=2)[1].sum_smaller_probs
    with pytest.raises(VLLMValidationError, match="set with n 2"):
        settled({SUMS: "1"}, {"sum_smaller_probs": 1}, n=2)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({TOP: str(VOCABULARY)}, {TOP: str(VOCABULARY + 1)}),
        ({BANNED: "15"}, {BANNED: "16"}),
        ({BANNED: "0-14"}, {BANNED: "0-15"}),
        ({BANNED: "0-7,8-14"}, {BANNED: "0-7,3-15"}),
    ],
)
def test_a_value_beyond_the_vocabulary_stops_the_start(inside: dict[str, str], outside: dict[str, str]) -> None:
    check_server_defaults(Settings.from_envs({}), VOCABULARY)
    check_server_defaults(Settings.from_envs(inside), VOCABULARY)
    [(name, text)] = outside.items()
    with pytest.raises(SettingError, match=re.escape(f"sampling: {name} is '{text}', ")):
        check_server_defaults(Settings.from_envs(outside), VOCABULARY)
