"""Draw the pictures of docs/joins.md: one of each kind of join, with the rows of its worked table.

python docs/pictures/draw_joins.py
"""

from __future__ import annotations

from pathlib import Path

from canvas import RIGHT_END, Picture

HERE = Path(__file__).parent


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
