"""Rows, floors and borders of one request: integers only.

Positions count from 0. A *floor* is the first position whose window key a row may see; rows before the floor of the
decoder see none. Source: spec section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_plugin.replay.settings import ReplaySettings, TruncationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRule:
    """The function that is served.

    Attributes:
        window: positions that a row sees through its window, itself included.
        keep_tokens: last prompt rows that the decoder layers compute; None: all rows, with full windows.
        backtracking: positions that a step may give back.
        drops_rows: whether the decoder layers leave the other rows out, instead of only hiding their window keys.
        segment: encoder windows are recomputed before every multiple of it; 0: at no border.
        replays_hits: encoder windows are recomputed before the end of every prefix hit.
    """

    window: int
    keep_tokens: int | None = None
    backtracking: int = 1
    drops_rows: bool = False
    segment: int = 0
    replays_hits: bool = False

    @classmethod
    def from_settings(cls, settings: ReplaySettings, window: int, num_drafts: int) -> ReplayRule:
        """The rule for a model with this window in an engine with so many drafts a step."""
        return cls(
            window=window,
            keep_tokens=settings.keep_tokens if settings.is_on else None,
            backtracking=settings.backtracking(num_drafts),
            drops_rows=settings.mode is TruncationMode.COMPACT,
            segment=settings.encoder.segment,
            replays_hits=settings.encoder.kind == "bounded",
        )

    @property
    def caches_encoder_windows(self) -> bool:
        """Whether encoder windows are kept with their prefix, so that a hit reads what a cold run wrote."""
        return self.segment == 0 and not self.replays_hits

    def decoder_floor(self, num_prompt: int, *, needs_every_row: bool = False) -> int:
        """First prompt row that the decoder layers compute, of a prompt of ``num_prompt`` tokens.

        It is a function of the prompt: no chunk, hit, preemption or generated token moves it.
        """
        if self.keep_tokens is None or needs_every_row:
            return 0
        return max(0, num_prompt - self.keep_tokens)

    def hit_limit(self, num_prompt: int, *, needs_every_row: bool = False) -> int | None:
        """Longest prefix hit that leaves every decoder row to be computed; None: no limit.

        Decoder rows need the encoder's output, which is not cached, so that a hit ends at the floor at the latest.
        """
        if self.keep_tokens is None:
            return None
        limit = self.decoder_floor(num_prompt, needs_every_row=needs_every_row)
        if self.segment:
            limit -= limit % self.segment
        if self.replays_hits:
            limit = max(0, min(limit, num_prompt - self.window - self.backtracking))
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The positions ``start`` to ``stop`` - 1 of one request, computed in one step.

    Attributes:
        start: first position.
        stop: behind the last position; ``stop == start`` for a request without rows.
        num_prompt: tokens of its prompt, without what was generated before a preemption.
        hit: length of the prefix hit with which it was admitted, 0 for none.
        needs_every_row: it asked for something of every prompt row and is computed without decoder replay.
    """

    start: int
    stop: int
    num_prompt: int
    hit: int = 0
    needs_every_row: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive positions that the encoder layers compute in one go, with one window floor.

    Rows before ``first`` are replayed: computed before, or cached, and computed again for their windows only.
    """

    start: int
    first: int
    stop: int
    floor: int


def visible(position: int, window: int, floor: int) -> range:
    """Positions whose window keys the row at ``position`` sees; empty for a row before the floor."""
    return range(max(position - window + 1, floor, 0), position + 1)


def is_border(position: int, chunk: Chunk, rule: ReplayRule) -> bool:
    """Whether the encoder windows before ``position`` are recomputed before the row there is computed."""
    if position <= 0:
        return False
    at_segment = rule.segment > 0 and position % rule.segment == 0
    return at_segment or (rule.replays_hits and position == chunk.hit == chunk.start)


def pieces(chunk: Chunk, rule: ReplayRule) -> list[Piece]:
    """The chunk cut at its borders, each border with the rows that are replayed before it.

    Returns:
        In ascending order; the real rows ``first`` to ``stop`` - 1 of all pieces are the rows of the chunk.
    """
    borders = [chunk.start] if is_border(chunk.start, chunk, rule) else []
    if rule.segment:
        next_border = (chunk.start // rule.segment + 1) * rule.segment
        borders += range(next_border, chunk.stop, rule.segment)
    firsts = borders if borders[:1] == [chunk.start] else [chunk.start, *borders]
    stops = [*firsts[1:], chunk.stop]
    found = []
    for first, stop in zip(firsts, stops, strict=True):
        replay_start = max(0, first - rule.window) if first in borders else first
        found.append(Piece(start=replay_start, first=first, stop=stop, floor=_encoder_floor(replay_start, first)))
    return [piece for piece in found if piece.first < piece.stop]


def _encoder_floor(replay_start: int, first: int) -> int:
    """Replayed rows see only each other; the window of every later row starts above their first position."""
    return replay_start if replay_start < first else 0
