"""Sessions against naive models: any disorder, gap, lateness, batching and spread over partitions."""

import random
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.kernels.frames import DIFF
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)  # negative times are met, too
FAR = 10**6
FIXTURES = [HealthCheck.function_scoped_fixture]


@dataclass
class Event:
    at: datetime
    key: str
    n: int = 1
    gap_s: int = 0


def at(seconds):
    return START + timedelta(seconds=seconds)


def app_with(window, mode="final", *, delay=0, lateness=0, policy="drop", keyed=True, **emit):
    app = ms.App("sessions", log="unused")
    stream = app.topic("events", Event, key="key" if keyed else None).stream(
        time="at",
        watermark=ms.watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
        late=policy,
    )
    windowed = stream.window(window, by="key").emit(mode, **emit)
    out = windowed.agg(rows=ms.count(), total=ms.sum("n"))
    out.view("out", key=["window_start", "window_end", "key"])
    return app, out


@dataclass
class Emitted:
    """What reached the view: (diff, start, end, key, values); and the books of the sessions."""

    rows: list
    late: int
    held: int


def emitted(rows_given, app, rows, **options):
    run = rows_given(app, {"events": rows}, **options)
    books = next((line for step, line in run.books.items() if step.startswith("session")), {})
    said = [named(row) for row in run.rows["out"].to_dicts()]
    near = [row for row in said if row[1] < FAR]
    return Emitted(near, books.get("late", 0), books.get("held", 0))


def named(row):
    seconds = [(row[name] - START).total_seconds() for name in ("window_start", "window_end")]
    return (row.get(DIFF, 1), *seconds, row["key"], row["rows"], row["total"])


def flushed(rows, partitions):
    """Add events that move every partition's watermark beyond everything."""
    keys = {}
    for number in range(1000):
        keys.setdefault(partition_of(str(number).encode(), partitions), str(number))
    assert len(keys) == partitions
    return [*rows, *(Event(at(FAR), key) for key in keys.values())]


# ── the models ──────────────────────────────────────────────────────────────────────────────────


def reached(rows, partition_of_row, delay):
    """Give each event what its partition had reached before it, and the watermark at the end."""
    seen = defaultdict(lambda: -(10**9))
    before = []
    for number, row in enumerate(rows):
        partition = partition_of_row(number, row)
        before.append(seen[partition] - delay)
        seen[partition] = max(seen[partition], (row.at - START).total_seconds())
    return before, seen


def one_by_one(rows, before, gap_of, lateness, *, inclusive=True):
    """Take events one by one, in the order of arrival, each into the sessions that it can join."""
    sessions, late = defaultdict(list), []
    for row, r in zip(rows, before, strict=True):
        ts = (row.at - START).total_seconds()
        end = ts + gap_of(row)
        known = sessions[row.key]
        back = max(ts, r - lateness)
        touches = (lambda a, b: a <= b) if inclusive else (lambda a, b: a < b)
        if touches(r, end + lateness):
            joins = [s for s in known if touches(s["from"], end) and touches(back, s["end"])]
        else:
            joins = [
                s for s in known if touches(s["from"], end) and touches(r, s["end"] + lateness)
            ]
            if not joins:
                late.append(row)
                continue
            back = joins[0]["from"]
        merged = {
            "from": min([back, *(s["from"] for s in joins)]),
            "start": min([ts, *(s["start"] for s in joins)]),
            "end": max([end, *(s["end"] for s in joins)]),
            "rows": 1 + sum(s["rows"] for s in joins),
            "total": row.n + sum(s["total"] for s in joins),
        }
        sessions[row.key] = [s for s in known if s not in joins] + [merged]
    return sessions, late


def answers(sessions, watermark, lateness, *, inclusive=True):
    over = (lambda end: end < watermark) if inclusive else (lambda end: end <= watermark)
    return sorted(
        (s["start"], s["end"], key, s["rows"], s["total"])
        for key, found in sessions.items()
        for s in found
        if over(s["end"] + lateness) and s["start"] < FAR
    )


draws = st.lists(
    st.tuples(st.integers(-30, 90), st.sampled_from("abc"), st.integers(-5, 5), st.integers(1, 30)),
    max_size=40,
)


def events(drawn):
    return [Event(at(t), key, n, gap) for t, key, n, gap in drawn]


