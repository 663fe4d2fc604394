"""What the pictures of the documentation are drawn on.

They are SVG with the reader's own colours for light and dark: no colour is needed to understand them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

LEFT, RIGHT_END = 118, 700  # pixels: where lanes begin and end
WIDTH = 720
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 11.5px; fill: #59636e; }
  .lane, .box { stroke: #d1d9e0; fill: none; }
  .left { fill: #0969da; stroke: #0969da; }
  .right { fill: #bc4c00; stroke: #bc4c00; }
  .out { fill: #1a7f37; stroke: #1a7f37; }
  .span { fill-opacity: .14; stroke-width: 1; }
  .link { stroke: #59636e; fill: none; }
  .clock { stroke: #8250df; stroke-dasharray: 4 3; fill: none; }
  text.left, text.right, text.out { stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .small { fill: #9198a1; }
    .lane, .box { stroke: #3d444d; }
    .left { fill: #4493f8; stroke: #4493f8; }
    .right { fill: #f0883e; stroke: #f0883e; }
    .out { fill: #3fb950; stroke: #3fb950; }
    .link { stroke: #9198a1; }
    .clock { stroke: #ab7df8; }
  }
"""


@dataclass
class Picture:
    """An SVG whose x is time, from ``first`` to ``last`` in minutes, and whose y are lanes."""

    title: str
    first: float
    last: float
    height: int
    parts: list[str] = field(default_factory=list)

    def x(self, minute: float) -> float:
        share = (minute - self.first) / (self.last - self.first)
        return round(LEFT + share * (RIGHT_END - LEFT), 1)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        kind: str = "",
        anchor: str = "middle",
        size: float | None = None,
    ) -> None:
        sized = "" if size is None else f' style="font-size:{size}px"'
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}"{sized}>{escape(words)}</text>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        (x1, y1), (x2, y2) = start, end
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>')

    def path(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        corners = " L".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<path d="M{corners}" class="{kind}"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw an arrow to the right."""
        self.line(start, end, "link")
        x, y = end
        self.path(((x - 6, y - 4), end, (x - 6, y + 4)), "link")

    def dot(self, x: float, y: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="5" class="{kind}"/>')

    def mark(self, at: float, y: int, words: str) -> None:
        """Draw a row that comes out, with its words beside it."""
        self.dot(self.x(at), y, "out")
        self.text(self.x(at) + 8, y - 6, words, kind="small", anchor="start")

    def lane(self, y: int, name: str) -> None:
        self.text(LEFT - 12, y + 4, name, anchor="end")
        self.line((LEFT, y), (RIGHT_END, y), "lane")

    def row(
        self,
        minute: float,
        y: int,
        words: str,
        kind: str,
        *,
        above: bool = True,
        anchor: str = "middle",
    ) -> None:
        """Draw a row as a dot; one that is not there (null, or deleted) as a ring."""
        hollow = (
            ' fill-opacity="0" stroke-width="1.6"'
            if words.endswith(("null)", "null", "deleted"))
            else ""
        )
        self.parts.append(f'<circle cx="{self.x(minute)}" cy="{y}" r="5" class="{kind}"{hollow}/>')
        x = self.x(minute) - (8 if anchor == "end" else 0)
        self.text(x, y - 14 if above else y + 21, words, anchor=anchor)

    def span(self, start: float, end: float, y: int, words: str, kind: str) -> None:
        """Draw from when to when something holds."""
        x, width = self.x(start), self.x(end) - self.x(start)
        self.parts.append(
            f'<rect x="{x}" y="{y - 9}" width="{width}" height="18" rx="3" class="{kind} span"/>'
        )
        self.text(x + width / 2, y + 4, words, kind="small")

    def link(self, start: tuple[float, int], end: tuple[float, int]) -> None:
        (m1, y1), (m2, y2) = start, end
        self.line((self.x(m1), y1), (self.x(m2), y2), "link")

    def watermark(self, minute: float, words: str) -> None:
        self.line((self.x(minute), 26), (self.x(minute), self.height - 14), "clock")
        self.text(self.x(minute) - 5, 20, words, kind="small", anchor="end")

    def times(self, *minutes: float) -> None:
        for minute in minutes:
            hour, rest = divmod(int(minute), 60)
            self.text(self.x(minute), self.height - 6, f"{hour}:{rest:02}", kind="small")

    def svg(self) -> str:
        parts = "\n".join(f"  {part}" for part in self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'role="img" aria-label="{escape(self.title)}">\n'
            f"  <title>{escape(self.title)}</title>\n  <style>{STYLE}  </style>\n{parts}\n</svg>\n"
        )
