"""The comparison as one SVG file: a bar per case, its length the ratio of our rate to vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

ROW_PX, LABEL_PX, UNIT_PX = 26, 190, 220
MAX_RATIO = 2.0


def ratio_chart(ratios: Mapping[str, float], title: str) -> str:
    """Draw ``ratios`` (case to ours / vLLM's); the line marks 1, longer bars are cut at ``MAX_RATIO``."""
    height = ROW_PX * (len(ratios) + 2)
    width = LABEL_PX + int(UNIT_PX * MAX_RATIO) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="13"><text x="8" y="18" font-weight="bold">{escape(title)}</text>'
    ]
    for row, (name, ratio) in enumerate(ratios.items(), start=1):
        top = ROW_PX * row + 6
        length = int(UNIT_PX * min(ratio, MAX_RATIO))
        colour = "#2a7" if ratio >= 1 else "#c73"
        parts.append(
            f'<text x="8" y="{top + 14}">{escape(name)}</text>'
            f'<rect x="{LABEL_PX}" y="{top}" width="{length}" height="{ROW_PX - 8}" fill="{colour}"/>'
            f'<text x="{LABEL_PX + length + 6}" y="{top + 14}">{ratio:.2f}</text>'
        )
    line = LABEL_PX + UNIT_PX
    parts.append(f'<line x1="{line}" y1="{ROW_PX}" x2="{line}" y2="{height - ROW_PX + 6}" stroke="#333"/></svg>')
    return "".join(parts)