GAP = ms.session("10 seconds")
DYNAMIC = ms.session(pl.duration(seconds="gap_s"), max_gap="1 hour")
OPEN_ENDED = ms.session("10 seconds", gap_inclusive=False)


@pytest.mark.parametrize("window", [GAP, DYNAMIC, OPEN_ENDED], ids=["static", "dynamic", "exact"])
@settings(deadline=None, max_examples=some(25), suppress_health_check=FIXTURES)
@given(
    drawn=draws,
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
    delay=st.sampled_from([0, 7, 30]),
    lateness=st.sampled_from([0, 5, 200]),
)
def test_final_sessions_are_the_models(
    window, drawn, partitions, batches, seed, delay, lateness, rows_given
):
    rows = events(drawn)
    where = lambda _, row: partition_of(row.key.encode(), partitions)  # noqa: E731
    before, seen = reached(rows, where, delay)
    watermark = min(seen[p] for p in range(partitions)) - delay
    gap_of = (lambda row: row.gap_s) if window is DYNAMIC else (lambda _: 10)
    inclusive = window is not OPEN_ENDED
    model, late = one_by_one(rows, before, gap_of, lateness, inclusive=inclusive)
    app, _ = app_with(window, delay=delay, lateness=lateness)
    out = emitted(rows_given, app, rows, batches=batches, partitions=partitions, seed=seed)
    assert sorted(row[1:] for row in out.rows) == answers(
        model, watermark, lateness, inclusive=inclusive
    )
    assert out.held + out.late == len(rows)
    rows = flushed(rows, partitions)
    out = emitted(rows_given, app, rows, batches=batches, partitions=partitions, seed=seed)
    assert sorted(row[1:] for row in out.rows) == answers(model, FAR, lateness)
    assert out.late == len(late)
    assert out.held == len(rows) - len(late)


@settings(deadline=None, max_examples=some(25), suppress_health_check=FIXTURES)
@given(
    drawn=draws,
    partitions=st.sampled_from([2, 4]),
    batches=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 99),
    delay=st.sampled_from([0, 7]),
    lateness=st.sampled_from([0, 20]),
    window=st.sampled_from([GAP, DYNAMIC]),
)
def test_sessions_of_keys_spread_over_partitions_are_the_same_in_any_batches(
    drawn, partitions, batches, seed, delay, lateness, window, rows_given
):
    rows = events(drawn)
    dice = random.Random(f"{seed}/events")
    places = [dice.randrange(partitions) for _ in rows]
    before, _ = reached(rows, lambda number, _: places[number], delay)
    # Taken in the order of what their partitions had reached, the events tell the same story.
    order = sorted(range(len(rows)), key=lambda number: before[number])
    gap_of = (lambda row: row.gap_s) if window is DYNAMIC else (lambda _: 10)
    model, _ = one_by_one([rows[i] for i in order], [before[i] for i in order], gap_of, lateness)
    # Flush every partition without changing where the others went: by many rows with a far time.
    more = [Event(at(FAR), "z")] * 60
    app, _ = app_with(window, delay=delay, lateness=lateness, keyed=False)
    for cut in batches:
        rows_and_more = [*rows, *more]
        out = emitted(rows_given, app, rows_and_more, batches=cut, partitions=partitions, seed=seed)
        assert sorted(row[1:] for row in out.rows) == answers(model, FAR - delay, lateness)


MODES = {
    "update": {"mode": "update"},
    "retract": {"mode": "retract"},
    "each": {"mode": "retract", "early": "each", "late": "each"},
    "counted": {"mode": "retract", "early": ms.after_count(3), "late": "each"},
    "on time": {"mode": "retract", "early": None},
    "discard": {"mode": "discard"},
    "discard by count": {"mode": "discard", "early": ms.after_count(2), "late": ms.after_count(2)},
    "correct": {"mode": "final", "late_policy": "correct"},
}


def folded(rows):
    left = defaultdict(int)
    for diff, *row in rows:
        left[tuple(row)] += diff
    assert set(left.values()) <= {0, 1}
    return sorted(row for row, count in left.items() if count)


