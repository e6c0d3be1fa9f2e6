"""A canvas for diagrams: boxes with text, arrows between them, colours for light and dark pages.

The widths of texts are estimates, because there is no font to measure with: a line has room for a number of characters.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

FONT = 14
LINE = 19
CHARACTER = 7.6  # pixels, of text in this size and a wide font
SMALL_CHARACTER = 6.7  # the same of small text
PADDING = 10
_LIGHT = {
    "plain": ("#f6f8fa", "#848d97"),
    "data": ("#ddf4ff", "#0969da"),
    "good": ("#dafbe1", "#1a7f37"),
    "bad": ("#ffebe9", "#cf222e"),
    "note": ("#fff8c5", "#9a6700"),
}
_DARK = {
    "plain": ("#22272e", "#768390"),
    "data": ("#10294a", "#4493f8"),
    "good": ("#12301c", "#3fb950"),
    "bad": ("#3d1618", "#f85149"),
    "note": ("#33270a", "#d29922"),
}
_STYLE = """\
text {{ font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: {font}px; }}
.title {{ font-weight: 600; }}
.code {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; font-weight: 600; }}
.small {{ font-size: 12.5px; }}
.line {{ fill: none; stroke-width: 1.6; }}
.box {{ stroke-width: 1.4; }}
{light}
@media (prefers-color-scheme: dark) {{
{dark}
}}"""


class Box(NamedTuple):
    """A rectangle on the canvas."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height

    @property
    def centre(self) -> float:
        """The x of its middle."""
        return self.x + self.width / 2

    @property
    def middle(self) -> float:
        """The y of its middle."""
        return self.y + self.height / 2


class Canvas:
    """A picture that is made from the top down."""

    def __init__(self, width: int, title: str, description: str) -> None:
        self.width = width
        self._title = title
        self._description = description
        self._parts: list[str] = []
        self._lowest = 0.0

    def text(self, x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> None:
        """Write one line; y is its baseline."""
        self._lowest = max(self._lowest, y + 6)
        self._parts.append(
            f'<text class="ink {style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        title: str,
        text: str | Sequence[str] = "",
        *,
        kind: str = "plain",
        code: str = "",
        height: float = 0,
    ) -> Box:
        """Draw a box with a title, a text that is wrapped, and the name of a module; at least as high as `height`."""
        room = int((width - 2 * PADDING) / CHARACTER)
        paragraphs = [text] if isinstance(text, str) else text
        lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, room)]
        rows = [(title, "title")] * bool(title) + [(line, "") for line in lines] + [(code, "code muted")] * bool(code)
        box = Box(x, y, width, max(height, LINE * len(rows) + 2 * PADDING - 4))
        self.frame(box, kind)
        first = box.middle - LINE * len(rows) / 2 + 14
        for index, (line, style) in enumerate(rows):
            self.text(x + PADDING, first + LINE * index, line, style)
        return box

    def frame(self, box: Box, kind: str = "plain") -> None:
        """Draw an empty box; what is inside of it follows."""
        self._lowest = max(self._lowest, box.bottom)
        size = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        self._parts.append(f'<rect class="box {kind}" {size} rx="7"/>')

    def arrow(
        self, *points: tuple[float, float], kind: str = "plain", both: bool = False, dashed: bool = False
    ) -> None:
        """Draw a line through these points, with a head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        ends = f' marker-end="url(#{kind})"' + (f' marker-start="url(#{kind})"' if both else "")
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="line {kind}-line" d="{path}"{dashes}{ends}/>')
        self._lowest = max(self._lowest, *(y for _, y in points))

    def svg(self) -> str:
        """Return the finished picture."""
        height = self._lowest + 16
        style = _STYLE.format(font=FONT, light=_colours(_LIGHT, dark=False), dark=_colours(_DARK, dark=True))
        markers = "".join(
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path class="{kind}-head" d="M0 1 L10 5 L0 9 z"/></marker>\n'
            for kind in _LIGHT
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:g}" width="{self.width}" '
            f'height="{height:g}" role="img">\n<title>{escape(self._title)}</title>\n'
            f"<desc>{escape(self._description)}</desc>\n<style>\n{style}\n</style>\n<defs>\n{markers}</defs>\n"
            f'<rect class="page" x="0" y="0" width="{self.width}" height="{height:g}" rx="8"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def _colours(palette: dict[str, tuple[str, str]], *, dark: bool) -> str:
    page, ink, muted = ("#16181c", "#e6edf3", "#a3adb8") if dark else ("#ffffff", "#1f2328", "#57606a")
    rules = [f".page {{ fill: {page}; }}", f".ink {{ fill: {ink}; }}", f".muted {{ fill: {muted}; }}"]
    for kind, (fill, stroke) in palette.items():
        rules.append(f".{kind} {{ fill: {fill}; stroke: {stroke}; }}")
        rules.append(f".{kind}-line {{ stroke: {stroke}; }} .{kind}-head {{ fill: {stroke}; }}")
    return "\n".join(rules)
