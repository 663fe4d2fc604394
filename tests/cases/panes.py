"""Cases E: triggers and accumulation; F: late data. What needs running time is in `BOOK`."""

from cases.case import Answer, Case, Reach, event

import millstream as ms
from millstream import testing


def panes(size, *emit, columns="window_start total", window=None, **options):
    """Every pane of a window, in the order in which they came."""
    kind = window or ms.tumbling(f"{size} seconds")

    def build(stream, name):
        windowed = stream.window(kind, by="key", name=name).emit(*emit, **options)
        return {"out": windowed.agg(total=ms.sum("n"))}

    return build


def changelog(*rows, columns="window_start total"):
    return {"out": Answer(columns, rows, "changelog")}


# ── the nine events of the book "Streaming Systems", and when they arrive ──────────────────────


def clock(text):
    minutes, seconds = text.split(":")
    return int(minutes) * 60 + int(seconds)


EVENTS = [
    ("04:59", 5, "00:26"), ("05:39", 7, "02:24"), ("06:13", 3, "03:39"), ("06:39", 4, "04:19"),
    ("07:06", 8, "03:06"), ("07:19", 3, "06:39"), ("08:19", 9, "01:25"), ("08:39", 8, "07:26"),
    ("09:00", 1, "07:46"),
]  # fmt: skip
# Firings by running time happen at 05:59, 06:39, 07:39 and 08:19, among others: a Tick ends at each.
TICKS = ["05:59", "06:39", "07:39", "08:06", "08:19", "09:39", "12:00"]
HEURISTIC = [("06:00", "02:00"), ("07:30", "04:00"), ("07:40", "06:00"), ("09:30", "08:00")]
PERFECT = [("08:20", "02:00"), ("08:21", "04:00"), ("08:22", "06:00"), ("09:30", "08:00")]
SESSIONS = [*HEURISTIC[:3], ("09:30", "08:46")]


def arriving(watermarks):
    """Rows in order of arrival; the Ticks between them are the same for every list of watermarks."""
    steps = [(clock(arrival), event(clock(at), n, "team")) for arrival, n, at in EVENTS]
    steps += [(clock(arrival), Reach(clock(to))) for arrival, to in watermarks]
    moments = {clock(arrival) for arrival, *_ in (*EVENTS, *HEURISTIC, *PERFECT)}
    moments |= {*map(clock, TICKS)}
    rows, now = [], 0
    for moment in sorted(moments):
        rows.append(testing.Tick(f"{moment - now} seconds"))
        rows += [row for at, row in steps if at == moment]
        now = moment
    return rows


def book(case_id, says, watermarks, build, *rows, columns="window_start total", **options):
    options = {"delay": None, "lateness": 3600, **options}
    return Case(
        case_id, says, arriving(watermarks), build, changelog(*rows, columns=columns), **options
    )


