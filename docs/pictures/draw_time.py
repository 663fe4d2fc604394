"""Draw the pictures of docs/guide/time.md and docs/guide/effectively-once.md.

python docs/pictures/draw_time.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from canvas import LEFT, RIGHT_END, Picture

HERE = Path(__file__).parent
EVENTS = (1, 3, 4, 9, 10, 16)  # minutes after 9:00, of one user


def windows() -> Picture:
    """Draw six events, and the windows of each kind that they are in."""
    made = Picture(
        "Events at 9:01, 9:03, 9:04, 9:09, 9:10 and 9:16. Tumbling windows of 5 minutes: 3, 1, 1 and 1 events. Hopping "
        "windows of 10 minutes, one every 5. Sessions with a gap of 4 minutes: from 9:01 to 9:08, from 9:09 to 9:14, from "
        "9:16 to 9:20",
        0,
        21,
        262,
    )
    events, tumbling, hopping, session = 46, 96, 142, 226
    for y, name in ((events, "events"), (tumbling, "tumbling"), (session, "session")):
        made.lane(y, name)
    made.text(LEFT - 12, hopping + 14, "hopping", anchor="end")
    for minute in EVENTS:
        made.row(minute, events, "", "left")
    for start in (0, 5, 10, 15):
        made.span(start, start + 5, tumbling, str(_between(start, start + 5)), "right")
    for number, start in enumerate((0, 5, 10)):
        y = hopping + 22 * (number % 2)
        made.span(start, start + 10, y, str(_between(start, start + 10)), "right")
    for start, end in ((1, 8), (9, 14), (16, 20)):
        made.span(start, end, session, str(_between(start, end)), "out")
    made.text(
        RIGHT_END,
        20,
        "the number in a window is how many events it has",
        kind="small",
        anchor="end",
    )
    for minute in (0, 5, 10, 15, 20):
        made.text(made.x(minute), made.height - 6, f"9:{minute:02}", kind="small")
    return made


def _between(start: float, end: float) -> int:
    return sum(start <= minute < end for minute in EVENTS)


# (seconds after 9:00, as they arrive): the watermark follows the newest by 10 seconds
ARRIVALS = (10, 40, 32, 65, 75, 30, 105)
DELAY_S, WINDOW_END_S, LATENESS_S = 10, 60, 30


def watermark() -> Picture:
    """Draw events as they arrive, how the watermark follows them, and which one is late."""
    made = Picture(
        "Seven events as they arrive, by their event time. The watermark stays 10 seconds behind the newest one. The event "
        "of 9:00:32 is out of order, and in time. The one of 9:00:30, which comes when the watermark is at 9:01:05, is "
        "behind it, and is taken because of the lateness of 30 seconds. The window that ends at 9:01:00 closes when the "
        "watermark reaches 9:01:30",
        0,
        len(ARRIVALS) + 0.6,
        300,
    )

    def y(second: float) -> float:
        return round(252 - second * 2, 1)

    for second, words in ((0, "9:00:00"), (60, "9:01:00"), (90, "9:01:30")):
        made.text(LEFT - 12, y(second) + 4, words, kind="small", anchor="end")
        made.line((LEFT, y(second)), (RIGHT_END, y(second)), "lane")
    made.text(LEFT + 4, y(60) - 5, "end of the window", kind="small", anchor="start")
    made.text(LEFT + 4, y(90) - 5, "its end and the lateness: closed", kind="small", anchor="start")
    made.path(_steps(made, y), "clock")
    newest = 0
    for number, second in enumerate(ARRIVALS):
        behind = second < newest - DELAY_S
        newest = max(newest, second)
        x = made.x(number + 0.6)
        made.dot(x, y(second), "right" if behind else "left")
        made.text(x, y(second) + (20 if behind else -10), f":{second % 60:02}", kind="small")
    made.text(made.x(5.6), y(30) + 36, "behind the watermark", kind="small")
    made.text(RIGHT_END, y(95) + 18, "watermark", kind="small", anchor="end")
    made.text((LEFT + RIGHT_END) / 2, made.height - 8, "in the order of arrival", kind="small")
    return made


def _steps(made: Picture, y: object) -> Iterable[tuple[float, float]]:
    newest = 0
    before = None
    for number, second in enumerate(ARRIVALS):
        newest = max(newest, second)
        x, level = made.x(number + 0.6), y(newest - DELAY_S)  # type: ignore[operator]
        if before is not None:
            yield x, before
        yield x, level
        before = level
    assert before is not None
    yield RIGHT_END, before


def panes() -> Picture:
    """Draw what comes out of one window as its events come: early, on time, late, and after it has closed."""
    made = Picture(
        "One window. Early panes say 1, then 2, as two events come. On time, when the watermark reaches the end of the "
        "window, it says 2. A third event comes within the lateness: a late pane says 3. A fourth one comes when the window "
        "has closed: it is late, and goes to the side output",
        0,
        10,
        250,
    )
    events, update, retract, final, side = 52, 96, 134, 172, 210
    for y, name in (
        (events, "events"),
        (update, '"update"'),
        (retract, '"retract"'),
        (final, '"final"'),
        (side, "side output"),
    ):
        made.lane(y, name)
    for at, kind in ((1, "left"), (3, "left"), (6, "left"), (9, "right")):
        made.dot(made.x(at), events, kind)
    for at, words in ((1, "1"), (3, "2"), (6, "3")):
        made.mark(at, update, words)
    for at, words in ((1, "+1"), (3, "-1 +2"), (6, "-2 +3")):
        made.mark(at, retract, words)
    made.mark(7.6, final, "3")
    made.mark(9, side, "the event")
    for at, words in ((4.6, "the watermark is at its end"), (7.6, "… and past the lateness")):
        made.line((made.x(at), 28), (made.x(at), made.height - 20), "clock")
        made.text(made.x(at) - 4, 20, words, kind="small", anchor="end")
    for at, words in ((2, "early"), (6, "late"), (9, "closed")):
        made.text(made.x(at), made.height - 4, words, kind="small")
    return made


BOXES = (
    ("plan", "which records: written down"),
    ("compute", "rows and new state"),
    ("sinks", "rows, with the batch's number"),
    ("commit", "state, views, position: at once"),
)


def batch() -> Picture:
    """Draw the four steps of a batch, and what the next run does after a crash in each."""
    made = Picture(
        "A batch: its records are planned and written down, rows and state are computed, sinks take the rows with the number "
        "of the batch, and the state store commits state, views and position at once. After a crash before the commit the "
        "next run repeats the batch over the same records, and sinks that have its number do nothing",
        0,
        4,
        206,
    )
    width = 150
    for number, (name, words) in enumerate(BOXES):
        x = 14 + number * (width + 31)
        made.parts.append(f'<rect x="{x}" y="46" width="{width}" height="52" rx="5" class="box"/>')
        made.text(x + width / 2, 68, name, kind="left")
        made.text(x + width / 2, 87, words, kind="small", size=10.5)
        if number:
            made.arrow((x - 29, 72), (x - 3, 72))
    made.path(((632, 98), (632, 132), (89, 132), (89, 101)), "link")
    made.text(360, 126, "the next batch", kind="small")
    made.text(14, 164, "A crash before the commit:", anchor="start")
    made.text(
        14,
        184,
        "the next run repeats the batch, over the same records; a sink that has its number does nothing.",
        kind="small",
        anchor="start",
    )
    made.text(14, 24, "One batch", anchor="start")
    return made


PICTURES = {"windows": windows, "watermark": watermark, "panes": panes, "batch": batch}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(HERE / f"{name}.svg")
