"""What depends on the order of the log depends on nothing else: not on batches, nor on who sent what.

The models go through the records of each partition one by one, in the order of their offsets; ids
and keys keep to a partition. Nothing is late: the delays are longer than all that is drawn.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.frames import ORDER, SPLIT
from millstream.kernels.ingest import Ingest, SplitInput
from millstream.kernels.time.log_order import (
    OFFSETS_MAX,
    PARTITIONS_MAX,
    SOURCES_MAX,
    in_log_order,
    log_order_of,
    offset_in,
    partition_in,
    split_number,
)
from millstream.kernels.time.watermarks import SourceTime

START = datetime(2026, 1, 1, tzinfo=UTC)
WITHIN = timedelta(minutes=3)
LIMIT = 10


@dataclass
class Spend:
    n: int
    at: datetime
    id: str
    device: str
    cost: int
    bye: bool = False


def stream_of(app, topic="spends", *, key="id"):
    told_apart = ms.watermark("2 days", idle=None, per="device", ends=pl.col("bye"))
    return app.topic(topic, Spend, key=key).stream(time="at", watermark=told_apart)


def kept_of(rows):
    """Keep what no kept row before it repeats: the same id, at most WITHIN away."""
    kept = defaultdict(list)
    for row in rows:
        if all(abs(row.at - other.at) > WITHIN for other in kept[row.id]):
            kept[row.id].append(row)
    return sorted(row.n for rows in kept.values() for row in rows)


def granted_of(rows):
    """Grant what stays within the day's limit, one after the other."""
    spent, granted = Counter(), []
    for row in rows:
        account = row.id, row.at.date()
        if spent[account] + row.cost <= LIMIT:
            spent[account] += row.cost
            granted.append(row.n)
    return granted


