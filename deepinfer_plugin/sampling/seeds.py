"""Seeds and prompt hashes: the two 64-bit numbers that, with the position, fix the noise of a draw.

Loaded by the front end too: imports neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

SEED_MODULUS = 1 << 64
_SIGN_BIT = 1 << 63


def as_int64(number: int) -> int:
    """``number`` modulo 2^64 as the int64 with the same bits, for tensors."""
    bits = number % SEED_MODULUS
    return bits - SEED_MODULUS if bits >= _SIGN_BIT else bits


def prompt_hash(prompt_token_ids: Sequence[int]) -> int:
    """Hash of a prompt: BLAKE2b with 8 bytes of output over the ids as little-endian uint32, read little-endian.

    Args:
        prompt_token_ids: ids of the prompt as the model reads it, without generated tokens.

    Returns:
        0 to 2^64 - 1.
    """
    data = np.asarray(prompt_token_ids, dtype="<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
