"""The counts of bounded replay as series of ``/metrics``."""

from __future__ import annotations

from dataclasses import asdict

from deepinfer_plugin.metrics import PREFIX, Metric
from deepinfer_plugin.replay import counters

_MEANINGS = {
    "decoder_rows": "rows that passed the decoder layers",
    "skipped_decoder_rows": "prompt rows that did not have to pass the decoder layers",
    "replayed_encoder_rows": "rows that passed the encoder layers again for their windows",
    "exact_hits": "prefix hits with cached windows",
    "segment_hits": "prefix hits whose windows were computed again from a segment's border",
    "bounded_hits": "prefix hits whose windows were computed again at the hit",
    "hit_rows": "prompt rows that prefix hits saved in the encoder layers",
    "unreplayed_requests": "requests that needed every row although decoder replay is on",
    "encoded_again": "images that passed the tower again, as replayed rows lie inside their span",
}


def _name(count: str) -> str:
    return f"{PREFIX}replay_{count}_total"


SERIES: tuple[Metric, ...] = tuple(
    Metric(name=_name(count), kind="counter", meaning=meaning) for count, meaning in _MEANINGS.items()
)


def figures() -> dict[str, float]:
    """The values of ``SERIES`` in this process."""
    counts = asdict(counters.snapshot())
    return {_name(count): counts[count] for count in _MEANINGS}
