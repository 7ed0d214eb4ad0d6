"""A few shapes as SVG text: enough for the plots of the benches without a plotting library."""

from html import escape

FONT_PX = 12


class Svg:
    """A drawing that grows; ``text()`` is the file."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{FONT_PX}">'
            f'<rect width="{width}" height="{height}" fill="#fff"/>'
        ]

    def label(self, x: float, y: float, text: str, *, is_bold: bool = False, anchor: str = "start") -> None:
        """Text whose base line starts, ends or is centred at a point."""
        weight = ' font-weight="bold"' if is_bold else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def point(self, x: float, y: float, colour: str, hint: str) -> None:
        """A small disc; a browser shows ``hint`` where the mouse is over it."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.75">'
            f"<title>{escape(hint)}</title></circle>"
        )

    def text(self) -> str:
        """The file."""
        return "".join([*self._parts, "</svg>"])
