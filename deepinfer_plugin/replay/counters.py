"""What bounded replay did in this process. Loads neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from deepinfer_plugin.replay.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCounts:
    """Counts since the start of the process; a snapshot.

    Attributes:
        steps: steps of our model with at least one request.
        rows: rows of these steps.
        decoder_rows: rows that passed the decoder layers.
        skipped_decoder_rows: prompt rows that did not have to.
        replayed_encoder_rows: rows that passed the encoder layers again for their windows.
        exact_hits, segment_hits, bounded_hits: requests admitted with a prefix hit, by encoder policy; a request that
            resumes after preemption counts again.
        hit_rows: prompt rows that these hits saved in the encoder layers.
        unreplayed_requests: requests that needed every row and were computed without decoder replay.
        encoded_again: images that passed the tower again, as replayed rows lie inside their span.
    """

    steps: int = 0
    rows: int = 0
    decoder_rows: int = 0
    skipped_decoder_rows: int = 0
    replayed_encoder_rows: int = 0
    exact_hits: int = 0
    segment_hits: int = 0
    bounded_hits: int = 0
    hit_rows: int = 0
    unreplayed_requests: int = 0
    encoded_again: int = 0


_counts = ReplayCounts()


def snapshot() -> ReplayCounts:
    """The counts of this process; a worker of its own process keeps its own."""
    return _counts


def since(before: ReplayCounts) -> dict[str, int]:
    """By name, what was counted after a snapshot."""
    return {name: value - getattr(before, name) for name, value in asdict(_counts).items()}


def count_step(plan: StepPlan, *, is_graph: bool = False) -> None:
    """Add a step of the model runner; a CUDA graph computes every row, whatever the plan leaves out."""
    global _counts
    decoder_rows = plan.num_rows if is_graph else plan.num_decoder_rows
    _counts = replace(
        _counts,
        steps=_counts.steps + 1,
        rows=_counts.rows + plan.num_rows,
        decoder_rows=_counts.decoder_rows + decoder_rows,
        skipped_decoder_rows=_counts.skipped_decoder_rows + plan.num_rows - decoder_rows,
        replayed_encoder_rows=_counts.replayed_encoder_rows + plan.num_replayed,
    )


def count_request(kind: str, hit: int, *, is_unreplayed: bool) -> None:
    """Add a request that the worker was given.

    Args:
        kind: encoder policy, ``exact``, ``segment`` or ``bounded``.
        hit: length of its prefix hit.
        is_unreplayed: whether it needed every row although decoder replay is on.
    """
    global _counts
    if hit > 0:
        name = f"{kind}_hits"
        _counts = replace(_counts, hit_rows=_counts.hit_rows + hit, **{name: getattr(_counts, name) + 1})
    if is_unreplayed:
        _counts = replace(_counts, unreplayed_requests=_counts.unreplayed_requests + 1)


def count_encoded_again() -> None:
    """Add an image that passes the tower again for replayed rows."""
    global _counts
    _counts = replace(_counts, encoded_again=_counts.encoded_again + 1)
