"""What comes after rows that replace one another: as if it had been computed over the rows that are left."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.demo.ads_input import AdsInput, StopRule
from millstream.demo.ads_pipeline import build
from millstream.errors import ConfigError
from millstream.kernels.trigger import EmitChanges

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(days=3)


@dataclass
class Event:
    at: datetime
    key: str
    n: int
    user: int = 0


def events(drawn):
    """Make events of ``(second, key, n)``; no two are at the same time."""
    return [
        Event(START + timedelta(seconds=second, microseconds=number), key, n)
        for number, (second, key, n) in enumerate(drawn)
    ]


def app_with(late="drop", lateness=8):
    app = ms.App("after", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness=timedelta(seconds=lateness),
        late=late,
    )
    return app, stream


# ── windows ─────────────────────────────────────────────────────────────────────────────────────

FIXED = {
    "tumbling": ms.tumbling("10 seconds"),
    "hopping": ms.hopping("10 seconds", "4 seconds"),
    "cumulating": ms.cumulating("20 seconds", "5 seconds"),
    "calendar": ms.calendar("1 day", tz="Europe/Berlin"),
}
TIMED = {**FIXED, "session": ms.session("3 seconds"), "sliding": ms.sliding("4 seconds")}
COUNTED = {
    "count": ms.count_window(3, unbounded=True),
    "count with slide": ms.count_window(3, unbounded=True, slide=2),
    "count with timeout": ms.count_window(3, unbounded=True, timeout="7 seconds"),
}
EVERY = {**TIMED, **COUNTED}
EMITS = [
    {"mode": "update"},
    {"mode": "retract"},
    {"mode": "final"},
    {"mode": "correct"},
    {"mode": "update", "early": "each"},
    {"mode": "update", "early": ms.after_count(2), "late": ms.after_count(2)},
    {"mode": "update", "early": None, "late": None},
    {"mode": "update", "early": None, "suppress_unchanged": False},
]


def offered(kind, emit):
    """Return how a kind of window may emit: as given, but for what it does not offer."""
    emit = dict(emit)
    if kind in COUNTED and emit["mode"] == "correct":
        return {"mode": "update"}
    if kind in COUNTED:
        emit.pop("late", None)
    return emit


def counted(kind, emit, lateness=8):
    """Return an app, and what a window of that kind emits: a row for each window and key."""
    emit = offered(kind, emit)
    corrected = emit["mode"] == "correct"
    app, stream = app_with("correct" if corrected else "drop", lateness)
    windowed = stream.window(EVERY[kind], by="key", name="first")
    if not corrected:
        windowed = windowed.emit(**emit)
    result = windowed.agg(n=ms.count(), s=ms.sum("n"))
    number = ["window_number"] if kind in COUNTED else []
    return app, result.select("window_start", "window_end", "key", "n", "s", *number)


# ── steps, and the same on rows that are left ───────────────────────────────────────────────────


def fails_on_three(n):
    """Give 1; the expression fails on a row with three events."""
    return pl.when(n == 3).then(pl.lit("x")).otherwise(pl.lit("1")).str.to_integer()


def repeated(frame):
    times = frame.select("row", pl.int_ranges(0, pl.col("n") % 3).alias("part"))
    parts = times.explode("part").drop_nulls()
    return (
        frame.join(parts, on="row", maintain_order="left")
        .with_columns(m=pl.col("m") + pl.col("part"))
        .drop("part")
    )


def triple(frame):
    return frame.with_columns(m=pl.col("m") * 3)


STEPS = {
    "filter": (
        lambda rows: rows.filter(pl.col("n") % 2 == 1),
        lambda row: [row] if row["n"] % 2 == 1 else [],
    ),
    "filter by null": (
        lambda rows: rows.filter(pl.when(pl.col("s") > 1).then(pl.col("s") % 2 == 0)),
        lambda row: [row] if row["s"] > 1 and row["s"] % 2 == 0 else [],
    ),
    "with_columns": (
        lambda rows: rows.with_columns(m=pl.col("n") % 3),
        lambda row: [{**row, "m": row["n"] % 3}],
    ),
    "rename": (
        lambda rows: rows.rename({"n": "s", "s": "n"}),
        lambda row: [{**row, "n": row["s"], "s": row["n"]}],
    ),
    "split": (
        lambda rows: rows.split(pl.col("n") > 2, pl.col("s") > 1)[1],
        lambda row: [row] if row["n"] <= 2 and row["s"] > 1 else [],
    ),
    "the rest of a split": (
        lambda rows: rows.split(pl.col("n") > 2)[-1],
        lambda row: [row] if row["n"] <= 2 else [],
    ),
    "failing": (
        lambda rows: rows.with_columns(m=pl.col("m") + fails_on_three(pl.col("n"))),
        lambda row: [{**row, "m": row["m"] + 1}] if row["n"] != 3 else [],
    ),
    "failing filter": (
        lambda rows: rows.filter(fails_on_three(pl.col("n")) == 1),
        lambda row: [row] if row["n"] != 3 else [],
    ),
    "explode": (
        lambda rows: rows.with_columns(m=pl.int_ranges(0, pl.col("n") % 3)).explode("m"),
        lambda row: [{**row, "m": m} for m in range(row["n"] % 3)],
    ),
    "map_frames": (
        lambda rows: rows.map_frames(triple),
        lambda row: [{**row, "m": row["m"] * 3}],
    ),
    "map_frames of any rows": (
        lambda rows: rows.map_frames(repeated, rows="any"),
        lambda row: [{**row, "m": row["m"] + part} for part in range(row["n"] % 3)],
    ),
}
KEEPING = [
    name for name in STEPS if name not in ("explode", "map_frames", "map_frames of any rows")
]


def after(steps, stream, rows):
    """Put steps behind a stream; return it, and what they make of the rows that are left of it."""
    stream = stream.with_columns(m=pl.lit(1, pl.Int64))
    rows = [{**row, "m": 1} for row in rows]
    for name in steps:
        declare, compute = STEPS[name]
        stream = declare(stream)
        rows = [made for row in rows for made in compute(row)]
    return stream, rows


def left_in(out, view):
    return out[view].to_dicts()


def in_order(rows):
    return sorted(repr(sorted(row.items())) for row in rows)


drawn_events = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from("abc"), st.integers(-3, 3)), max_size=30
)
batchings = st.fixed_dictionaries(
    {
        "batches": st.integers(1, 6),
        "partitions": st.sampled_from([1, 4, 7]),
        "seed": st.integers(0, 99),
        "crash": st.integers(0, 2),
    }
)
ENDED = testing.Watermark("events", at=END)


@settings(max_examples=some(60))
@given(
    drawn_events,
    st.sampled_from(list(EVERY)),
    st.sampled_from(EMITS),
    st.lists(st.sampled_from(KEEPING), max_size=3),
    st.booleans(),
    batchings,
)
def test_a_view_behind_steps_is_what_they_make_of_the_rows_that_are_left(
    drawn, kind, emit, steps, ended, batching
):
    app, windows = counted(kind, emit)
    windows.view("first")
    after(steps, windows, [])[0].view(
        "then", key=["window_end", "key"] if kind in (*FIXED, "sliding") else None
    )
    inputs = {"events": [*events(drawn), *([ENDED] if ended else [])]}
    out = testing.run(app, inputs, **batching)
    expected = after(steps, windows, left_in(out, "first"))[1]
    assert in_order(left_in(out, "then")) == in_order(expected)


def second(rows, by, size, *, included):
    """Count and sum rows by window and columns, as a table of them would give.

    The time of a row is the last of its window, whose end is ``included`` in it, or is not.
    """
    groups = defaultdict(list)
    for row in rows:
        time = row["window_end"] - timedelta(microseconds=0 if included else 1)
        start = time - (time - START) % size
        groups[start, *(row[name] for name in by)].append(row)
    return [
        {
            "window_start": key[0],
            "window_end": key[0] + size,
            **dict(zip(by, key[1:], strict=True)),
            "rows": len(group),
            "total": sum(row["m"] for row in group),
            "most": max(row["s"] for row in group),
            "kinds": len({row["n"] for row in group}),
        }
        for key, group in groups.items()
    ]


def deduplicated(rows, columns, ids, within):
    """Keep of each id the first row, and the next that is more than so far behind the one kept before."""
    last, kept = {}, []
    for row in sorted(rows, key=lambda row: (row["window_end"], *(row[name] for name in columns))):
        key = tuple(row[name] for name in ids)
        if key not in last or row["window_end"] - last[key] > within:
            last[key] = row["window_end"]
            kept.append(row)
    return kept


@settings(max_examples=some(60))
@given(
    drawn_events,
    st.sampled_from(list(TIMED)),
    st.sampled_from(EMITS),
    st.lists(st.sampled_from(list(STEPS)), max_size=3),
    st.sampled_from([[], [], ["key"], ["n"], ["key", "m"]]),
    st.sampled_from([[], ["key"], ["m"], ["key", "n"]]),
    st.sampled_from(["final", "update", "retract"]),
    st.booleans(),
    batchings,
)
def test_a_window_behind_steps_adds_up_the_rows_that_are_left(
    drawn, kind, emit, steps, ids, by, mode, filtered, batching
):
    ids = [] if emit["mode"] == "final" else ids  # these are deduplicated in the order of arrival
    app, windows = counted(kind, emit)
    windows.view("first")
    size, within = timedelta(minutes=1), timedelta(seconds=9)
    stream = after(steps, windows, [])[0]
    once = stream.dedup(ids, within=within) if ids else stream
    above = once.window(ms.tumbling(size), by=by).emit(mode)
    totals = above.agg(rows=ms.count(), total=ms.sum("m"), most=ms.max("s"), kinds=ms.distinct("n"))
    totals = totals.filter(pl.col("total") > 1) if filtered else totals
    totals.view("then")
    out = testing.run(app, {"events": [*events(drawn), ENDED]}, **batching)
    rows = after(steps, windows, left_in(out, "first"))[1]
    rows = deduplicated(rows, list(stream.columns), ids, within) if ids else rows
    expected = second(rows, by, size, included=kind == "sliding")
    if filtered:
        expected = [row for row in expected if row["total"] > 1]
    assert in_order(left_in(out, "then")) == in_order(expected)


# ── sinks beside ────────────────────────────────────────────────────────────────────────────────


def with_sinks(app, windows, seen):
    def note(rows, context):
        seen.append(rows.to_dicts())

    direct = windows.with_columns(double=pl.col("n") + fails_on_three(pl.col("n"))).map_frames(
        lambda frame: frame.with_columns(id=pl.col("key") + pl.col("window_start").cast(pl.String)),
        name="mapped",
    )
    direct.view("last", key="key")
    direct.view("rows", key=["window_start", "window_end", "key"])
    windows.to("changes", partitions=1)
    direct.to("latest", key="id", cleanup="compact", partitions=1)
    direct.dataset("rows")
    direct.foreach(note)


@pytest.mark.not_in_lane("one_bit_hashes", "the rows of keys that share a hash have no order")
@settings(max_examples=some(40))
@given(
    drawn_events,
    st.sampled_from(list(EVERY)),
    st.sampled_from([emit for emit in EMITS if emit["mode"] != "retract"]),
    st.booleans(),
    batchings,
)
def test_sinks_show_the_same_whether_another_operator_needs_retractions_or_not(
    drawn, kind, emit, ended, batching
):
    found = []
    for beside in (False, True):
        app, windows = counted(kind, emit)
        seen = []
        with_sinks(app, windows, seen)
        if beside:
            windows.filter(pl.col("n") > 1).view("many")
        inputs = {"events": [*events(drawn), *([ENDED] if ended else [])]}
        out = testing.run(app, inputs, **batching | {"crash": 0})
        found.append(
            {
                "views": [out[view].to_dicts() for view in ("last", "rows")],
                "changes": [out.changes(view).to_dicts() for view in ("last", "rows")],
                "topics": [
                    out.topic(name).drop("timestamp").to_dicts() for name in ("changes", "latest")
                ],
                "dataset": out.dataset("rows").to_dicts(),
                "foreach": seen,
                "dead": sorted(out.dead["value"].to_list()),
            }
        )
    if kind == "session" and offered(kind, emit) != {"mode": "update"}:
        # One that has grown has a pane more, so that its earlier row can be taken back in time.
        found = [one["views"][1] for one in found]
    assert found[0] == found[1]


# ── unions ──────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=some(40))
@given(drawn_events, st.sampled_from(list(FIXED)), st.sampled_from(EMITS), batchings)
def test_a_union_of_events_and_changes_counts_an_event_once_and_a_window_as_it_is_left(
    drawn, kind, emit, batching
):
    app, windows = counted(kind, emit)
    windows.view("first")
    other = app.topic("others", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    plain = other.select("key", m=pl.col("n"), s=pl.lit("event"))
    changes = windows.select("key", m=pl.col("n"), s=pl.lit("window"))
    both = plain.union(changes)
    both.window(ms.tumbling("10 days"), by="s").emit("update").agg(
        n=ms.count(), m=ms.sum("m")
    ).view("then")
    both.to("all", partitions=1)
    both.dataset("all")
    mapped = [event.__dict__ for event in events(drawn)]
    inputs = {
        "events": [*events(drawn), ENDED],
        "others": sorted(events(drawn), key=lambda e: e.at),
    }
    out = testing.run(app, inputs, **batching | {"partitions": 1})
    left = left_in(out, "first")
    wanted = {}
    if mapped:
        wanted["event"] = (len(mapped), sum(row["n"] for row in mapped))
    if left:
        wanted["window"] = (len(left), sum(row["n"] for row in left))
    found = out["then"].group_by("s").agg(pl.col("n", "m").sum())
    assert {s: (n, m) for s, n, m in found.select("s", "n", "m").iter_rows()} == wanted
    for rows in (out.topic("all"), out.dataset("all")):
        if emit["mode"] == "final":  # all are additions, and have no sign
            assert "_diff" not in rows.columns
        elif rows.height:
            assert set(rows["_diff"].unique()) <= {-1, 1}
            standing = rows.group_by("s").agg(pl.col("_diff").sum())
            assert dict(standing.iter_rows()) == {s: n for s, (n, _) in wanted.items()}


# ── what sinks show ─────────────────────────────────────────────────────────────────────────────

ONE_BY_ONE = [Event(START, "a", 1), Event(START, "a", 1), Event(START, "a", 1)]


def shown(out):
    return out.select("n", "_diff").rows()


def test_a_topic_a_dataset_and_a_function_show_what_is_taken_back():
    app, windows = counted("tumbling", {"mode": "update", "early": "each"})
    some_rows, seen = windows.filter(pl.col("n") != 2), []

    def note(rows, _context):
        seen.extend(rows.select("n", "_diff").rows())

    some_rows.to("some", partitions=1)
    some_rows.dataset("some")
    some_rows.foreach(note)
    out = testing.run(app, {"events": ONE_BY_ONE}, partitions=1)
    assert shown(out.topic("some")) == [(1, 1), (1, -1), (3, 1)]
    assert shown(out.dataset("some")) == [(1, 1), (1, -1), (3, 1)]
    assert seen == [(1, 1), (1, -1), (3, 1)]


def test_a_compacted_topic_deletes_the_key_of_a_row_that_no_longer_passes():
    app, stream = app_with()
    windows = stream.window(ms.tumbling("10 seconds"), by=()).emit("update").agg(n=ms.count())
    windows.filter(pl.col("n") < 3).to("few", key="window_start", cleanup="compact", partitions=1)
    rows = [ONE_BY_ONE[0], testing.Tick("1 second"), *ONE_BY_ONE[1:]]
    out = testing.run(app, {"events": rows}, partitions=1)
    last = out.topic("few").row(-1, named=True)
    assert (last["n"], last["key"]) == (None, "2026-01-01T00:00:00Z")


def test_the_retraction_of_a_failed_row_fails_too_and_has_no_letter_of_its_own():
    app, windows = counted("tumbling", {"mode": "update", "early": "each"})
    parsed = windows.with_columns(m=fails_on_three(pl.col("n")), name="parse")
    parsed.filter(pl.col("n") > 0).view("out")
    out = testing.run(app, {"events": [*ONE_BY_ONE, Event(START, "a", 1)]}, partitions=1)
    assert out["out"]["n"].to_list() == [4]
    line = out.ledger.filter(step="parse").select("read", "emitted", "dead").sum().row(0)
    assert line == (7, 5, 2)  # 1, -1 2, -2 3, -3 4
    assert out.dead["step"].to_list() == ["parse"]


def test_a_sink_of_updates_says_how_many_retractions_it_left_out():
    app, windows = counted("tumbling", {"mode": "update", "early": "each"})
    windows.view("all")
    windows.filter(pl.col("n") > 1).view("many")
    out = testing.run(app, {"events": ONE_BY_ONE}, partitions=1)
    line = out.ledger.filter(step="all").select("read", "emitted", "filtered").sum().row(0)
    assert line == (5, 3, 2)


# ── plans ───────────────────────────────────────────────────────────────────────────────────────


def emitting_changes(app):
    return [
        operator.kernel.name
        for stage in app.plan().stages
        for operator in stage.operators
        if isinstance(getattr(operator.kernel, "emission", None), EmitChanges)
    ]


def test_only_a_window_before_an_operator_that_needs_retractions_emits_them():
    app, windows = counted("tumbling", {"mode": "update"})
    windows.with_columns(m=pl.col("n") + 1).rename({"m": "k"}).drop("k").view("all")
    windows.filter(pl.col("n") > 1)  # leads to no output
    assert emitting_changes(app) == []
    windows.filter(pl.col("n") > 1).view("many")
    assert emitting_changes(app) == ["first"]


def declare_failing(rows):
    return rows.with_columns(m=fails_on_three(pl.col("n")), name="parse")


@pytest.mark.parametrize("mode", ["update", "retract", "correct"])
def test_a_row_whose_replacement_fails_is_taken_out_of_a_view_in_every_mode(mode):
    app, windows = counted("tumbling", {"mode": mode})
    parsed = declare_failing(windows).rename({"key": "who"})
    parsed.view("out")
    parsed.drop("m").view("by_end", key=["window_end", "who"])
    rows = [
        Event(START, "a", 1),
        Event(START, "b", 1),
        Event(START + timedelta(seconds=11), "b", 1),
    ]
    late = [testing.Tick("1 second"), *(Event(START, "a", 1) for _ in range(2))]
    out = testing.run(app, {"events": [*rows, *late]}, partitions=1, batches=1)
    assert out["out"]["who"].sort().to_list() == (["b"] if mode == "correct" else ["b", "b"])
    assert out["by_end"].height == out["out"].height
    more = [testing.Tick("1 second"), Event(START, "a", 5)]
    out = testing.run(app, {"events": [*rows, *late, *more]}, partitions=1, batches=1)
    assert out["out"].filter(who="a")["n"].to_list() == [4]


def test_only_a_view_by_what_identifies_rows_can_delete_the_row_that_was_to_be_replaced():
    app, windows = counted("tumbling", {"mode": "update"})
    failing = declare_failing(windows)
    failing.view("last", key="key")
    failing.map_frames(lambda frame: frame).view("mapped", key=["window_start", "key"])
    failing.to("rows")
    failing.dataset("rows")
    declare_failing(windows.rename({"s": "sum"})).view("no", key=["key", "sum"])
    assert emitting_changes(app) == []
    failing.view("rows", key=["key", "window_end"])
    assert emitting_changes(app) == ["first"]


NEVER_FAIL = [
    pl.col("n") + 1,
    (pl.col("n") + 0.005 * 200) / (pl.col("s") + 200),
    pl.col("n") * pl.lit(Decimal("0.000001")),
    pl.when(pl.col("n") > 3).then(pl.col("s")).otherwise(None),
    (pl.col("n") == 1) & pl.col("s").is_not_null() | ~(pl.col("s") <= 2.5),
    pl.col("s").fill_null(0) - pl.col("n"),
]
MAY_FAIL = [
    pl.col("n").cast(pl.Int8),
    pl.col("key").str.to_integer(),
    pl.col("n") * pl.lit(Decimal("1e20")),
    pl.col("n").map_elements(abs, return_dtype=pl.Int64),
    pl.col("window_start") + pl.duration(days=pl.col("n")),
    pl.concat_str("key", "n"),
    pl.col("n") // 2,
]


def test_arithmetic_of_numbers_never_fails_and_all_else_is_supposed_to():
    least, most = -(2**63), 2**63 - 1
    numbers = [least, most, 0, -1, 1, 3, None]
    frame = pl.DataFrame(
        [(a, b) for a in numbers for b in numbers], schema=["n", "s"], orient="row"
    )
    for expression in NEVER_FAIL:
        app, windows = counted("tumbling", {"mode": "update"})
        assert frame.select(expression).height == frame.height
        windows.with_columns(x=expression).select("window_start", "key", y=pl.col("x")).view("out")
        assert emitting_changes(app) == [], str(expression)
    for expression in MAY_FAIL:
        app, windows = counted("tumbling", {"mode": "update"})
        windows.with_columns(x=expression).view("out")
        assert emitting_changes(app) == ["first"], str(expression)


def test_the_demo_emits_as_it_is_declared():
    given = AdsInput("generated", seed=3, rate=60, minutes=4)
    rule = StopRule("1 minute", shown_min=20, windows=2, floor=0.006)
    assert emitting_changes(build("unused", given.clients, rule)) == []


@pytest.mark.parametrize("kind", list(EVERY))
def test_what_a_window_is_known_by_does_not_change_when_it_emits_changes(kind):
    keys = []
    for beside in (False, True):
        app, windows = counted(kind, {"mode": "update"})
        windows.view("all")
        if beside:
            windows.filter(pl.col("n") > 1).view("many")
        program = app.plan().program
        keys.append((dict(program.steps), program.outputs["all"]))
    assert keys[0] == keys[1]


# ── what is refused where it is declared ────────────────────────────────────────────────────────


def refused(words):
    return pytest.raises(ConfigError, match=words)


def test_what_a_window_of_events_that_may_grow_takes_back_may_be_too_late_for_another_window():
    _, stream = app_with()
    for mode in ("update", "retract"):
        number = stream.window(ms.count_window(3, unbounded=True), by="key").emit(mode)
        with refused(
            'window comes after count_window.*moves with its events.*"final" or "discard"'
        ):
            number.agg(n=ms.count()).window(ms.tumbling("1 day"))
        full = stream.window(ms.count_window(3, unbounded=True), by="key").emit(mode, early=None)
        full.agg(n=ms.count()).window(ms.tumbling("1 day")).agg(n=ms.sum("n"))


@pytest.mark.parametrize("mode", ["update", "retract"])
def test_a_view_of_changes_has_a_key_that_tells_rows_apart(mode):
    _, stream = app_with()
    rows = stream.window(ms.tumbling("10 seconds"), by="key").emit(mode)
    rows = rows.agg(n=ms.count(), ns=ms.list("n")) if mode == "update" else rows.agg(n=ms.count())
    passing = rows.filter(pl.col("n") > 1)
    with refused("would delete the other.*identified by window_start, key"):
        passing.view("by key", key="key")
    with refused("would delete the other"):
        passing.to("by-key", key="key", cleanup="compact")
    with refused("What identifies them is not known: a step.*would delete the other|would delete"):
        passing.with_columns(m=pl.int_ranges(0, "n")).explode("m").view("parts")
    with refused("What identifies them is not known"):
        passing.map_frames(lambda frame: frame).view("mapped")
    with refused("What identifies them is not known"):
        passing.with_columns(key=pl.lit("x")).view("one key")
    with refused("What identifies them is not known"):
        passing.union(rows.filter(pl.col("n") < 1)).view("both")
    with refused("What identifies them is not known"):
        passing.select("window_start", "n").view("no key", key="window_start")
    passing.rename({"key": "who", "window_start": "since"}).view("renamed")
    passing.select("window_end", pl.col("key").alias("who"), "n").view("chosen")
    passing.split(pl.col("n") > 1)[1].view("rest")
    passing.view("more", key=["window_end", "key", "n"])


def test_a_view_of_rows_that_are_always_replaced_may_keep_the_last_one_of_a_key():
    _, stream = app_with()
    rows = stream.window(ms.tumbling("10 seconds"), by="key").emit("retract").agg(n=ms.count())
    rows.view("last", key="key")
    rows.rename({"key": "id"}).to("named", key="id", cleanup="compact")
    computed = rows.with_columns(id=pl.col("key") + pl.col("window_start").cast(pl.String))
    with refused("would delete the other"):  # what is computed may fail, and be missing
        computed.to("computed", key="id", cleanup="compact")
    with refused("would delete the other"):
        rows.view("by count", key="n")


def test_parts_and_windows_of_events_come_before_changes():
    _, stream = app_with()
    rows = stream.window(ms.tumbling("10 seconds"), by="key").emit("update").agg(n=ms.count())
    with refused("cannot be emitted as parts"):
        rows.window(ms.tumbling("1 day")).emit("discard")
    counted = rows.window(ms.count_window(3, unbounded=True), by="key").emit("update")
    with refused("count_window.*takes? others? back|take others back"):
        counted.agg(n=ms.count())


def test_what_is_refused_after_changes_names_what_works():
    _, stream = app_with()
    changes = stream.window(ms.tumbling("10 seconds"), by="key").emit("update").agg(n=ms.count())
    with refused("budget comes after rows that may be taken back.*events.budget.*window"):
        changes.budget("key", cost="n", limit=pl.lit(5))
    final = stream.window(ms.tumbling("10 seconds"), by="key").agg(n=ms.count())
    with refused("budget comes after a window, whose rows have no order.*events.budget"):
        final.budget("key", cost="n", limit=pl.lit(5))
    spent = stream.budget("key", cost="n", limit=pl.lit(5))
    spent.window(ms.tumbling("10 seconds"), by="key").emit("update").agg(n=ms.count()).view("spent")
    joined = stream.join(stream.filter(pl.col("n") > 1), "key", within=("0 s", "1 s"), how="left")
    joined.budget("key", cost="n", limit=pl.lit(5))
    for window in (*TIMED.values(), ms.session("1 minute")):
        with refused('cannot be emitted as parts. Choose "final", "update" or "retract"'):
            changes.window(window, by="key").emit("discard").agg(m=ms.count())
        for mode in ("final", "update", "retract"):
            changes.window(window, by="key").emit(mode).agg(m=ms.count())


def test_windows_over_changes_have_no_views_by_keys_that_leave_the_window_out():
    _, stream = app_with()
    changes = stream.window(ms.tumbling("10 seconds"), by="key").emit("retract").agg(n=ms.count())
    some_rows = changes.filter(pl.col("n") < 5)
    for window in (ms.session("3 seconds"), ms.sliding("3 seconds"), ms.tumbling("20 seconds")):
        for mode in ("update", "retract"):
            counted = some_rows.window(window, by="key").emit(mode).agg(m=ms.count())
            with refused("one of two rows of a key would delete the other"):
                counted.view(f"{window} {mode}", key="key")


def test_late_rows_in_a_union_are_late_rows_in_either_order():
    app = ms.App("late", log="unused")
    topic = app.topic("t", {"at": datetime, "key": str})
    stream = topic.stream(time="at", late="side")
    late = stream.window(ms.tumbling("10 seconds"), by="key").agg(n=ms.count()).late
    late = late.select("at", "key")
    for union in (stream.union(late), late.union(stream)):
        with refused("window comes after late rows"):
            union.window(ms.tumbling("10 seconds"))