@pytest.mark.parametrize("name", MODES)
@settings(deadline=None, max_examples=some(20), suppress_health_check=FIXTURES)
@given(
    drawn=draws,
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
    delay=st.sampled_from([0, 7]),
    lateness=st.sampled_from([0, 5, 200]),
    window=st.sampled_from([GAP, DYNAMIC]),
)
def test_what_panes_add_up_to_are_the_models_sessions(
    name, drawn, partitions, batches, seed, delay, lateness, window, rows_given
):
    rows = flushed(events(drawn), partitions)
    where = lambda _, row: partition_of(row.key.encode(), partitions)  # noqa: E731
    before, _ = reached(rows, where, delay)
    gap_of = (lambda row: row.gap_s) if window is DYNAMIC else (lambda _: 10)
    model, _ = one_by_one(rows, before, gap_of, lateness)
    emit = dict(MODES[name])
    late = emit.pop("late_policy", "drop")
    if late == "correct":
        lateness = lateness or 3
        model, _ = one_by_one(rows, before, gap_of, lateness)
    app, _ = app_with(window, delay=delay, lateness=lateness, policy=late, **emit)
    found = emitted(rows_given, app, rows, partitions=partitions, batches=batches, seed=seed)
    assert found.held + found.late == len(rows)
    expected = answers(model, FAR * 2, lateness)
    everything = found.rows
    if emit["mode"] == "retract":
        assert folded(everything) == expected
    elif emit["mode"] == "discard":
        by_key = lambda rows: {k: (n, s) for k, n, s in summed(rows)}  # noqa: E731
        assert by_key(row[3:] for row in everything) == by_key(row[2:] for row in expected)
    else:
        latest = {(row[1], row[3]): row[1:] for row in everything if row[0] > 0}
        assert [latest[row[0], row[2]] for row in expected] == expected
        if late == "correct":
            gone = {(row[1], row[3]) for row in everything if row[0] < 0}
            starts = {(row[0], row[2]) for row in expected}
            assert set(latest) - gone <= starts


def summed(rows):
    totals = defaultdict(lambda: (0, 0))
    for key, count, total in rows:
        totals[key] = totals[key][0] + count, totals[key][1] + total
    return [(key, *both) for key, both in totals.items()]


@settings(deadline=None, max_examples=some(20), suppress_health_check=FIXTURES)
@given(
    drawn=draws,
    cuts=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    seed=st.integers(0, 99),
    lateness=st.sampled_from([0, 5, 200]),
    mode=st.sampled_from(["retract", "discard", "update"]),
)
def test_panes_by_count_are_the_same_in_any_batches(drawn, cuts, seed, lateness, mode, rows_given):
    rows = flushed(events(drawn), 1)
    app, _ = app_with(GAP, mode, lateness=lateness, early=ms.after_count(2), late="each")
    found = [emitted(rows_given, app, rows, batches=cut, seed=seed) for cut in cuts]
    stories = [by_key(run.rows) for run in found]
    assert stories[0] == stories[1]


def by_key(rows):
    story = defaultdict(list)
    for row in rows:
        story[row[3]].append(row)
    return story


VARIANTS = [
    GAP,
    DYNAMIC,
    ms.session("10 seconds", strict=True),
    ms.session("10 seconds", strict=True, gap_inclusive=False, max_length="25 seconds"),
    ms.session(pl.duration(seconds="gap_s"), max_gap="30 seconds", max_length="40 seconds"),
    ms.session("10 seconds", max_length="10 seconds"),
]


@settings(deadline=None, max_examples=some(40), suppress_health_check=FIXTURES)
@given(
    drawn=draws,
    cuts=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    seed=st.integers(0, 99),
    partitions=st.sampled_from([1, 3]),
    keyed=st.booleans(),
    lateness=st.sampled_from([0, 5, 20]),
    window=st.sampled_from(VARIANTS),
)
def test_sessions_of_every_kind_are_the_same_in_any_batches(
    drawn, cuts, seed, partitions, keyed, lateness, window, rows_given
):
    rows = [*events(drawn), *[Event(at(FAR), str(number)) for number in range(40)]]
    found = []
    for cut in cuts:
        app, _ = app_with(window, lateness=lateness, keyed=keyed)
        run = rows_given(app, {"events": rows}, batches=cut, partitions=partitions, seed=seed)
        said = run.rows["out"].drop("batch", strict=False).to_dicts()
        near = [row for row in said if row["window_start"] < at(FAR)]
        late = sum(line["late"] for line in run.books.values())
        found.append((sorted(near, key=str), late))
        if window.max_length_us is not None:
            length = timedelta(microseconds=window.max_length_us)
            assert all(row["window_end"] - row["window_start"] <= length for row in near)
        counted = sum(row["rows"] for row in near)
        assert counted + late == len(drawn)
    assert found[0] == found[1]
