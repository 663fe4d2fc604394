"""Case F4: of every window, what came in is what was counted and what was too late, and nothing else."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing

ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str


draws = st.lists(st.tuples(st.integers(-30, 90), st.sampled_from("abcdefg")), max_size=50)


@settings(deadline=None, max_examples=some(60))
@given(
    drawn=draws,
    mode=st.sampled_from(["final", "update", "retract"]),
    lateness=st.sampled_from([0, 4]),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_of_every_window_what_came_in_was_counted_or_was_too_late(
    drawn, mode, lateness, partitions, batches, seed
):
    app = ms.App("conserved", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness=timedelta(seconds=lateness),
        late="side",
    )
    fixed = stream.window(ms.tumbling("10 seconds"), name="fixed").emit(mode).agg(n=ms.count())
    fixed.view("counted")
    fixed.late.view("aside", key="at")
    hops = stream.window(ms.hopping("10 seconds", "5 seconds"), name="hops").emit(mode)
    hops.agg(n=ms.count()).view("hops")
    # All partitions move on in the end, so that final windows come out, too.
    rows = [
        Event(ORIGIN + timedelta(seconds=s, microseconds=i), k) for i, (s, k) in enumerate(drawn)
    ]
    end = ORIGIN + timedelta(days=1)
    marks = [testing.Watermark("events", at=end)]
    out = testing.run(
        app, {"events": [*rows, *marks]}, batches=batches, partitions=partitions, seed=seed
    )
    arrived = Counter((row.at - ORIGIN) // timedelta(seconds=10) * 10 for row in rows)
    counted = Counter(seconds_of(out["counted"]))
    aside = Counter(out["aside"]["window_start"]) if out["aside"].width else Counter()
    aside = {(at - ORIGIN) // timedelta(seconds=1): n for at, n in aside.items()}
    assert counted + Counter(aside) == arrived
    missed = out.ledger.filter(pl.col("step") == "hops")["windows_missed"].sum()
    assert sum(seconds_of(out["hops"]).values()) + missed == 2 * len(rows)


def seconds_of(table):
    starts = ((table["window_start"] - ORIGIN).dt.total_seconds()).to_list()
    return dict(zip(starts, table["n"].to_list(), strict=True))
