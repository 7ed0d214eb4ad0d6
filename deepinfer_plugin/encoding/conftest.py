"""A tokenizer with every kind of added token, and the ways in which tests compare with deepseek-recipe."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe
import pytest

from deepinfer_plugin.encoding.prompt import IMAGE_TOKEN, PromptEncoder
from deepinfer_plugin.reference.tiny_tokenizer import tokenizer_files

_SPELLED_TWICE = "<think>"  # an added token that ordinary merges could build as well
_OTHERS = (
    *(f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")),
    *(f"<｜fim▁{name}｜>" for name in ("begin", "hole", "end")),
    *(f"<｜place▁holder▁no▁{number}｜>" for number in range(4)),
    "<|EOT|>",
)


def _names_of_recipe() -> list[str]:
    kinds = [getattr(deepseek_recipe.SpecialToken, name) for name in dir(deepseek_recipe.SpecialToken)]
    found = [kind.default_str() for kind in kinds if isinstance(kind, deepseek_recipe.SpecialToken)]
    return sorted({IMAGE_TOKEN if text == "<｜image｜>" else text for text in found})


def full_tokenizer() -> dict[str, Any]:
    """tokenizer.json: all bytes, some merges, and the added tokens that the released tokenizer has (spec 7.1)."""
    small = tokenizer_files(512, 4096)[0]
    model = small["model"]
    listed = [token["content"] for token in small["added_tokens"]]
    missing = [chr(byte) for byte in range(ord("A"), ord("Z") + 1)] + [chr(0x100 + byte) for byte in (9, 10, 13)]
    spelling = list(_SPELLED_TWICE)
    merged = [("".join(spelling[:i]), spelling[i]) for i in range(1, len(spelling))]
    model["merges"] = [list(pair) for pair in merged] + model["merges"]
    added = list(dict.fromkeys([*listed, *_names_of_recipe(), *_OTHERS]))
    words = [*model["vocab"], *missing, *(left + right for left, right in merged), *added]
    model["vocab"] = {word: index for index, word in enumerate(dict.fromkeys(words))}
    shape = small["added_tokens"][0]
    markers = ("<think>", "</think>", "｜DSML｜")
    return {
        **small,
        "normalizer": None,
        "added_tokens": [
            {**shape, "id": model["vocab"][text], "content": text, "special": text not in markers} for text in added
        ],
    }


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """The full tokenizer as the text of its file."""
    return json.dumps(full_tokenizer(), ensure_ascii=False)


@pytest.fixture(scope="session")
def encoder(tokenizer_json: str) -> PromptEncoder:
    """The encoder under test on the full tokenizer."""
    return PromptEncoder(tokenizer_json)


@pytest.fixture(scope="session")
def added_tokens(tokenizer_json: str) -> dict[str, int]:
    """Text and id of every added token."""
    return {token["content"]: token["id"] for token in json.loads(tokenizer_json)["added_tokens"]}
