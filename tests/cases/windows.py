"""Cases A and B: which windows an event is in."""

from cases.case import Answer, Case, Reach, event, utc

import millstream as ms

YEAR = 365 * 86400


def counted(window):
    return lambda stream, name: {
        "out": stream.window(window, name=name).emit("update").agg(n=ms.count())
    }


def spans(*rows):
    return {"out": Answer("window_start window_end n", rows)}


def assigned(case_id, says, window, times, *expected):
    rows = [event(at) for at in times]
    return Case(case_id, says, rows, counted(window), spans(*expected), delay=YEAR, spread=True)


def summed(stream, window, name, *emit, **options):
    return stream.window(window, by="key", name=name).emit(*emit, **options).agg(total=ms.sum("n"))


def sums(*rows, columns="window_end total", kind="changelog"):
    return {"out": Answer(columns, rows, kind, key=("window_end", "key"))}


def sliding(seconds, *emit, **options):
    window = ms.sliding(f"{seconds} seconds")
    return lambda stream, name: {"out": summed(stream, window, name, *emit, **options)}


def five_kinds(stream, name):
    windows = {
        "tumbling": ms.tumbling("5 seconds"),
        "hopping": ms.hopping("10 seconds", "5 seconds"),
        "cumulating": ms.cumulating("15 seconds", "5 seconds"),
        "east": ms.tumbling("1 day", offset="8 hours"),
        "west": ms.tumbling("1 day", offset="-8 hours"),
    }
    return {
        kind: stream.window(window, by="key", name=f"{name}/{kind}").agg(n=ms.count())
        for kind, window in windows.items()
    }


def starts(*rows):
    return Answer("window_start n", rows, "changelog")


NEW_YORK = "America/New_York"
SPRING = ["2026-03-07T05:00", "2026-03-08T05:00", "2026-03-09T04:00", "2026-03-10T04:00"]
A = [
    assigned(
        "A1",
        "tumbling windows take their start and not their end",
        ms.tumbling("10 seconds"),
        [0, 9.999, 10],
        (0, 10, 2),
        (10, 20, 1),
    ),
    assigned("A2", "a second before 1970", ms.tumbling("10 minutes"), [-1], (-600, 0, 1)),
    assigned(
        "A3",
        "a hop need not divide the size",
        ms.hopping("10 minutes", "4 minutes"),
        [300],
        (-240, 360, 1),
        (0, 600, 1),
        (240, 840, 1),
    ),
    assigned(
        "A4",
        "the day on which clocks go forward has 23 hours",
        ms.calendar("1 day", tz=NEW_YORK),
        [*map(utc, ("2026-03-08T04:59:59", SPRING[1], "2026-03-09T03:59:59", SPRING[2]))],
        *zip(map(utc, SPRING[:3]), map(utc, SPRING[1:]), (1, 2, 1), strict=True),
    ),
    assigned(
        "A5",
        "the day on which clocks go back has 25 hours",
        ms.calendar("1 day", tz=NEW_YORK),
        [*map(utc, ("2026-11-01T04:00", "2026-11-02T04:59:59"))],
        (utc("2026-11-01T04:00"), utc("2026-11-02T05:00"), 2),
    ),
    assigned(
        "A6",
        "an hour that clocks show twice is two windows",
        ms.calendar("1 hour", tz=NEW_YORK),
        [*map(utc, ("2026-11-01T05:30", "2026-11-01T06:30"))],
        (utc("2026-11-01T05:00"), utc("2026-11-01T06:00"), 1),
        (utc("2026-11-01T06:00"), utc("2026-11-01T07:00"), 1),
    ),
    Case(
        "A7",
        "a late row misses a short window and is in a long one",
        [*(event(at) for at in (1, 2, 3, 4, 7, 6, 8, 4, 16, 32, 34)), Reach(200_000)],
        five_kinds,
        {
            "tumbling": starts((0, 4), (5, 3), (15, 1), (30, 2)),
            "hopping": starts((-5, 4), (0, 8), (5, 3), (10, 1), (15, 1), (25, 2), (30, 2)),
            "cumulating": Answer(
                "window_start window_end n",
                (
                    *((0, 5, 4), (0, 10, 8), (0, 15, 8)),
                    *((15, 20, 1), (15, 25, 1), (15, 30, 1)),
                    *((30, 35, 2), (30, 40, 2), (30, 45, 2)),
                ),
                "story",
            ),
            "east": starts((-57600, 11)),
            "west": starts((-28800, 11)),
        },
        delay=1,
        late=1,
    ),
]

ROWS = [(10, 1), (10, 2), (14, 3), (15, 4), (20, 5), (22, 6), (30, 7)]
B = [
    Case(
        "B1",
        "an event sees its peers and all that is not older than the size",
        [*(event(*row) for row in ROWS), Reach(31)],
        sliding(10),
        sums((10, 3), (10, 3), (14, 6), (15, 10), (20, 15), (22, 18), (30, 18)),
    ),
    Case(
        "B2",
        "a late event corrects the rows that count it and no others",
        [*(event(*row) for row in ROWS), event(12, 100)],
        sliding(10, "retract"),
        sums(
            *((10, 3), (10, 3), (12, 103), (14, 106), (15, 110), (20, 115), (22, 118), (30, 18)),
            kind="net",
        ),
        lateness=30,
    ),
    Case(
        "B2",
        "a final row is corrected where late events are let in",
        [*(event(*row) for row in ROWS), event(12, 100), Reach(31)],
        sliding(10, "final"),
        sums(
            *((10, 3), (12, 103), (14, 106), (15, 110), (20, 115), (22, 118), (30, 18)),
            kind="view",
        ),
        lateness=30,
        policy="correct",
    ),
    Case(  # the times of Kafka's test of final sliding windows: difference 5, grace 15
        "B3",
        "an event that is too late for some rows counts in the others",
        [*(event(at) for at in (10, 11, 10, 13, 10, 24, 5, 7)), Reach(90)],
        sliding(5),
        sums((10, 5), (11, 5), (13, 5), (24, 1), kind="view"),
        lateness=15,
    ),
    Case(
        "B4",
        "an event leaves when it is older than the size and not before",
        [event(10, 1), event(20, 2), event(20.001, 4), Reach(21)],
        sliding(10),
        sums((10, 1), (20, 3), (20.001, 6)),
    ),
]
CASES = [*A, *B]
