"""Lists that a worker has no room for end in one error in front of the engine; the longest that fit pass."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_plugin.sampling.room import require_room

pytestmark = pytest.mark.usefixtures("vllm_variables")


def _params(name: str, count: int) -> Any:
    from vllm import SamplingParams

    if name == "bad_words":
        found = SamplingParams()
        found._bad_words_token_ids = [[5]] * count
        return found
    if name == "bad words of many tokens":
        found = SamplingParams()
        found._bad_words_token_ids = [[5] * count]
        return found
    if name == "stop_token_ids":
        found = SamplingParams(min_tokens=1, stop_token_ids=list(range(count)))
        found._all_stop_token_ids = set(range(count))
        return found
    return SamplingParams(
        **{name: list(range(count)) if name == "allowed_token_ids" else dict.fromkeys(range(count), 1.0)}
    )


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("allowed_token_ids", 1024),
        ("logit_bias", 1024),
        ("stop_token_ids", 128),
        ("bad_words", None),
        ("bad words of many tokens", None),
    ],
)
def test_one_more_than_fits_is_refused(name: str, most: int | None) -> None:
    from vllm import envs
    from vllm.exceptions import VLLMValidationError

    if most is None:
        most = envs.VLLM_MAX_NUM_BAD_WORDS if name == "bad_words" else envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    require_room(_params(name, most))
    with pytest.raises(VLLMValidationError, match=f"has {most + 1} .*, expected at most {most}; shorten it"):
        require_room(_params(name, most + 1))


def test_many_stop_tokens_without_min_tokens_need_no_room() -> None:
    params = _params("stop_token_ids", 200)
    params.min_tokens = 0
    require_room(params)
