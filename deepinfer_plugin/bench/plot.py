"""Charts as SVG: bars for a comparison, lines for a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

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


WIDTH_PX, HEIGHT_PX, MARGIN_PX = 640, 400, 70
COLOURS = ("#26c", "#aaa")  # measured, converted
NUM_TICKS = 5


def line_chart(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    low_y: float = 0.0,
) -> str:
    """Lines with a disc per point, the x axis from 0.

    Args:
        title: of the chart.
        x_title: name and unit of the x axis.
        y_title: name and unit of the y axis.
        series: at most two, each a label and its (x, y) points, at least one; x is 0 or more, y ``low_y`` or more.
        low_y: where the y axis begins.
    """
    points = [point for _, line in series for point in line]
    top_x = max(x for x, _ in points) or 1.0
    height_y = max(y for _, y in points) - low_y or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        plot_width, plot_height = WIDTH_PX - 2 * MARGIN_PX, HEIGHT_PX - 2 * MARGIN_PX
        return MARGIN_PX + plot_width * x / top_x, HEIGHT_PX - MARGIN_PX - plot_height * (y - low_y) / height_y

    svg = Svg(WIDTH_PX, HEIGHT_PX)
    svg.label(8, 18, title, is_bold=True)
    svg.label(WIDTH_PX / 2, HEIGHT_PX - 20, x_title, anchor="middle")
    svg.label(8, MARGIN_PX - 16, y_title)
    left, bottom = place(0, low_y)
    for tick in range(NUM_TICKS + 1):
        value_x, value_y = top_x * tick / NUM_TICKS, low_y + height_y * tick / NUM_TICKS
        x, y = place(value_x, value_y)
        svg.line(left, y, WIDTH_PX - MARGIN_PX, y, "#ddd")
        svg.label(left - 6, y + 4, f"{value_y:,.4g}", anchor="end")
        svg.label(x, bottom + 16, f"{value_x:,.4g}", anchor="middle")
    for number, (label, line) in enumerate(series):
        colour, spots = COLOURS[number], [place(x, y) for x, y in line]
        for begin, end in pairwise(spots):
            svg.line(*begin, *end, colour, 2.0)
        for (x, y), (value_x, value_y) in zip(spots, line, strict=True):
            svg.point(x, y, colour, f"{label}: {value_x:,.4g}, {value_y:,.4g}")
        svg.bar(WIDTH_PX / 2, 9 + 16 * number, 10, 10, colour)
        svg.label(WIDTH_PX / 2 + 16, 18 + 16 * number, label)
    return svg.text()
