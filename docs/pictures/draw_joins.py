"""Draw the pictures of docs/joins.md: one of each kind of join, with the rows of its worked table.

    python docs/pictures/draw_joins.py

They are SVG with the reader's own colours for light and dark: no colour is needed to understand them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
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
        self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "middle"
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        (x1, y1), (x2, y2) = start, end
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>')

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


def interval_join() -> Picture:
    """Draw a query, and the clicks up to half an hour after it."""
    made = Picture(
        "Queries joined with clicks up to 30 minutes after them: q1 with c1 and c2; q2 alone, once the "
        "watermark is above 13:01",
        718,
        787,
        238,
    )
    held, queries, clicks, out = 46, 88, 136, 192
    for y, name in (
        (queries, "queries"),
        (held, "may match"),
        (clicks, "clicks"),
        (out, "comes out"),
    ):
        made.lane(y, name)
    made.span(720, 750, held, "q1: 30 minutes, both ends included", "left")
    made.span(751, 781, held, "q2: 30 minutes", "left")
    for minute in (730, 750):
        made.link((720, queries), (minute, clicks))
    made.row(720, queries, "q1", "left")
    made.row(751, queries, "q2", "left")
    made.row(730, clicks, "c1", "right", above=False)
    made.row(750, clicks, "c2", "right", above=False)
    made.row(730, out, "(q1, c1)", "out")
    made.row(750, out, "(q1, c2)", "out")
    made.row(782, out, "(q2, null)", "out", anchor="end")
    made.watermark(782, "watermark 13:02")
    made.times(720, 730, 750, 781)
    return made


def asof_join() -> Picture:
    """Draw orders, and the rate that was valid when each was placed."""
    made = Picture(
        "Orders with the rate as of their time: 702 at 1:30; none at 2:00 and 3:00, since it was deleted at 2:00",
        -10,
        215,
        214,
    )
    rates, orders, out = 62, 118, 172
    for y, name in ((rates, "rates"), (orders, "orders"), (out, "comes out")):
        made.lane(y, name)
    made.span(0, 120, rates, "702 is valid from 0:00 until before 2:00", "right")
    made.row(0, rates, "702", "right")
    made.row(120, rates, "deleted", "right")
    made.link((90, orders), (90, rates + 9))
    for minute, words, found in (
        (90, "order 1", "702"),
        (120, "order 2", "null"),
        (180, "order 3", "null"),
    ):
        made.row(minute, orders, words, "left", above=False)
        made.row(minute, out, found, "out")
    made.watermark(200, "both watermarks have passed 3:00")
    made.times(0, 90, 120, 180)
    return made


def nearest_join() -> Picture:
    """Draw a trade, and the quotes that each direction takes."""
    made = Picture(
        "A trade at 10:10 with the nearest quote: backward takes the one of 10:07, forward that of 10:15, and nearest "
        "that of 10:07; those of 10:02 and 10:19 are farther away or outside of the tolerance of 8 minutes",
        599,
        622,
        196,
    )
    near, quotes, trades = 46, 92, 142
    for y, name in ((near, "tolerance"), (quotes, "quotes"), (trades, "trades")):
        made.lane(y, name)
    made.span(602, 618, near, "8 minutes to both sides, the ends included", "left")
    for minute, words in ((602, "a"), (607, "b"), (615, "c"), (619, "d")):
        made.row(minute, quotes, words, "right")
    made.row(610, trades, "trade", "left", above=False)
    for minute, words, anchor in ((607, "backward, nearest", "end"), (615, "forward", "start")):
        made.link((610, trades), (minute, quotes))
        x = (made.x(610) + made.x(minute)) / 2 + (-10 if anchor == "end" else 16)
        made.text(x, 124, words, kind="small", anchor=anchor)
    made.times(602, 607, 610, 615, 619)
    return made


def lookup() -> Picture:
    """Draw orders, and what the table had when each arrived."""
    made = Picture(
        "Orders with what the table has when they arrive: order 1 finds 702, order 2 finds 715",
        0,
        5,
        214,
    )
    rates, orders, out = 62, 118, 172
    for y, name in ((rates, "the table"), (orders, "orders"), (out, "comes out")):
        made.lane(y, name)
    made.text(
        RIGHT_END,
        20,
        "in the order of arrival, whatever the event times",
        kind="small",
        anchor="end",
    )
    made.span(1, 3, rates, "702", "right")
    made.span(3, 5, rates, "715", "right")
    for place, words, found in (
        (2, "order 1", "(1, 702)"),
        (4, "order 2", "(2, 715)"),
    ):
        made.link((place, orders), (place, rates + 9))
        made.row(place, orders, words, "left", above=False)
        made.row(place, out, found, "out")
    made.row(1, rates, "rate 702", "right")
    made.row(3, rates, "rate 715", "right")
    return made


def table_join() -> Picture:
    """Draw two tables, and which rows each kind of join has."""
    made = Picture(
        "Users joined with cities: user 1 has the city y; user 2 has none, and nobody lives in x",
        0,
        1,
        190,
    )
    for x, title in ((14, "users (id, city)"), (224, "cities (id, country)")):
        made.text(x, 24, title, anchor="start")
        made.parts.append(f'<rect x="{x}" y="34" width="150" height="80" rx="4" class="box"/>')
    made.line((76, 58), (239, 58), "link")
    for x, y, words, kind in (
        (34, 58, "1, y", "left"),
        (34, 94, "2, null", "left"),
        (244, 58, "y, Y", "right"),
        (244, 94, "x, X", "right"),
    ):
        made.parts.append(f'<circle cx="{x}" cy="{y}" r="5" class="{kind}"/>')
        made.text(x + 14, y + 4, words, anchor="start")
    pair, user, city = "(1, y, Y)", "(2, null, null)", "(null, x, X)"
    kinds = [
        ("inner", pair),
        ("left", f"{pair} {user}"),
        ("right", f"{pair} {city}"),
        ("full", f"{pair} {user} {city}"),
        ("semi", "(1, y)"),
        ("anti", "(2, null)"),
    ]
    for number, (how, rows) in enumerate(kinds):
        y = 34 + 25 * number
        made.text(452, y, how, kind="out", anchor="end")
        made.text(464, y, rows, kind="small", anchor="start")
    made.text(14, 146, "User 1 moves to x:", anchor="start")
    made.text(
        14,
        168,
        "the pair (1, y, Y) is taken back, and (1, x, X) comes.",
        kind="small",
        anchor="start",
    )
    return made


PICTURES = {
    "interval-join": interval_join,
    "asof-join": asof_join,
    "nearest-join": nearest_join,
    "lookup": lookup,
    "table-join": table_join,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(HERE / f"{name}.svg")
