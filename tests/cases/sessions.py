"""Cases C: sessions."""

import random

import polars as pl
from cases.case import Answer, Case, Reach, event

import millstream as ms


def minutes(at, n=1, key="a", **values):
    return event(at * 60, n, key, **values)


def session(*emit, gap="5 minutes", **options):
    keys = {
        name: options.pop(name)
        for name in ("gap_inclusive", "strict", "max_gap")
        if name in options
    }

    def build(stream, name):
        windowed = stream.window(ms.session(gap, **keys), by="key", name=name).emit(
            *emit, **options
        )
        return {"out": windowed.agg(total=ms.sum("n"))}

    return build


def spans(*rows, columns="window_start window_end total", kind="changelog"):
    """Rows whose first two columns are minutes."""
    return {
        "out": Answer(
            columns,
            [(start * 60, end * 60, *more) for start, end, *more in rows],
            kind,
            key=("window_start", "window_end", "key"),
        )
    }


def every_order(events, orders):
    """The same events in several orders, each under a key of its own."""
    dice = random.Random(4)
    return [
        minutes(at, key=f"order {number}", gap_s=gap_s)
        for number in range(orders)
        for at, gap_s in dice.sample(events, len(events))
    ]


BRIDGE = [minutes(0), minutes(9, 20), minutes(30, key="z"), minutes(4.5, 300), Reach(12000)]
BRIDGED = {"lateness": 3600}
LATE = {"early": None, "late": "each"}
KAFKA = [minutes(0), minutes(5), minutes(1), minutes(11, key="b"), minutes(5), minutes(30)]

CASES = [
    Case(
        "C1",
        "events exactly a gap apart are one session",
        [minutes(0), minutes(5), Reach(3600)],
        session(),
        spans((0, 10, 2)),
    ),
    Case(
        "C1",
        "and two where the gap is exclusive",
        [minutes(0), minutes(5), Reach(3600)],
        session(gap_inclusive=False),
        spans((0, 5, 1), (5, 10, 1)),
    ),
    Case(
        "C2",
        "an event between two open sessions makes them one",
        [minutes(0), minutes(8), minutes(4.5), Reach(3600)],
        session(),
        spans((0, 13, 3)),
        delay=600,
    ),
    Case(
        "C3",
        "a bridge retracts both sessions that were emitted",
        BRIDGE,
        session("retract", **LATE),
        {
            "out": Answer(
                "_diff total key",
                [
                    (1, 1, "a"),
                    (1, 20, "a"),
                    (-1, 1, "a"),
                    (-1, 20, "a"),
                    (1, 321, "a"),
                    (1, 1, "z"),
                ],
                "changelog",
            )
        },
        **BRIDGED,
    ),
    Case(
        "C3",
        "accumulating a bridge gives the whole and retracts what it merged away",
        BRIDGE[:2] + BRIDGE[3:4] + BRIDGE[4:],
        session("update", early="each", late="each"),
        {"out": Answer("_diff total", [(1, 1), (1, 20), (-1, 20), (1, 321)], "changelog")},
        delay=3600,
    ),
    Case(
        "C3",
        "discarding a bridge gives what came with it",
        BRIDGE,
        session("discard", **LATE),
        {"out": Answer("total key", [(1, "a"), (20, "a"), (300, "a"), (1, "z")], "changelog")},
        **BRIDGED,
    ),
    Case(
        "C4",
        "an event for a closed session makes one that overlaps it",
        [minutes(0), minutes(5), Reach(720), minutes(9), Reach(3600)],
        session(),
        spans(
            (0, 10, 2, False),
            (9, 14, 1, True),
            columns="window_start window_end total overlaps_closed",
        ),
    ),
    Case(
        "C4",
        "a strict session takes such an event for late",
        [minutes(0), minutes(5), Reach(720), minutes(9), Reach(3600)],
        session(strict=True),
        spans((0, 10, 2)),
        late=1,
    ),
    Case(
        "C5",
        "raw sessions are retracted with every event",
        KAFKA,
        session("retract", early="each", late="each"),
        {
            "out": Answer(
                "_diff total key",
                [
                    *((1, 1, "a"), (-1, 1, "a"), (1, 2, "a"), (-1, 2, "a"), (1, 3, "a")),
                    *((1, 1, "b"), (1, 1, "a")),
                ],
                "changelog",
            )
        },
        late=1,
    ),
    Case(
        "C5",
        "final sessions come once",
        [*KAFKA, Reach(3600)],
        session(),
        spans((0, 10, 3), (11, 16, 1), (30, 35, 1)),
        late=1,
    ),
    Case(
        "C6",
        "every event may have its own gap and their order does not matter",
        [*every_order([(0, 3600), (1, 60), (50, 60), (62, 60)], 6), Reach(36000)],
        session(gap=pl.duration(seconds="gap_s"), max_gap="1 hour"),
        spans(*[(0, 60, 3)] * 6, *[(62, 63, 1)] * 6),
        delay=6000,
    ),
]
