"""The comparison as one SVG file: a bar per case, its length the ratio of our rate to vLLM's."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_kernels.svg import Svg

ROW_PX, LABEL_PX, UNIT_PX = 26, 190, 220
MAX_RATIO = 2.0


def ratio_chart(ratios: Mapping[str, float], title: str) -> str:
    """Draw ``ratios`` (case to ours / vLLM's); the line marks 1, longer bars are cut at ``MAX_RATIO``."""
    height = ROW_PX * (len(ratios) + 2)
    svg = Svg(LABEL_PX + int(UNIT_PX * MAX_RATIO) + 60, height)
    svg.label(8, 18, title, is_bold=True)
    for row, (name, ratio) in enumerate(ratios.items(), start=1):
        top = ROW_PX * row + 6
        length = UNIT_PX * min(ratio, MAX_RATIO)
        svg.label(8, top + 14, name)
        svg.bar(LABEL_PX, top, length, ROW_PX - 8, "#2a7" if ratio >= 1 else "#c73")
        svg.label(LABEL_PX + length + 6, top + 14, f"{ratio:.2f}")
    svg.line(LABEL_PX + UNIT_PX, ROW_PX, LABEL_PX + UNIT_PX, height - ROW_PX + 6, "#333")
    return svg.text()
