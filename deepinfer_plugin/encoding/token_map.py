"""Engram token compression: tokens whose text is the same after normalisation share one compressed id."""

from typing import Protocol

import torch
from tokenizers import Regex, normalizers

from deepinfer_plugin.errors import CheckpointError

# What a byte-level tokenizer decodes an incomplete UTF-8 sequence to.
REPLACEMENT_CHARACTER = "�"
# Stands for a text that is one space while the ends are stripped (REF).
SPACE_SENTINEL = "\ue000"


class TokenizerBackend(Protocol):
    """The two methods of ``tokenizers.Tokenizer`` that are used here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True, /) -> str:
        """Text of the ids, without the clean-up that transformers adds."""

    def id_to_token(self, token: int, /) -> str | None:
        """Raw vocabulary string of one id, None where the tokenizer has no such id."""


def _make_normalizer() -> normalizers.Normalizer:
    """The steps of REF from the library REF uses: its Unicode tables and its idea of white space decide the count."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), SPACE_SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(SPACE_SENTINEL, " "),
        ]
    )


_NORMALIZER = _make_normalizer()


def normalised_key(text: str) -> str:
    """Text that stands for all tokens which differ in case, accents, width and white space only; never made empty."""
    return _NORMALIZER.normalize_str(text) or text


def build_token_map(tokenizer_backend: TokenizerBackend, vocab_size: int, compressed_vocab_size: int) -> torch.Tensor:
    """Number the normalised texts of all token ids in the order in which they first appear.

    Args:
        tokenizer_backend: ``tokenizers.Tokenizer`` of the checkpoint (``backend_tokenizer`` of a Hugging Face fast
            tokenizer).
        vocab_size: number of token ids; ids that the tokenizer does not know share the key of the empty text.
        compressed_vocab_size: engram_compressed_vocab_size, the count the result must have.

    Returns:
        [vocab_size] int32 on CPU: token id -> compressed id, 0 ... count - 1.

    Raises:
        CheckpointError: the count differs from ``compressed_vocab_size``: every n-gram would be looked up in a wrong
            row of the Engram tables.

    Source: REF, class Engram; spec 2.9.
    """
    compressed: dict[str, int] = {}
    token_map: list[int] = []
    for token in range(vocab_size):
        text = tokenizer_backend.decode([token], False)
        is_partial = REPLACEMENT_CHARACTER in text
        key = (tokenizer_backend.id_to_token(token) or text) if is_partial else normalised_key(text)
        token_map.append(compressed.setdefault(key, len(compressed)))
    if len(compressed) != compressed_vocab_size:
        raise CheckpointError(
            f"build_token_map: a vocabulary of {vocab_size} ids compresses to {len(compressed)} ids, expected "
            f"{compressed_vocab_size} (engram_compressed_vocab_size); use the tokenizer.json of the checkpoint"
        )
    return torch.tensor(token_map, dtype=torch.int32)