def threes_of(rows):
    """Add up every three rows of an id."""
    by_id = defaultdict(list)
    for row in rows:
        by_id[row.id].append(row.n)
    return sorted(
        (name, at // 3, sum(numbers[at : at + 3]))
        for name, numbers in by_id.items()
        for at in range(0, len(numbers) - 2, 3)
    )


drawn = st.lists(
    st.builds(
        Spend,
        n=st.just(0),
        at=st.integers(-8, 8).map(lambda minutes: START + timedelta(minutes=minutes)),
        id=st.sampled_from("aab"),
        device=st.sampled_from(["p", "q", "r"]),
        cost=st.integers(1, 7),
        bye=st.sampled_from([False, False, True]),
    ),
    min_size=2,
    max_size=30,
)


@settings(deadline=None, max_examples=some(40))
@given(
    rows=drawn,
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 5),
    crash=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_with_producers_told_apart_the_log_alone_decides(rows, partitions, batches, crash, seed):
    for number, row in enumerate(rows):
        row.n = number
    app = ms.App("spends", log="unused")
    spends = stream_of(app)
    spends.dedup("id", within=WITHIN).view("kept", key="n")
    spends.budget("id", cost="cost", limit=pl.lit(LIMIT)).view("decided", key="n")
    spends.window(ms.count_window(3, unbounded=True), by="id").agg(sum=ms.sum("n")).view("threes")
    spends.view("latest", key="id")
    out = testing.run(
        app, {"spends": rows}, partitions=partitions, batches=batches, crash=crash, seed=seed
    )
    decided = out["decided"]
    assert out["kept"]["n"].sort().to_list() == kept_of(rows)
    assert sorted(decided.filter(decision="granted")["n"]) == granted_of(rows)
    assert sorted(out["threes"].select("id", "window_number", "sum").rows()) == threes_of(rows)
    assert dict(out["latest"].select("id", "n").rows()) == {row.id: row.n for row in rows}


def test_of_rows_made_of_one_record_the_first_is_kept():
    @dataclass
    class Basket:
        at: datetime
        items: list[str]

    baskets = [Basket(START, [f"{n % 7}-{i}" for i in range(40)]) for n in range(21)]
    for seed in range(3):
        app = ms.App("baskets", log="unused")
        topic = app.topic("baskets", Basket, partitions=3)
        items = topic.stream(time="at", watermark=ms.watermark("1 day", idle=None)).explode("items")
        parts = items.with_columns(
            order=pl.col("items").str.split("-").list.get(0),
            part=pl.col("items").str.split("-").list.get(1).cast(pl.Int64),
        )
        parts.dedup("order", within="1 hour").view("firsts", key="order")
        out = testing.run(app, {"baskets": baskets}, batches=2, seed=seed)
        assert set(out["firsts"]["part"]) == {0}


def test_rows_of_two_topics_that_share_time_and_offset_have_one_first():
    found = set()
    for seed in range(8):
        app = ms.App("two", log="unused")
        both = stream_of(app, "these", key=None).union(stream_of(app, "those", key=None))
        windows = both.window(ms.tumbling("1 hour")).emit("update")
        windows.agg(first=ms.first("n"), last=ms.last("n"), all=ms.list("n")).view("picked")
        rows = {
            "these": [Spend(n, START, "a", "p", 1) for n in (1, 2)],
            "those": [Spend(n, START, "a", "p", 1) for n in (3, 4)],
        }
        out = testing.run(app, rows, partitions=1, batches=1 + seed % 3, seed=seed)
        found.add(str(out["picked"].select("first", "last", "all").rows()))
    assert found == {"[(1, 4, '[1,2,3,4]')]"}


def test_rows_that_only_know_their_lane_are_sorted_by_split_and_stay_in_their_order():
    lanes = [
        split_number(0, 1, 1, 2),
        split_number(0, 1, 0, 5),
        split_number(0, 1, 0, 0),
        split_number(0, 0, 9, 0),
    ]
    rows = pl.DataFrame({"n": range(4), SPLIT: lanes})
    assert in_log_order(rows)["n"].to_list() == [3, 1, 2, 0]
    placed = rows.with_columns(pl.Series(ORDER, [log_order_of(0, 1, n) for n in (3, 2, 2, 1)]))
    assert in_log_order(placed)["n"].to_list() == [3, 1, 2, 0]
    assert in_log_order(rows.drop(SPLIT))["n"].to_list() == [0, 1, 2, 3]


def test_of_one_record_by_two_streams_of_its_topic_the_row_of_the_first_goes_first():
    lanes = [
        split_number(1, 0, 0),
        split_number(1, 0, 0),
        split_number(0, 0, 1),
        split_number(0, 0, 0),
    ]
    orders = [log_order_of(0, 0, n) for n in (3, 4, 4, 3)]
    rows = pl.DataFrame({"n": range(4), SPLIT: lanes, ORDER: orders})
    assert in_log_order(rows)["n"].to_list() == [3, 0, 2, 1]


def test_rows_without_a_place_come_last_and_leave_the_places_of_others_exact():
    places = [log_order_of(SOURCES_MAX - 1, 7, n) for n in (3, 2, 1)]
    rows = pl.DataFrame({"n": range(4), ORDER: [*places[:2], None, places[2]]})
    assert in_log_order(rows)["n"].to_list() == [3, 1, 0, 2]


@pytest.mark.parametrize("batches", [1, 3, 6])
def test_two_streams_of_one_topic_put_together_are_in_the_order_of_the_topic(batches):
    app = ms.App("halves", log="unused")
    topic = app.topic("spends", Spend, partitions=1)
    small, large = (
        topic.stream(time="at", watermark=ms.watermark("0 seconds", idle=None)).filter(chosen)
        for chosen in (pl.col("n") < 10, pl.col("n") >= 10)
    )
    both = small.union(large)
    both.view("latest", key="id")
    both.window(ms.count_window(2, unbounded=True), by="id").agg(all=ms.list("n")).view("pairs")
    spends = [Spend(n, START, "a", "p", 1) for n in (1, 20, 2, 30, 3, 4)]
    out = testing.run(app, {"spends": spends}, batches=batches, seed=batches)
    assert out["latest"]["n"].to_list() == [4]
    assert sorted(out["pairs"]["all"]) == ["[1,20]", "[2,30]", "[3,4]"]


def totals_and_rows():
    """Put rows of a topic together with such as come from behind a window of it."""
    app = ms.App("mixed", log="unused")
    rows = stream_of(app)
    totals = rows.window(ms.tumbling("1 minute"), by="id").agg(n=ms.sum("n")).select("id", "n")
    return app, rows.select("id", "n").union(totals)


@pytest.mark.parametrize(
    "verb",
    [
        lambda both: both.dedup("id", within="1 hour"),
        lambda both: both.window(ms.count_window(3, unbounded=True), by="id").agg(n=ms.count()),
        lambda both: both.window(ms.session("1 minute"), by="id").agg(n=ms.first("n")),
        lambda both: (
            both.window(ms.tumbling("1 hour"), by="id")
            .emit("update", early=ms.after_count(2))
            .agg(n=ms.count())
        ),
    ],
)
def test_rows_with_a_place_beside_such_without_are_refused_where_their_order_counts(verb):
    with pytest.raises(ConfigError, match=r"no place in it.*which of them go first is arbitrary"):
        verb(totals_and_rows()[1])


@pytest.mark.parametrize("window", [ms.tumbling("1 day"), ms.session("1 hour")])
def test_where_their_order_does_not_count_they_are_taken_together(window):
    app, both = totals_and_rows()
    both.window(window, by="id").agg(n=ms.sum("n"), rows=ms.count()).view("out")
    rows = [Spend(n, START + timedelta(seconds=20 * n), "a", "p", 1) for n in range(6)]
    end = testing.Watermark("spends", at=START + timedelta(days=3))
    for seed in range(3):
        out = testing.run(app, {"spends": [*rows, end]}, batches=1 + seed, seed=seed)
        assert out["out"].select("n", "rows").rows() == [(30, 8)]


def test_more_streams_than_a_place_can_tell_apart_are_refused():
    app = ms.App("many", log="unused")
    for number in range(SOURCES_MAX + 1):
        stream_of(app, f"t{number}").view(f"v{number}", key="n")
    with pytest.raises(ConfigError, match=f"reads more than {SOURCES_MAX} streams, with 't128'"):
        app.plan()


def read_at(partition, offset):
    """Take in two records, of which the second is at ``offset``."""
    app = ms.App("far", log="unused")
    stream_of(app).view("out", key="n")
    plan = app.plan()
    value = b'{"n":1,"at":"2026-01-01T00:00:00Z","id":"a","device":"p","cost":1}'
    batch = pa.record_batch(
        {
            "offset": pa.array([offset - 1, offset], pa.int64()),
            "timestamp": pa.array([0, 0], pa.timestamp("ms", "UTC")),
            "value": pa.array([value] * 2, pa.binary()),
        }
    )
    lane = SplitInput(partition, 0, offset - 1, offset + 1, [batch])
    (source,) = plan.sources
    return list(Ingest(source, plan.buckets).run([lane], SourceTime((), 1, frozenset())))


def test_the_last_offset_and_partition_that_have_a_place_are_found_in_it():
    place = pl.Series(
        [log_order_of(SOURCES_MAX - 1, PARTITIONS_MAX - 1, OFFSETS_MAX - 1)]
    ).to_numpy()
    assert (partition_in(place)[0], offset_in(place)[0]) == (PARTITIONS_MAX - 1, OFFSETS_MAX - 1)
    assert read_at(PARTITIONS_MAX - 1, OFFSETS_MAX - 1)


@pytest.mark.parametrize(("partition", "offset"), [(0, OFFSETS_MAX), (PARTITIONS_MAX, 5)])
def test_a_record_whose_place_would_be_that_of_another_is_refused(partition, offset):
    with pytest.raises(ConfigError, match=r"offsets below 1,099,511,627,776 of up to 65,536"):
        read_at(partition, offset)
