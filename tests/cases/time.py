"""Cases D: watermarks. D1 is a case of deduplication; those in which time passes are in `quiet.py`."""

from datetime import UTC, datetime

from cases.case import Answer, Case, Event, when

import millstream as ms
from millstream import testing


def counted(stream, name):
    return {"out": stream.window(ms.tumbling("10 seconds"), by="key", name=name).agg(n=ms.count())}


def sent(seconds, partition, wm=None):
    said = None if wm is None else when(wm)
    return testing.Row(Event(when(seconds), wm=said), partition=partition)


def arriving(at):
    return testing.Row(Event(at), at=when(120))


def starts(*rows):
    return {"out": Answer("window_start n", rows, "changelog")}


CASES = [
    Case(
        "D4",
        "with punctuation alone nothing else moves the watermark",
        [sent(90, 0), sent(50, 0, wm=60), sent(55, 0), sent(70, 1), sent(70, 1, wm=80)],
        counted,
        starts((50, 1)),  # 50 came before the promise, 55 after it; the others are not yet final
        delay=None,
        late=1,
        partitions_min=2,
    ),
    Case(
        "D6",
        "a time from the future moves nothing and is dead",
        [
            *(arriving(at) for at in (when(0), datetime(2099, 1, 1, tzinfo=UTC), when(60))),
            *(arriving(when(at)) for at in (65, 40, 75)),
        ],
        counted,
        starts((0, 1), (60, 2)),  # all that followed would be late, if the 2099 counted
        dead=1,
        late=1,  # 40 came when 65 had been reached
        rule={"future_max": "5 minutes"},
        ahead=400,
    ),
]