EARLY = {"early": "1 minute", "late": "each", "suppress_unchanged": False}
# As Beam has it: events exactly a gap apart are in two sessions.
TWO, ONE = 120, ms.session("1 minute", gap_inclusive=False)
KINDS = "window_start total pane_kind"
SIGNED = "window_start _diff total"
BOOK = [
    book(
        "E1",
        "the panels accumulate",
        HEURISTIC,
        panes(TWO, "update", panes=True, **EARLY),
        *((0, 5, "early"), (0, 5, "on_time"), (0, 14, "late")),
        *((120, 10, "early"), (120, 18, "on_time")),
        *((240, 4, "early"), (240, 4, "on_time")),
        *((360, 3, "early"), (360, 12, "on_time")),
        columns=KINDS,
    ),
    book(
        "E2",
        "the panels discard",
        HEURISTIC,
        panes(TWO, "discard", **EARLY),
        *((0, 5), (0, 0), (0, 9), (120, 10), (120, 8), (240, 4), (240, 0), (360, 3), (360, 9)),
    ),
    book(
        "E3",
        "the panels retract",
        HEURISTIC,
        panes(TWO, "retract", **EARLY),
        *((0, 1, 5), (0, -1, 5), (0, 1, 5), (0, -1, 5), (0, 1, 14)),
        *((120, 1, 10), (120, -1, 10), (120, 1, 18)),
        *((240, 1, 4), (240, -1, 4), (240, 1, 4)),
        *((360, 1, 3), (360, -1, 3), (360, 1, 12)),
        columns=SIGNED,
    ),
    book(
        "E4",
        "the panels under a perfect watermark",
        PERFECT,
        panes(TWO, "update", **EARLY),
        *(
            (0, 5),
            (0, 14),
            (120, 10),
            (120, 18),
            (120, 18),
            (240, 4),
            (240, 4),
            (360, 3),
            (360, 12),
        ),
    ),
    book(
        "E5",
        "sessions accumulate, and what was merged away is retracted",
        SESSIONS,
        panes(0, "update", window=ONE, panes=True, **EARLY),
        *(
            (1, 5, "early"),
            (1, 5, "on_time"),
            (1, 7, "early"),
            (1, 22, "early"),
            (1, 22, "on_time"),
        ),
        # At 08:19 an early pane is due, and the 9 comes: what was due is emitted first.
        *((1, 3, "early"), (-1, 22, "on_time"), (1, 36, "late"), (1, 12, "on_time")),
        columns="_diff total pane_kind",
    ),
    book(
        "E6",
        "sessions discard",
        SESSIONS,
        panes(0, "discard", window=ONE, **EARLY),
        *((5,), (0,), (7,), (15,), (0,), (3,), (9,), (9,)),
        columns="total",
    ),
    book(
        "E7",
        "sessions retract",
        SESSIONS,
        panes(0, "retract", window=ONE, **EARLY),
        *((1, 5), (-1, 5), (1, 5), (1, 7), (-1, 7), (1, 22), (-1, 22), (1, 22)),
        *((1, 3), (-1, 5), (-1, 22), (1, 36), (-1, 3), (1, 12)),
        columns="_diff total",
    ),
    book(
        "E8",
        "panes that say nothing new are left out",
        HEURISTIC,
        panes(TWO, "retract", early="1 minute", late="each"),
        *((0, 1, 5), (0, -1, 5), (0, 1, 14), (120, 1, 10), (120, -1, 10), (120, 1, 18)),
        *((240, 1, 4), (360, 1, 3), (360, -1, 3), (360, 1, 12)),
        columns=SIGNED,
    ),
    book(
        "E9",
        "final panels wait for the lateness",
        [*HEURISTIC, ("12:00", "11:00")],
        panes(TWO, "final"),
        *((0, 5), (120, 18), (240, 4), (360, 12)),
        lateness=180,
        late=1,  # 9@01:25 came when 06:00 was reached
    ),
    book(
        "E9",
        "and have what came within it",
        [*HEURISTIC, ("12:00", "13:00")],
        panes(TWO, "final"),
        *((0, 14), (120, 18), (240, 4), (360, 12)),
        lateness=300,
    ),
]

# ── Beam's transcripts, with other values ──────────────────────────────────────────────────────


def at(second, n=None):
    return event(second, second if n is None else n)


TEN = 10
COUNTED = {"early": ms.after_count(2), "suppress_unchanged": False}


def first_early_pane(stream, name):
    """A trigger that fires once closes its window."""
    windowed = stream.window(ms.tumbling("10 seconds"), by="key", name=name)
    once = ms.once(ms.after_count(2))
    return {"out": windowed.emit("discard", early=once, panes=True).agg(total=ms.sum("n"))}


