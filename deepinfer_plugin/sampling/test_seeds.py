"""The two 64-bit numbers of a draw; the hash is a public format, so its values are pinned."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest

from deepinfer_plugin.sampling.seeds import as_int64, prompt_hash


@pytest.mark.parametrize(
    ("number", "want"),
    [(0, 0), (5, 5), (-1, -1), (1 << 63, -(1 << 63)), ((1 << 64) - 2, -2), (1 << 64, 0), (-(1 << 64) - 3, -3)],
)
def test_a_number_is_taken_modulo_2_to_the_64(number: int, want: int) -> None:
    assert as_int64(number) == want
    assert (as_int64(number) - number) % (1 << 64) == 0


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([], 0xB4B2797457A0A6E4),
        ([0], 0x9E08CC502F2F844E),
        ([0, 0], 0x18CC49CA5BEA08CA),
        ([1, 2, 3], 0x9E3D6A5F74569CD6),
        ([129279], 0xEA4DC7F486272BD8),
    ],
)
def test_the_hash_of_a_prompt_is_blake2b_of_its_ids(ids: list[int], want: int) -> None:
    digest = hashlib.blake2b(b"".join(struct.pack("<I", token) for token in ids), digest_size=8).digest()
    assert prompt_hash(ids) == int.from_bytes(digest, "little") == want


def test_every_token_and_the_order_count() -> None:
    prompts = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3], [1, 2, 4]]
    assert len({prompt_hash(prompt) for prompt in prompts}) == len(prompts)
    assert prompt_hash(tuple(prompts[0])) == prompt_hash(prompts[0])


def test_the_module_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, deepinfer_plugin.sampling.front_end, deepinfer_plugin.sampling.seed_middleware;"
        "loaded = sorted({'torch', 'vllm'} & set(sys.modules)); sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
