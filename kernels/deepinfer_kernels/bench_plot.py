"""Roofline of a bench run: operations a second over operations a byte, every case a point below the card's rates."""

import math
from collections.abc import Sequence

from deepinfer_kernels.bench import Ceilings, Record
from deepinfer_kernels.svg import Svg

_WIDTH, _HEIGHT, _LEFT, _TOP, _LEGEND = 900, 560, 70, 40, 190
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _LEGEND - 10, _HEIGHT - _TOP - 50


class _Axes:
    """Logarithmic axes that hold all points and the corner of the roof."""

    def __init__(self, records: Sequence[Record], ceilings: Ceilings) -> None:
        peak = ceilings.matmul_flops_per_s
        corner = peak / ceilings.copy_bytes_per_s
        across = [corner, *(record.flops / record.bytes for record in records)]
        up = [peak, *(record.flops / record.time_us * 1e6 for record in records)]
        self._x = (math.floor(math.log10(min(across))), math.ceil(math.log10(max(across))))
        self._y = (math.floor(math.log10(min(up))), math.ceil(math.log10(max(up))))

    def x(self, operations_per_byte: float) -> float:
        low, high = self._x
        return _LEFT + (math.log10(operations_per_byte) - low) / max(high - low, 1) * _PLOT_WIDTH

    def y(self, operations_per_s: float) -> float:
        low, high = self._y
        return _TOP + _PLOT_HEIGHT - (math.log10(operations_per_s) - low) / max(high - low, 1) * _PLOT_HEIGHT

    def draw(self, svg: Svg, ceilings: Ceilings) -> None:
        for exponent in range(self._x[0], self._x[1] + 1):
            x = self.x(10.0**exponent)
            svg.line(x, _TOP, x, _TOP + _PLOT_HEIGHT, "#ddd")
            svg.label(x, _TOP + _PLOT_HEIGHT + 16, f"1e{exponent}", anchor="middle")
        for exponent in range(self._y[0], self._y[1] + 1):
            y = self.y(10.0**exponent)
            svg.line(_LEFT, y, _LEFT + _PLOT_WIDTH, y, "#ddd")
            svg.label(_LEFT - 6, y + 4, f"1e{exponent}", anchor="end")
        svg.label(_LEFT + _PLOT_WIDTH / 2, _HEIGHT - 12, "operations per byte", anchor="middle")
        svg.label(8, _TOP - 8, "operations per second")
        peak, corner = ceilings.matmul_flops_per_s, ceilings.matmul_flops_per_s / ceilings.copy_bytes_per_s
        # The memory roof starts where it enters the plot: at the left edge, or at its lower one.
        start = max(10.0 ** self._x[0], 10.0 ** self._y[0] / ceilings.copy_bytes_per_s)
        svg.line(self.x(start), self.y(start * ceilings.copy_bytes_per_s), self.x(corner), self.y(peak), "#333", 2)
        svg.line(self.x(corner), self.y(peak), self.x(10.0 ** self._x[1]), self.y(peak), "#333", 2)


def roofline(records: Sequence[Record], ceilings: Ceilings) -> str:
    """SVG text; a case without counted operations is left out, since it has no place on the axes."""
    shown = [record for record in records if record.flops > 0 and record.bytes > 0]
    svg = Svg(_WIDTH, _HEIGHT)
    svg.label(
        8,
        18,
        f"{ceilings.device}: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s",
        is_bold=True,
    )
    axes = _Axes(shown, ceilings)
    axes.draw(svg, ceilings)
    ops = sorted({record.op for record in shown})
    colours = {op: f"hsl({360 * index // max(len(ops), 1)},70%,42%)" for index, op in enumerate(ops)}
    for row, op in enumerate(ops):
        y = _TOP + 14 * row
        svg.bar(_WIDTH - _LEGEND + 4, y, 10, 10, colours[op])
        svg.label(_WIDTH - _LEGEND + 20, y + 9, op)
    for record in shown:
        hint = (
            f"{record.op} {record.case}: {record.time_us:.1f} us, copy {record.copy_ratio:.2f}, "
            f"matmul {record.matmul_ratio:.2f}"
        )
        point = axes.x(record.flops / record.bytes), axes.y(record.flops / record.time_us * 1e6)
        svg.point(*point, colours[record.op], hint)
    return svg.text()
