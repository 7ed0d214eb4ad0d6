"""One step with any mix of requests: which rows each half of the model computes. Integers, on the host.

What a CUDA graph replays is not planned here: a step of decode rows keeps all of them, and its floors lie below every
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer_plugin.replay.window import Chunk, ReplayRule, pieces

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPass:
    """Rows that the encoder layers compute together; rows of one request are adjacent, at consecutive positions.

    Attributes:
        source_rows: [num_rows] row of the step, or -1 for a replayed row, which is none of the step's.
        requests: [num_rows] request of the step.
        positions: [num_rows].
        floors: [num_rows] first window key that the row may see.
    """

    source_rows: Integers
    requests: Integers
    positions: Integers
    floors: Integers

    @property
    def num_replayed(self) -> int:
        """Rows that are computed for their windows only."""
        return int((self.source_rows < 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes.

    Attributes:
        num_rows: rows of the step.
        decoder_floors: [num_reqs] first window key that a row of the request may see in a decoder layer.
        decoder_rows: [num_kept] ascending rows of the step that pass the decoder layers; None: all.
        encoder_passes: in order; empty: all rows in one pass without a floor.
    """

    num_rows: int
    decoder_floors: Integers
    decoder_rows: Integers | None
    encoder_passes: tuple[EncoderPass, ...]

    @property
    def num_decoder_rows(self) -> int:
        """Rows that pass the decoder layers."""
        return self.num_rows if self.decoder_rows is None else len(self.decoder_rows)

    @property
    def num_replayed(self) -> int:
        """Rows that pass the encoder layers a second time."""
        return sum(one.num_replayed for one in self.encoder_passes)


def plan_step(chunks: Sequence[Chunk], rule: ReplayRule) -> StepPlan:
    """Plan a step.

    Args:
        chunks: of the requests of the step, in the order of its rows.
        rule: the function that is served.
    """
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    first_rows = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    floors = [rule.decoder_floor(c.num_prompt, needs_every_row=c.needs_every_row) for c in chunks]
    return StepPlan(
        num_rows=int(first_rows[-1]),
        decoder_floors=np.asarray(floors, dtype=np.int64),
        decoder_rows=_decoder_rows(chunks, floors, first_rows) if rule.drops_rows else None,
        encoder_passes=_encoder_passes(chunks, first_rows, rule),
    )


def plan_decode(
    num_prompts: Integers, need_every_row: npt.NDArray[np.bool_], num_rows: int, rule: ReplayRule
) -> StepPlan:
    """``plan_step`` of a step whose rows all lie behind their prompts, under a rule without segments.

    Args:
        num_prompts: [num_reqs] tokens of the prompts.
        need_every_row: [num_reqs].
        num_rows: rows of the step.
        rule: the function that is served.
    """
    is_cut = np.full(len(num_prompts), rule.keep_tokens is not None) & ~need_every_row
    floors = np.where(is_cut, np.maximum(num_prompts - (rule.keep_tokens or 0), 0), 0)
    return StepPlan(num_rows=num_rows, decoder_floors=floors, decoder_rows=None, encoder_passes=())


def _decoder_rows(chunks: Sequence[Chunk], floors: Sequence[int], first_rows: Integers) -> Integers | None:
    skipped = [
        min(max(floor - chunk.start, 0), chunk.stop - chunk.start) for chunk, floor in zip(chunks, floors, strict=True)
    ]
    if not any(skipped):
        return None
    kept = [np.arange(first_rows[i] + skip, first_rows[i + 1]) for i, skip in enumerate(skipped)]
    return np.concatenate(kept).astype(np.int64)


def _encoder_passes(chunks: Sequence[Chunk], first_rows: Integers, rule: ReplayRule) -> tuple[EncoderPass, ...]:
    cut = [pieces(chunk, rule) for chunk in chunks]
    if all(piece.start == piece.first for part in cut for piece in part):
        return ()  # without a replayed row every request is one piece
    # A request may hit blocks that another one of the same step fills: vLLM takes them for cached when it allocates
    # them. Pieces therefore go in the order of the segments that they lie in, over all requests.
    segment = rule.segment or max(piece.stop for part in cut for piece in part)
    passes = []
    for number in sorted({piece.first // segment for part in cut for piece in part}):
        source_rows, requests, positions, floors = [], [], [], []
        for request, (chunk, part) in enumerate(zip(chunks, cut, strict=True)):
            piece = next((piece for piece in part if piece.first // segment == number), None)
            if piece is None:
                continue
            position = np.arange(piece.start, piece.stop)
            source_rows.append(np.where(position < piece.first, -1, position - chunk.start + first_rows[request]))
            requests.append(np.full(len(position), request))
            positions.append(position)
            floors.append(np.full(len(position), piece.floor))
        columns = [np.concatenate(column).astype(np.int64) for column in (source_rows, requests, positions, floors)]
        passes.append(EncoderPass(source_rows=columns[0], requests=columns[1], positions=columns[2], floors=columns[3]))
    return tuple(passes)
