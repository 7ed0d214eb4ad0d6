"""The constants of the Engram hash: multipliers, prime table sizes and table offsets of every Engram layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from deepinfer_kernels.errors import UnsupportedError

# The seed of a layer's multipliers is this number times the layer id (REF).
MULTIPLIER_SEED = 10007
INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramLayerHash:
    """What one Engram layer hashes with; the columns are order-major, head-minor.

    Attributes:
        multipliers: max_ngram odd numbers below 2**63, one per distance from the token.
        primes: table size of each of the (max_ngram - 1) * num_heads columns.
        offsets: first table row of each column, the exclusive prefix sum of ``primes``.
        num_rows: rows of the layer's table, the sum of ``primes``.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int


def _is_prime(number: int) -> bool:
    """Trial division: the tables have at most some 2**24 rows, so at most some 2**12 divisors."""
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def _draw_primes(count: int, start: int, used: set[int]) -> list[int]:
    """The ``count`` smallest primes >= ``start`` outside ``used``, which they then join."""
    drawn: list[int] = []
    candidate = start
    while len(drawn) < count:
        if candidate not in used and _is_prime(candidate):
            drawn.append(candidate)
            used.add(candidate)
        candidate += 1
    return drawn


def _multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd numbers small enough that a compressed id times one of them stays below 2**63."""
    bound = max(1, INT64_MAX // compressed_vocab_size // 2)
    draws = np.random.default_rng(MULTIPLIER_SEED * layer_id).integers(0, bound, size=max_ngram)
    return tuple(2 * int(draw) + 1 for draw in draws)


def engram_layout(
    layer_ids: Sequence[int],
    num_heads: int,
    max_ngram: int,
    vocab_start: int,
    compressed_vocab_size: int,
) -> dict[int, EngramLayerHash]:
    """Compute the hash constants of all Engram layers; they depend on configuration alone.

    Args:
        layer_ids: the Engram layers in the order of config.json; no prime is used by two of them.
        num_heads: hash heads per n-gram order (engram_n_heads).
        max_ngram: longest n-gram (engram_max_ngram_size); the orders are 2 ... max_ngram.
        vocab_start: smallest table size (engram_vocab_size); every column takes the next free prime from here.
        compressed_vocab_size: count of compressed token ids (engram_compressed_vocab_size).

    Returns:
        layer id -> EngramLayerHash, in the order of ``layer_ids``.

    Raises:
        UnsupportedError: a size is out of range, a layer id is repeated, or a table has 2**31 rows or more.

    Source: REF, class Engram; spec 2.9 and appendix A.
    """
    for name, value, smallest in (
        ("num_heads", num_heads, 1),
        ("max_ngram", max_ngram, 2),
        ("vocab_start", vocab_start, 2),
        ("compressed_vocab_size", compressed_vocab_size, 1),
    ):
        if value < smallest:
            raise UnsupportedError(f"engram_layout: {name} is {value}, expected >= {smallest}; correct config.json")
    if len(set(layer_ids)) != len(layer_ids) or min(layer_ids, default=0) < 0:
        raise UnsupportedError(
            f"engram_layout: layer_ids is {list(layer_ids)}, expected distinct ids >= 0; correct engram_layer_ids"
        )
    used: set[int] = set()
    layout: dict[int, EngramLayerHash] = {}
    for layer_id in layer_ids:
        primes: list[int] = []
        for _ in range(2, max_ngram + 1):
            primes += _draw_primes(num_heads, vocab_start, used)
        num_rows = sum(primes)
        if num_rows > INT32_MAX:
            raise UnsupportedError(
                f"engram_layout: the table of layer {layer_id} is {num_rows} rows long, expected <= {INT32_MAX} "
                f"(rows are int32); lower engram_vocab_size or engram_n_heads"
            )
        layout[layer_id] = EngramLayerHash(
            multipliers=_multipliers(layer_id, max_ngram, compressed_vocab_size),
            primes=tuple(primes),
            offsets=tuple(accumulate(primes[:-1], initial=0)),
            num_rows=num_rows,
        )
    return layout