TRANSCRIPTS = [
    Case(
        "E10",
        "the default emits on time and again with what is late",
        [*map(at, (1, 2, 4, 11, 13, 27)), Reach(100), at(6)],
        panes(TEN, "update", early=None, panes=True),
        changelog(
            *((0, 7, "on_time", False), (0, 13, "late", False)),
            *((10, 24, "on_time", False), (20, 27, "on_time", False)),
            columns="window_start total pane_kind pane_last",
        ),
        delay=None,
        lateness=3600,
    ),
    Case(
        "E11",
        "sessions fire early by twos and late by threes",
        [*map(at, (1, 2, 3, 5, 6, 7, 8)), Reach(100), at(2), at(4), at(3)],
        panes(
            0,
            "update",
            window=ms.session("10 seconds"),
            late=ms.after_count(3),
            panes=True,
            **COUNTED,
        ),
        changelog(
            *((3, "early", 0), (11, "early", 1), (24, "early", 2), (32, "on_time", 3)),
            (41, "late", 4),
            columns="total pane_kind pane_index",
        ),
        delay=None,
        lateness=3600,
    ),
    Case(
        "E12",
        "panes by count discard what they emitted",
        [*map(at, (1, 3, 4, 5, 14, 6, 19, 7)), Reach(100)],
        panes(TEN, "discard", **COUNTED),
        # The third pair was complete with 7, so the on-time panes of both windows are empty.
        changelog((0, 4), (0, 9), (0, 13), (0, 0), (10, 33), (10, 0)),
        delay=None,
        lateness=3600,
    ),
    Case(
        "E13",
        "a window that has expired is gone",
        [*map(at, (1, 2, 3, 10, 11, 25)), Reach(31), at(9, 0), at(12), Reach(45), at(13), at(26)],
        panes(TEN, "update", early=None, late="each"),
        changelog((0, 6), (10, 21), (10, 33), (20, 25), (20, 51)),
        delay=None,
        lateness=20,
        late=2,  # 9 when 31 had been reached, 13 when 45 had
    ),
    Case(
        "E14",
        "lateness bounds late panes",
        [event(26, 5), Reach(120), event(53, 6), Reach(360), event(85, 9)],
        panes(TWO, "update", early=None, late="each", panes=True),
        changelog((0, 5, "on_time"), (0, 11, "late"), columns=KINDS),
        delay=None,
        lateness=120,
        late=1,
    ),
    Case(
        "E15",
        "a trigger that fires once gives one pane",
        [event(1, 1), event(2, 2), event(3, 3), Reach(100), event(4, 4)],
        first_early_pane,
        changelog((0, 3)),
        delay=None,
        lateness=3600,
        late=1,
    ),
]

# ── late data ──────────────────────────────────────────────────────────────────────────────────

HOP = ms.hopping("10 seconds", "5 seconds")
HOPS = [event(12, 1), event(7, 10), event(4, 100), Reach(60)]


def with_late_rows(stream, name):
    out = stream.window(HOP, by="key", name=name).agg(total=ms.sum("n"))
    return {"out": out, "late": out.late}


LATE_DATA = [
    Case(
        "F1",
        "an event may be too late for one window and in time for another",
        HOPS,
        panes(0, window=HOP),
        changelog((5, 11), (10, 1)),
        late=1,
    ),
    Case(
        "F1",
        "and so where every value is given",
        HOPS,
        panes(0, "update", window=HOP, early=None),
        changelog((5, 11), (10, 1)),
        late=1,
    ),
    Case(
        "F2",
        "rows that are too late come out aside",
        HOPS,
        with_late_rows,
        {
            **changelog((5, 11), (10, 1)),
            "late": Answer(
                "at key n late_by late_reason window_start window_end",
                [(4, "a", 100, 8, "expired_window", 0, 10)],
                "changelog",
            ),
        },
        late=1,
        policy="side",
    ),
    Case(
        "F3",
        "windows take late events within the lateness",
        [event(s, n) for s, n in ((0, 3), (1, 4), (2, 5), (1, 6), (0, 7), (3, 8), (0, 9), (5, 1))],
        panes(2),
        changelog((0, 20), (2, 13)),  # the 9 came when 3 had been reached
        lateness=1,
        late=1,
    ),
    Case(
        "F3",
        "a large jump of time closes all windows at once",
        [event(s, n) for s, n in ((0, 3), (1, 4), (30, 5), (1, 6), (33, 0), (99, 0))],
        panes(2),
        changelog((0, 7), (30, 5), (32, 0)),
        lateness=1,
        late=1,
    ),
]
CASES = [*TRANSCRIPTS, *LATE_DATA]
