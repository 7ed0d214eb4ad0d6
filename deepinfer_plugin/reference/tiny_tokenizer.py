"""Tokenizer of the small checkpoints: byte-level BPE in which no two tokens share an Engram normal form.

Upper-case letters, tab, newline and carriage return would fall together with other tokens, so they have no token; the
normaliser lowers text and turns those controls into spaces first. The compressed token map is then the identity.
"""

from __future__ import annotations

from typing import Any

_FIRST = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
_LAST = ("<｜noise｜>", "<｜deepseek_image｜>", "<｜reserved｜>")
_TEXT_MARKERS = frozenset({"<think>", "</think>", "｜DSML｜"})  # added tokens that are part of the visible text
_NO_TOKEN = frozenset({*b"\t\n\r", *range(ord("A"), ord("Z") + 1)})
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency in English
_MAX_PAIRS = 200  # most frequent letter pairs that may merge
_SEED_PAIRS = 20  # pairs too frequent to appear inside a three-letter merge


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def _merges(room: int) -> list[list[str]]:
    """Letter pairs, the most frequent first, then triples ending in e or n; at most ``room``."""
    rank = {letter: index for index, letter in enumerate(_LETTERS)}
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS if a != b]
    pairs.sort(key=lambda pair: (rank[pair[0]] + rank[pair[1]], pair))
    pairs = pairs[:_MAX_PAIRS]
    seeds = set(pairs[:_SEED_PAIRS])
    triples = [[a + b, c] for a, b in pairs for c in "en" if (b, c) not in seeds]
    return ([list(pair) for pair in pairs] + triples)[:room]


def _added_token(token: str, token_id: int) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token not in _TEXT_MARKERS,
    }


def tokenizer_files(vocab_size: int, model_max_length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of tokenizer.json and tokenizer_config.json.

    Args:
        vocab_size: tokens, exactly; the last three are the draft noise, the image placeholder and a reserved one.
        model_max_length: longest request, for tokenizer_config.json.
    """
    tokens = list(_FIRST)
    tokens += [character for byte, character in enumerate(_byte_characters()) if byte not in _NO_TOKEN]
    merges = _merges(vocab_size - len(tokens) - len(_LAST))
    tokens += [left + right for left, right in merges]
    # what is left of a large vocabulary can be decoded; no text becomes it
    tokens += [f"#{token_id}" for token_id in range(len(tokens), vocab_size - len(_LAST))]
    tokens += _LAST
    vocab = {token: index for index, token in enumerate(tokens)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [{"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": "[\\t\\r\\n]"}, "content": " "}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token, vocab[token]) for token in (*_FIRST, *_LAST)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _FIRST[0],
        "eos_token": _FIRST[1],
        "pad_token": _FIRST[2],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    return tokenizer, settings
