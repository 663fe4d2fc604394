"""The demo's results computed independently: one batch over the raw log, in plain Python and polars.

It reads the records as they lie in the log, with all their copies, gaps and wrong clocks, and shares no
code with the pipeline; it knows no windows, batches or state. If the pipeline lost, doubled or misplaced
a single event, or decided once otherwise, what it keeps would differ from this.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import polars as pl

from millstream.client import EventLog
from millstream.demo.ads_events import Client
from millstream.demo.ads_input import StopRule

_TOPIC = "ad-events"
_DISORDER_US = 60 * 1_000_000
_LATENESS_US = 3600 * 1_000_000
_SAME_WITHIN_US = 1800 * 1_000_000
_MILLIONTH = Decimal("0.000001")
_ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)
_FIELDS = {
    "event_id": pl.String(),
    "kind": pl.String(),
    "occurred_at": pl.String(),
    "sent_at": pl.String(),
    "received_at": pl.String(),
    "client": pl.String(),
    "ad": pl.Int64(),
    "cost_micros": pl.Int64(),
}


@dataclass(frozen=True)
class ExpectedResults:
    """What the views and topics must hold, by name."""

    views: Mapping[str, pl.DataFrame]
    topics: Mapping[str, pl.DataFrame]


def expected_results(
    log: EventLog, clients: Mapping[str, Client], stop: StopRule, *, live: bool = False
) -> ExpectedResults:
    """Compute everything from the records of the log; of the ``live`` part the alarms, too."""
    records = pl.concat(_records(log, number) for number in range(log.topics()[_TOPIC].partitions))
    judged = _with_lateness(records)
    late = judged.filter("late")
    once = _deduplicated(judged.filter(~pl.col("late")))
    days, decisions, events = _budgets(once, clients)
    stops = _stopped_ads(once, stop)
    return ExpectedResults(
        views={
            "ad_ctr": _rates(once, "1m").sort("window_start", "ad"),
            "spend_by_day": days,
            "stopped_ads": stops,
            "late_events": _late(late),
            **({"click_alarms": _click_alarms(once)} if live else {}),
        },
        topics={"decisions": decisions, "budget-events": events, "ad-stops": stops},
    )


def _records(log: EventLog, partition: int) -> pl.DataFrame:
    """Read a partition: what is JSON, in the order of the log."""
    values = pl.DataFrame(log.read(_TOPIC, partition))["value"]
    schema = {**_FIELDS, "partition": pl.Int64(), "offset": pl.Int64()}
    tables = [pl.DataFrame(schema=schema)]
    for start in range(0, len(values), 100_000):  # as Python's objects, ten times as large
        rows = [
            {**event, "partition": partition, "offset": start + place}
            for place, event in _readable(values[start : start + 100_000])
        ]
        tables.append(pl.DataFrame(rows, schema=schema))
    return pl.concat(tables)


def _readable(values: pl.Series) -> Iterator[tuple[int, dict[str, object]]]:
    for place, value in enumerate(values):
        try:
            yield place, json.loads(value)
        except ValueError:  # it was cut short
            continue


def _with_lateness(records: pl.DataFrame) -> pl.DataFrame:
    """Find out when each event occurred, and which came too late; leave the heartbeats out."""
    made, left, came = (
        pl.col(name).str.to_datetime("%Y-%m-%dT%H:%M:%S%.6fZ", time_unit="us").to_physical()
        for name in ("occurred_at", "sent_at", "received_at")
    )
    waited = pl.when(left > made).then(left - made).otherwise(0)
    timed = records.with_columns(at=came - waited, occurred_us=made).sort("partition", "offset")
    before = pl.col("at").cum_max().shift(1).over("partition") - _DISORDER_US
    late_by = (before - _LATENESS_US - pl.col("at")).fill_null(0)
    return timed.with_columns(late_by=late_by, late=late_by > 0).filter(
        pl.col("kind") != "heartbeat"
    )


def _late(late: pl.DataFrame) -> pl.DataFrame:
    last = late.unique("event_id", keep="last", maintain_order=True)
    return last.select(
        "event_id",
        "kind",
        "client",
        "ad",
        pl.from_epoch("occurred_us", time_unit="us")
        .dt.replace_time_zone("UTC")
        .alias("occurred_at"),
        pl.col("late_by").cast(pl.Duration("us")),
    ).sort("event_id")


def _deduplicated(events: pl.DataFrame) -> pl.DataFrame:
    """Leave out what repeats one that is kept, and occurred within half an hour of it."""
    repeated = events.filter(pl.col("event_id").is_duplicated())
    kept: dict[str, list[int]] = defaultdict(list)
    left_out = []
    for event_id, at, partition, offset in repeated.select(
        "event_id", "at", "partition", "offset"
    ).iter_rows():
        if any(abs(at - other) <= _SAME_WITHIN_US for other in kept[event_id]):
            left_out.append((partition, offset))
        else:
            kept[event_id].append(at)
    schema = {"partition": pl.Int64, "offset": pl.Int64}
    copies = pl.DataFrame(left_out, schema=schema, orient="row")
    return events.join(copies, on=["partition", "offset"], how="anti", maintain_order="left")


def _rates(once: pl.DataFrame, size: str) -> pl.DataFrame:
    kind = pl.col("kind")
    start = pl.from_epoch("at", time_unit="us").dt.replace_time_zone("UTC").dt.truncate(size)
    counts = once.group_by(start.alias("window_start"), "ad").agg(
        shown=(kind == "impression").sum().cast(pl.Int64),
        clicked=(kind == "click").sum().cast(pl.Int64),
        cost=pl.col("cost_micros").sum() * pl.lit(_MILLIONTH),
    )
    return counts.select(
        "window_start",
        pl.col("window_start").dt.offset_by(size).alias("window_end"),
        "ad",
        "shown",
        "clicked",
        "cost",
        rate=(pl.col("clicked") + 1.0) / (pl.col("shown") + 200),
    )


def _click_alarms(once: pl.DataFrame) -> pl.DataFrame:
    """Find the minutes in which more than a quarter of a client's impressions were clicked, ten at least."""
    found = []
    counts: dict[tuple[datetime, str], list[int]] = defaultdict(lambda: [0, 0])
    for at, client, kind in once.select("at", "client", "kind").iter_rows():
        minute = _ORIGIN + timedelta(minutes=at // 60_000_000)
        counts[minute, client][0] += kind == "impression"
        counts[minute, client][1] += kind == "click"
    for (minute, client), (shown, clicked) in counts.items():
        if clicked >= 10 and shown < 4 * clicked:
            found.append((minute, minute + timedelta(minutes=1), client, shown, clicked))
    schema = {
        "window_start": pl.Datetime("us", "UTC"),
        "window_end": pl.Datetime("us", "UTC"),
        "client": pl.String(),
        "shown": pl.Int64(),
        "clicked": pl.Int64(),
    }
    return pl.DataFrame(found, schema=schema, orient="row").sort("window_start", "client")


def _stopped_ads(once: pl.DataFrame, stop: StopRule) -> pl.DataFrame:
    """Find the first time that an ad was below the floor in enough windows in a row."""
    size = {"12 hours": "12h", "10 minutes": "10m", "1 minute": "1m"}[stop.window]
    enough = _rates(once, size).filter(pl.col("shown") >= stop.shown_min).sort("window_start")
    found = []
    for (ad,), windows in enough.partition_by("ad", as_dict=True).items():
        for last in range(stop.windows, windows.height + 1):
            row = windows[last - stop.windows : last]
            if row["rate"].max() < stop.floor:  # type: ignore[operator]
                stopped = (row["window_end"][-1], row["rate"].max())
                found.append((ad, *stopped, row["shown"].sum(), row["clicked"].sum()))
                break
    schema = {
        "ad": pl.Int64(),
        "stopped_at": pl.Datetime("us", "UTC"),
        "rate_max": pl.Float64(),
        "shown": pl.Int64(),
        "clicked": pl.Int64(),
    }
    return pl.DataFrame(found, schema=schema, orient="row").sort("ad")


_UNKNOWN = Client("UTC", 0, 0, 0)  # a client that nobody has told of: it has nothing to spend


@dataclass
class _Account:
    """What a client has spent on the days of its zone, and where it stands."""

    about: Client
    spent: dict[str, int]
    newest: str = ""
    out: bool = False

    def charge(self, at_us: int, cost: int) -> tuple[str, bool, str | None]:
        """Decide on a cost; return its day, whether it is granted, and a change of standing."""
        instant = _ORIGIN + timedelta(microseconds=at_us)
        day = instant.astimezone(ZoneInfo(self.about.zone)).date().isoformat()
        total = self.spent.get(day, 0)
        granted = cost <= 0 or total + cost <= self.about.budget_micros
        total += cost if granted else 0
        self.spent[day] = total
        if day < self.newest:
            return day, granted, None
        out = self.about.budget_micros - total < max(self.about.click_micros, 1)
        event = None if out == self.out else "exhausted" if out else "resumed"
        self.newest, self.out = day, out
        return day, granted, event


def _budgets(
    once: pl.DataFrame, clients: Mapping[str, Client]
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Decide on every event in the order of the log; return days, decisions and budget events."""
    accounts = {name: _Account(about, {}) for name, about in clients.items()}
    decisions, budget_events = [], []
    columns = ("client", "at", "cost_micros", "event_id", "kind", "ad")
    for client, at, cost, event_id, kind, ad in once.select(columns).iter_rows():
        account = accounts.setdefault(client, _Account(_UNKNOWN, {}))
        day, granted, event = account.charge(at, cost)
        if kind == "impression":
            decisions.append((event_id, client, ad, "served" if granted else "refused"))
        if event:
            budget_events.append((client, day, event, event_id))
    days = [
        (name, datetime.fromisoformat(day).date(), spent, account.about.budget_micros)
        for name, account in accounts.items()
        for day, spent in account.spent.items()
    ]
    names = ["client", "budget_day", "spent", "budget"]
    table = pl.DataFrame(days, schema=names, orient="row").with_columns(
        pl.col("spent", "budget") * pl.lit(_MILLIONTH)
    )
    return (
        table.sort("client", "budget_day"),
        pl.DataFrame(decisions, schema=["event_id", "client", "ad", "decision"], orient="row"),
        pl.DataFrame(
            budget_events,
            schema=dict.fromkeys(["client", "budget_day", "budget_event", "event_id"], pl.String),
            orient="row",
        ),
    )


def difference(found: pl.DataFrame, expected: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that only one of the two has, and how often; none if they are equal.

    Column ``only``: "found" or "expected".
    """
    names = expected.columns
    both = pl.concat(
        [
            found.select(names).with_columns(by=pl.lit(1)),
            expected.with_columns(by=pl.lit(-1)),
        ]
    )
    sums = both.group_by(names).agg(times=pl.col("by").sum()).filter(pl.col("times") != 0)
    only = pl.when(pl.col("times") > 0).then(pl.lit("found")).otherwise(pl.lit("expected"))
    return sums.with_columns(only.alias("only"), pl.col("times").abs()).sort(names)
