"""The Engram token map against the golden normalisation and small tokenizers."""

import json
import re
import runpy
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_kernels.testing import require_golden
from deepinfer_plugin.encoding.token_map import build_token_map, normalised_key
from deepinfer_plugin.errors import CheckpointError


class ListedTokens:
    """A tokenizer backend of listed texts; ``raw`` are the vocabulary strings."""

    def __init__(self, texts: list[str], raw: list[str] | None = None) -> None:
        self.texts = texts
        self.raw = texts if raw is None else raw

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens, "special tokens must be decoded like any other"
        (token,) = ids
        return self.texts[token] if token < len(self.texts) else ""

    def id_to_token(self, token: int) -> str | None:
        return self.raw[token] if token < len(self.raw) else None


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    maker = runpy.run_path(str(require_golden("make_checkpoint.py")))
    tokenizer_json: dict[str, Any] = maker["tokenizer_files"](vocab_size, 4096)[0]
    return Tokenizer.from_str(json.dumps(tokenizer_json))


def test_every_golden_text_has_its_golden_key() -> None:
    cases = json.loads(require_golden("kernels/token_normalisation.json").read_text(encoding="utf-8"))
    assert len(cases) > 30
    for case in cases:
        assert normalised_key(case["text"]) == case["key"], case


def test_ids_follow_the_first_appearance_of_each_key() -> None:
    backend = ListedTokens(["The", "a", " the", "THE", "À", " ", "\n\t", "b"])
    assert build_token_map(backend, 8, 4).tolist() == [0, 1, 0, 0, 1, 2, 2, 3]


def test_a_partial_character_keeps_its_raw_vocabulary_string() -> None:
    backend = ListedTokens(["�", "�", "x�", "È", "è"], raw=["È", "é", "xÃ", "È", "è"])
    # The raw string of id 0 is not normalised: it stays apart from the token whose text is È, which becomes e.
    assert build_token_map(backend, 5, 4).tolist() == [0, 1, 2, 3, 3]


def test_a_text_that_normalises_to_nothing_keeps_itself() -> None:
    backend = ListedTokens(["\x0b", "\x0c", "́", "\x0b"])
    assert build_token_map(backend, 4, 3).tolist() == [0, 1, 2, 0]


def test_ids_without_a_token_share_one_compressed_id() -> None:
    token_map = build_token_map(ListedTokens(["a", "b"]), 5, 3)
    assert token_map.tolist() == [0, 1, 2, 2, 2]


def test_an_empty_vocabulary_gives_an_empty_map() -> None:
    token_map = build_token_map(ListedTokens([]), 0, 0)
    assert token_map.shape == (0,)
    assert token_map.dtype == torch.int32


def test_a_count_other_than_expected_is_an_error() -> None:
    text = "compresses to 1 ids, expected 2 (engram_compressed_vocab_size); use the tokenizer.json"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        build_token_map(ListedTokens(["a", "A"]), 2, 2)


@pytest.mark.parametrize("vocab_size", [512, 256])
def test_the_map_of_the_small_tokenizers_is_the_identity(vocab_size: int) -> None:
    token_map = build_token_map(tiny_tokenizer(vocab_size), vocab_size, vocab_size)
    assert token_map.tolist() == list(range(vocab_size))
