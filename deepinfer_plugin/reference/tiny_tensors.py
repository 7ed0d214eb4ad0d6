"""Tensors of the small checkpoints: seeded by name, the same bytes on every machine.

A tensor is a pure function of (seed, name, shape, distribution). Normal variates are sums of twelve 16-bit integers
taken from the raw output of PCG64, so that no transcendental function and no sampling routine of a library enters.
What follows are single IEEE operations, casts to the nearest even value and exact scalings by powers of two.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.tensors import SCALE_BLOCK, TensorSpec, expected_tensors

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_BIAS = 127
SMALLEST_AMAX = 2.0**-60  # keeps the scale of an all-zero block finite
# Midpoints between neighbouring magnitudes of e2m1; a value on an odd-numbered one rounds up, to the even code.
_E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)

# Standard deviation and mean by name, where the spread does not follow from the width; the first match counts.
_FIXED_SPREAD: tuple[tuple[str, float, float], ...] = (
    (r"(^|[._])norm\d?\.weight$", 0.1, 1.0),
    (r"\.engram\.[qk]_weight$", 0.1, 1.0),
    (r"\.hc_(attn|ffn)_scale$", 0.1, 1.0),
    (r"\.hc_(attn|ffn)_base$", 0.5, 0.0),
    (r"\.attn_sink$", 1.0, 0.0),
    (r"\.gate\.bias_vl$", 0.3, 0.0),
    (r"\.bias$", 0.1, 0.0),
    (r"(^|\.)embed\.weight$", 1.0, 0.0),
    (r"^image_", 1.0, 0.0),
)
# Gain over 1 / sqrt(columns) by name. Small gains at the outputs keep rounding noise from growing with depth.
_GAINS: tuple[tuple[str, float], ...] = (
    (r"^head\.weight$", 3.0),
    (r"\.markov_head\.head\.weight$", 1.5),
    (r"\.compressor\.wgate\.weight$", 1.5),
    (r"\.ffn\.gate\.weight$", 1.5),
    (r"\.attn\.(wq_b|wo_a)\.weight$", 1.5),
    (r"\.attn\.wo_b\.weight$", 0.25),
    (r"\.ffn\..*\.w2\.weight$", 0.25),
    (r"\.engram\.wkv\.weight$", 0.5),
)
QUANTISED_GAIN = 0.75  # of quantised weights, whose blocks are then multiplied by 1/2, 1 or 2


class SeededSource:
    """Named streams of random numbers: a stream depends on (seed, name) only."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def words(self, name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """[count] uint64, the raw output of the generator."""
        sequence = np.random.SeedSequence([self._seed, zlib.crc32(name.encode())])
        return np.asarray(np.random.PCG64(sequence).random_raw(count), dtype=np.uint64)

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """fp64 of ``shape``, nearly standard normal: a centred sum of twelve 16-bit integers over 2**16."""
        count = math.prod(shape)
        parts = np.ascontiguousarray(self.words(name, 3 * count)).view(np.uint16).reshape(count, 12)
        total = parts.sum(axis=1, dtype=np.int64) - 6 * 0xFFFF
        return torch.from_numpy(total / 65536.0).reshape(shape)

    def powers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """int64 of ``shape``, -1, 0 or 1."""
        high = self.words(name, math.prod(shape)) >> np.uint64(32)
        return torch.from_numpy((high % np.uint64(3)).astype(np.int64) - 1).reshape(shape)


def make_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of ``config``'s checkpoint, in the dtypes on disk (see ``expected_tensors``)."""
    source, specs = SeededSource(seed), expected_tensors(config)
    # a tensor follows from its name, so no order of making them matters; one takes up to 50 bytes a value on the way
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda name: list(_make(source, name, specs[name], specs)), specs)
        return {name: tensor for pairs in made for name, tensor in pairs}


def _make(
    source: SeededSource, name: str, spec: TensorSpec, specs: dict[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A plain tensor, or a quantised weight followed by its scale; nothing for the name of a scale."""
    if spec.dtype == torch.float8_e8m0fnu:
        return
    columns = spec.shape[-1] * (2 if spec.dtype == torch.int8 else 1)
    shape = (*spec.shape[:-1], columns)
    spread, mean = _spread(name, columns, 1.0 if spec.dtype.itemsize > 1 else QUANTISED_GAIN)
    if spec.dtype in (torch.bfloat16, torch.float32):
        values = source.normal(name, shape) * spread + mean
        if name.endswith(".attn_sink"):
            values[0] += 4.0  # one head that mostly looks at the sink
            values[-1] -= 8.0  # and one that ignores it
        yield name, values.float().to(spec.dtype)
        return
    prefix = name.removesuffix(".weight")
    grid = specs[f"{prefix}.scale"].shape
    rows_per_scale = SCALE_BLOCK if grid[0] != shape[0] else 1
    # An extra power of two per block: neighbouring scales differ, and a scale read at a wrong place shows.
    powers = source.powers(f"{prefix}.block", grid)
    powers = powers.repeat_interleave(rows_per_scale, 0)[: shape[0]].repeat_interleave(SCALE_BLOCK, 1)
    values = torch.ldexp(source.normal(name, shape) * spread, powers)
    if spec.dtype == torch.int8:
        codes, exponents = _quantise(values, 1, E2M1_MAX)
        nibbles = _e2m1_codes(codes)
        weight = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int8)
    else:
        codes, exponents = _quantise(values, rows_per_scale, E4M3_MAX)
        weight = codes.float().to(torch.float8_e4m3fn)
    yield name, weight
    yield f"{prefix}.scale", (exponents + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _spread(name: str, columns: int, format_gain: float) -> tuple[float, float]:
    """Standard deviation and mean of a tensor's values."""
    for pattern, spread, mean in _FIXED_SPREAD:
        if re.search(pattern, name):
            return format_gain * spread, mean
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return format_gain * gain / math.sqrt(columns), 0.0


def _quantise(values: torch.Tensor, rows_per_scale: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale blocks of ``rows_per_scale`` x 32 so that none exceeds ``largest``, by the smallest power of two.

    Args:
        values: [rows, columns] fp64.
        rows_per_scale: 32 for square blocks (the last one may be cut), 1 for scales per row.
        largest: the largest magnitude of the format.

    Returns:
        (scaled [rows, columns] fp64, exponents [ceil(rows / rows_per_scale), columns / 32] int64).
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % rows_per_scale))
    blocks = padded.reshape(-1, rows_per_scale, columns // SCALE_BLOCK, SCALE_BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).clamp_min(SMALLEST_AMAX)
    exponents = torch.frexp(amax / largest).exponent.to(torch.int64)
    fits_below = torch.ldexp(torch.full_like(amax, largest), exponents - 1) >= amax
    exponents = (exponents - fits_below.to(torch.int64)).clamp(-126, 127)
    scaled = torch.ldexp(blocks, -exponents[:, None, :, None])
    return scaled.reshape(-1, columns)[:rows], exponents


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """fp64 in [-6, 6] -> uint8 codes 0 .. 15, nearest, ties to the even code; bit 3 is the sign."""
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS.tolist()):
        code += (magnitude >= midpoint if index % 2 else magnitude > midpoint).to(torch.uint8)
    return code | torch.signbit(values).to(torch.uint8) << 3
