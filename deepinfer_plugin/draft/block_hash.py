"""A number for the drafts of a verified block, by which tests compare drafts of an engine with the plain model's."""

from collections.abc import Sequence
from zlib import crc32


def block_hash(position: int, ids: Sequence[int]) -> int:
    """Hash of an anchor's position, of its id and of the drafts behind it; a sum of them knows no order of steps."""
    return crc32(f"{position} {list(ids)}".encode())
