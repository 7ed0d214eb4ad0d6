"""Measured times as data, each with its source. One NVIDIA H200, PyTorch 2.11, Triton 3.6.0, 2026-11-29 and -30.

The source NOTES is kernels/NOTES.md; the engine on the slice is the run of README.md. Whoever measures again changes
the numbers here; nothing else of the package knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NOTES = "kernels/NOTES.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values by number of rows, ascending. Between two points the logarithms lie on a line; outside the end holds."""

    points: tuple[tuple[float, float], ...]
    source: str

    def at(self, rows: float) -> float:
        """The value at so many rows."""
        first, last = self.points[0], self.points[-1]
        if rows <= first[0]:
            return first[1]
        for (low, below), (high, above) in zip(self.points, self.points[1:], strict=False):
            if rows <= high:
                share = math.log(rows / low) / math.log(high / low)
                return below * math.pow(above / below, share)
        return last[1]

    def time_at(self, rows: float) -> float:
        """The same for times, which go on in proportion to the rows behind the last point."""
        return self.at(rows) * max(rows / self.points[-1][0], 1.0)


# Rates of the card, as the ratios of NOTES count them: copy is read + written.
COPY_TB_S, MATMUL_TFLOPS = 4.26, 804.0

# Chains of launches of a layer at the released width, microseconds.
QUERIES_KEYS_US = Curve(points=((1, 28.6), (64, 35.1), (4096, 766.0)), source=NOTES)
SHARED_EXPERT_US = Curve(points=((1, 25.8), (64, 33.1), (4096, 598.0)), source=NOTES)
OUTPUT_US = Curve(points=((1, 35.6), (64, 47.6), (4096, 1297.0)), source=NOTES)
HC_MIX_US = Curve(points=((1, 10.0), (64, 11.5), (256, 14.7), (1024, 28.0), (4096, 76.7)), source=NOTES)
HC_SINKHORN_US = Curve(points=((1, 6.5), (4096, 7.1)), source=NOTES)
SIDE_STREAM_ROWS, SIDE_STREAM_US = 16, 36.0
"""Up to so many rows mix coefficients and shared expert run beside attention and experts: 197 to 162, 777 to 740 us."""
LAYER_US = ((1, 162.0), (16, 740.0), (64, 1883.0))
"""A layer with 384 experts, without the attention core, on weights in turn: for the check only (NOTES)."""

# Attention of 64 heads over 128 + 512 records: the kernel of SM90, and the one for everything else.
ATTENTION_RECORDS = 640
ATTENTION_SM90_US = Curve(points=((1, 39.8), (132, 47.0), (1024, 352.0), (4096, 1295.0)), source=NOTES)
ATTENTION_US = Curve(points=((1, 75.0), (132, 165.7), (1024, 1285.0)), source=NOTES)  # at 132: in proportion to 1024

# Index: picoseconds a score (64 rows of 65,536 entries; 4096 rows of 4096), and its least time.
INDEX_SCORE_PS = Curve(points=((64, 60.0), (4096, 30.2)), source=NOTES)
INDEX_SCORE_LEAST_US, INDEX_SELECT_LEAST_US = 4.1, 35.0
INDEX_SELECT_PS = 15.3  # 64 rows of 65,536 entries 99 us, above the 35 us of one row

# Routed experts: share of the copy rate while weights bound them, of the matmul rate by rows an expert.
EXPERTS_COPY_384 = Curve(points=((1, 0.40), (8, 0.59), (64, 0.64)), source=NOTES)
EXPERTS_COPY_32 = Curve(points=((1, 0.38), (16, 0.58), (64, 0.54)), source=NOTES)
EXPERTS_MATMUL = Curve(points=((64, 0.29), (768, 0.60), (1536, 0.61)), source=NOTES)

HEAD_COPY = Curve(points=((1, 1.07), (16, 1.04), (64, 0.90)), source=NOTES)
HEAD_MATMUL = 0.71  # at 256 rows
DRAW_US = Curve(points=((1, 5.5), (64, 71.0), (256, 271.0)), source=NOTES)
ENGRAM_LOOKUP_COPY, ENGRAM_GATE_COPY = 0.68, 0.77  # at 4096 rows
WIDE_PRODUCT_MATMUL, NARROW_PRODUCT_COPY = 0.75, 0.50  # an MXFP8 product of a size that was not timed


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePoint:
    """What an engine on the slice made: 8 layers and 32 experts of the real width, no Engram, 40 GiB of KV cache."""

    kind: str  # prefill or decode
    requests: int
    context: int
    tokens_per_s: float


SLICE: tuple[EnginePoint, ...] = tuple(
    EnginePoint(kind=kind, requests=requests, context=context, tokens_per_s=rate)
    for kind, requests, context, rate in (
        ("prefill", 8, 4096, 128890.0),
        ("prefill", 2, 32768, 125560.0),
        ("decode", 1, 256, 431.0),
        ("decode", 16, 256, 5894.0),
        ("decode", 64, 256, 17184.0),
        ("decode", 256, 256, 29778.0),
        ("decode", 1, 8192, 415.0),
        ("decode", 16, 8192, 4122.0),
        ("decode", 64, 8192, 14737.0),
        ("decode", 1, 65536, 411.0),
        ("decode", 16, 65536, 5813.0),
        ("decode", 64, 65536, 9547.0),
    )
)
SLICE_STEP_TOKENS = 32768
SLICE_KV_TOKENS = (40 << 30, 66_688, 16_241_888)
"""KV bytes and tokens of a request, and the size of the cache that vLLM reported for them."""
# Two figures are taken from the slice, from its points at a context of 256; the other eight points check them.
STEP_US = 295.0
"""What a step takes beside its kernels: the mean over 1 and 64 requests, 490 and 99, of the run before the points at
256 were timed again; 16 took less than its kernels."""
HOST_US_PER_TOKEN = 33.6
"""Of 256 requests at 256, whose kernels take less: read as the limit of the host. Points of longer contexts are of the
run before, in which the host made 15,000 tokens a second; its point of 256 requests at 8192 is left out for that."""
