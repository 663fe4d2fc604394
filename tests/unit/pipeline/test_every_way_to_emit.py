"""Every kind of window, every trigger and mode, and what comes after: a naive recompute, or refused where it is declared.

A part is drawn by each run, others each time; `make test-long` takes all of it. What is refused stands in tables of this
file, each with words of what to do instead: a combination that is neither equal to the recompute nor in a table fails.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta

import emit_model
import polars as pl
import pytest
from emit_model import COUNTED, FIXED, KINDS, Came
from example_counts import some

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.log.murmur2 import partition_of

START = datetime(2026, 1, 1, tzinfo=UTC)
AT_THE_END = [
    testing.Watermark("events", at=START + timedelta(days=3)),
    testing.Tick("1 hour"),
]
GIVEN = "as it is"  # nothing said
EARLY = (GIVEN, None, "batch", 1, 2, "time", ("once", 1), ("once", 2), ("once", "time"))
LATE = (GIVEN, None, "batch", 1, 2, "time")
MODES = ("final", "correct", "update", "discard", "retract")
EXTRAS = ({}, {"panes": True}, {"suppress_unchanged": False})
EMITS = [*itertools.product(EARLY, LATE, EXTRAS)]
PARTITIONS = (1, 4, 7)
LATENESS = timedelta(seconds=1000)  # nothing is too late


def window(kind):
    seconds = {name: timedelta(seconds=getattr(emit_model, name)) for name in ("GAP", "SIZE")}
    counted = {"count": emit_model.COUNT, "unbounded": True}
    return {
        "tumbling": lambda: ms.tumbling("10 seconds"),
        "hopping": lambda: ms.hopping("10 seconds", "4 seconds"),
        "cumulating": lambda: ms.cumulating("20 seconds", "5 seconds"),
        "session": lambda: ms.session(seconds["GAP"]),
        "sliding": lambda: ms.sliding(seconds["SIZE"]),
        "sliding with rank": lambda: ms.sliding(seconds["SIZE"], rank="place"),
        "count": lambda: ms.count_window(**counted),
        "count with slide": lambda: ms.count_window(**counted, slide=emit_model.SLIDE),
        "count with timeout": lambda: ms.count_window(
            **counted, timeout=timedelta(seconds=emit_model.TIMEOUT)
        ),
    }[kind]()


def trigger(given, seconds):
    if isinstance(given, tuple):
        return ms.once(trigger(given[1], seconds)) if given[1] != 1 else ms.once("each")
    if isinstance(given, int):
        return "each" if given == 1 else ms.after_count(given)
    return timedelta(seconds=seconds) if given == "time" else given


def emit_arguments(mode, early, late, extra):
    arguments = {"mode": "final" if mode == "correct" else mode, **extra}
    if early != GIVEN:
        arguments["early"] = trigger(early, 3)
    if late != GIVEN:
        arguments["late"] = trigger(late, 5)
    return arguments


def is_once(early):
    return isinstance(early, tuple)


# ── what is refused: the first that holds, and words of the error ───────────────────────────────


def refused(kind, mode, early, late, extra, *, changes=False):
    """Say why windows cannot emit so; None if they can. ``changes``: over rows that are taken back."""
    counted, once, panes = kind in COUNTED, is_once(early), extra.get("panes")
    late_given = late not in (GIVEN, None)
    triggered = {early, late} - {GIVEN, None, "batch"}
    table = [
        (
            mode in ("final", "correct") and early not in (GIVEN, None),
            'a final row comes once, at the end. Choose "update", "discard" or "retract"',
        ),
        (
            mode == "final" and (panes or late_given),
            'no late rows and no panes. Read the stream with late="correct", or choose "update"',
        ),
        (mode == "correct" and late is None, "nothing would correct. Leave one of them out"),
        (
            changes and mode == "discard" and not counted,
            'cannot be emitted as parts. Choose "final", "update" or "retract"',
        ),
        (once and late_given, "a window that fires once is closed then. Leave late out"),
        (changes and once, 'what a closed window has could not be taken back. Emit "final" above'),
        (
            mode == "discard" and kind.startswith("sliding"),
            'cannot emit "discard".*Choose "final", "update" or "retract"',
        ),
        (
            changes and counted and mode != "final",
            'emitted when nothing can be taken back any more: as "final". Leave emit out',
        ),
        (changes and kind == "session" and panes, "without panes: leave panes=True out of emit"),
        (
            changes and kind == "session" and "suppress_unchanged" in extra,
            "without panes: leave suppress_unchanged=False out of emit",
        ),
        (
            changes and kind not in FIXED and triggered,
            "emits with every batch.*For rows at other times, window what it emits by time",
        ),
        (
            counted and late in (1, 2, "time"),
            "no event is late for it. Leave emit's late out",
        ),
        (counted and mode == "correct", "no event is late for it. Leave it out"),
    ]
    return next((words for holds, words in table if holds), None)


MOVES = "the time of an open window moves with its events"


def refused_after(kind, mode, early, extra, what):
    """Say why a step cannot come after such windows; None if it can."""
    if mode == "discard" and what in ("dedup", "table"):
        return "parts that add up"
    if mode == "discard" and what in ("view", "filter") and not extra.get("panes"):
        return 'would keep of each key the last row of emit."discard".*Emit "update", or keep all parts'
    by_time = what in ("window", "dedup")
    shown_early = mode in ("update", "retract") and early is not None and not is_once(early)
    if kind in COUNTED and by_time and shown_early:
        return MOVES
    return None


# ── what comes after ────────────────────────────────────────────────────────────────────────────


def as_view(rows):
    rows.view("view")


def as_filter(rows):
    rows.filter(pl.col("n") % 2 == 1).view("filter")


def as_window(rows):
    above = rows.window(ms.tumbling("1000 days"), by="key").emit("update")
    above.agg(rows=ms.count(), total=ms.sum("s"), most=ms.max("s")).view("window")


def as_dedup(rows):
    rows.dedup(["key", "n"], within="20 days").view("dedup")


def as_top(rows):
    rows.top(1, by=[("s", "desc"), ("n", "asc")], per="key").view("top")


def as_groups(rows):
    made = rows.group_by("key").agg(rows=ms.count(), total=ms.sum("s"), most=ms.max("s"))
    made.view("groups")


def as_table(rows):
    rows.table(key="key", unbounded=True).view("table")


def as_topic(rows):
    rows.to("topic", partitions=1)


AFTER = {
    "view": as_view,
    "filter": as_filter,
    "window": as_window,
    "dedup": as_dedup,
    "top": as_top,
    "groups": as_groups,
    "table": as_table,
    "topic": as_topic,
}


# ── one combination ─────────────────────────────────────────────────────────────────────────────


def drawn_events(dice, *, in_order, ties):
    """Draw events, and a few times at which running time passes."""
    times = [dice.randint(0, 40) for _ in range(dice.randint(1, 14))]
    if not ties:
        times = list(dict.fromkeys(times))
    if in_order:
        times.sort()
    items = []
    for time in times:
        if dice.random() < 0.2:
            items.append(float(dice.choice([1, 3, 6])))
        items.append((time, dice.choice("aab"), dice.randint(-3, 4)))
    return items


def came(items, partitions):
    """Give each event what its partition had reached, and the clock."""
    reached, clock, made = defaultdict(lambda: emit_model.NEVER), 0.0, []
    for item in items:
        if isinstance(item, float):
            clock += item
            made.append(item)
            continue
        time, key, n = item
        place = partition_of(key.encode(), partitions)
        made.append(Came(float(time), key, n, reached[place], clock))
        reached[place] = max(reached[place], time)
    return made


def left_of(kind, mode, early, items, partitions):
    """Return what must be left of the windows."""
    made = came(items, partitions)
    if is_once(early):
        by = 3.0 if early[1] == "time" else early[1]
        return emit_model.first_panes(
            kind, made, by, lambda key: partition_of(key.encode(), partitions), partitions
        )
    events = [one for one in made if isinstance(one, Came)]
    left = emit_model.windows_left(kind, events)
    if kind not in ("count", "count with slide"):
        return left
    if mode == "final":
        return [one for one in left if one.n == emit_model.COUNT]
    shown = [emit_model.shown_of_open(one, "batch" if early == GIVEN else early) for one in left]
    return [one for one in shown if one is not None]


def identity(left):
    """Say which window it is, as a row does."""
    if left.number is not None:
        return left.key, left.number
    return left.key, round(left.start, 6), round(left.end, 6)


def row_identity(row):
    if "window_number" in row:
        return row["key"], row["window_number"]
    return row["key"], seconds(row["window_start"]), seconds(row["window_end"])


def seconds(at):
    return round((at - START).total_seconds(), 6)


def told(rows):
    return Counter((*row_identity(row), row["n"], row["s"]) for row in rows)


def expected(lefts):
    return Counter((*identity(left), left.n, left.s) for left in lefts)


def by_key(rows, *columns):
    return {row["key"]: tuple(row[column] for column in columns) for row in rows.to_dicts()}


def declare(kind, mode, early, late, extra):
    """Declare the windows and all that may follow; return the app, and what follows."""
    app = ms.App("every", log="unused", buckets=2)
    topic = app.topic("events", {"at": datetime, "key": str, "n": int}, key="key")
    stream = topic.stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None),
        lateness=LATENESS,
        late="correct" if mode == "correct" else "drop",
    )
    windowed = stream.window(window(kind), by="key").emit(
        **emit_arguments(mode, early, late, extra)
    )
    rows = windowed.agg(n=ms.count(), s=ms.sum("n"))
    followed = []
    for what, follow in AFTER.items():
        why = refused_after(kind, mode, early, extra, what)
        if why is None:
            follow(rows)
            followed.append(what)
        else:
            with pytest.raises(ConfigError, match=why):
                follow(rows)
    return app, followed


def standing(rows, mode, kind):
    """Return what the rows of a topic leave, as somebody who reads it works it out."""
    net, latest = Counter(), {}
    for row in rows:
        what, diff = next(iter(told([row]))), row.get("_diff") or 1
        if mode not in ("update", "correct"):
            net[what] += diff
            continue
        # A row replaces that of the same window, and of a session that of the same start.
        place = (*row_identity(row), row.get("place"))
        if kind == "session":
            place = row["key"], row["window_start"]
        latest.pop(place, None)
        if diff > 0:
            latest[place] = what
    return +net if mode not in ("update", "correct") else Counter(latest.values())


def of_topic(out):
    """Return the rows of the topic, with times as times, and their own key."""
    times = ("window_start", "window_end")
    return [
        {
            **row,
            "key": row["value.key"],
            **{name: datetime.fromisoformat(row[name]) for name in times},
        }
        for row in out.topic("topic").to_dicts()
    ]


def added_up(rows, lefts, *, sessions):
    """Add parts up, by the window that each is a part of."""
    found = defaultdict(Counter)
    for row in rows:
        which = row_identity(row)
        if sessions:
            key, start, end = which
            within = [
                left
                for left in lefts
                if left.key == key and left.start <= start and end <= left.end
            ]
            assert len(within) == 1, (which, lefts)
            which = identity(within[0])
        found[which].update({"n": row["n"], "s": row["s"]})
    return {which: (sums["n"], sums["s"]) for which, sums in found.items() if any(sums.values())}


def check_rows(kind, mode, out, followed, lefts):
    """Make sure of the rows themselves: in a view, some of them in a view, and what a topic leaves."""
    rows = expected(lefts)
    odd = Counter({row: times for row, times in rows.items() if row[-2] % 2 == 1})
    assert standing(of_topic(out), mode, kind) == rows
    if "view" in followed:
        assert told(out["view"].to_dicts()) == rows
    if "filter" in followed:
        assert told(out["filter"].to_dicts()) == odd


def check_parts(kind, out, followed, lefts):
    """Make sure that parts add up to the windows that they are parts of."""
    wanted = {}
    for left in lefts:
        wanted[identity(left)] = (left.n, left.s)
    sessions = kind == "session"
    assert added_up(of_topic(out), lefts, sessions=sessions) == wanted
    if "view" in followed:
        assert added_up(out["view"].to_dicts(), lefts, sessions=sessions) == wanted


def check(kind, mode, early, out, followed, lefts):
    """Compare all outputs with what must be left."""
    assert out.late == 0
    parts = mode == "discard" and not is_once(early)
    if parts:
        check_parts(kind, out, followed, lefts)
    else:
        check_rows(kind, mode, out, followed, lefts)
    of_key = defaultdict(list)
    for left in lefts:
        of_key[left.key].append(left)
    sums = {key: [left.s for left in mine] for key, mine in of_key.items()}
    wanted = {key: (len(all_), sum(all_), max(all_)) for key, all_ in sums.items()}
    for what in ("window", "groups"):
        if what in followed and parts:
            assert by_key(out[what], "total") == {key: (t,) for key, (_, t, _) in wanted.items()}
        elif what in followed:
            assert by_key(out[what], "rows", "total", "most") == wanted, what
    if "dedup" in followed:
        ids = Counter({(left.key, left.n) for left in lefts})
        assert Counter((row["key"], row["n"]) for row in out["dedup"].to_dicts()) == ids
        assert set(told(out["dedup"].to_dicts())) <= set(expected(lefts))
    if "top" in followed and not parts:
        assert by_key(out["top"], "s") == {key: (most,) for key, (_, _, most) in wanted.items()}
    if "table" in followed:
        check_latest(kind, out["table"].to_dicts(), of_key)


def check_latest(kind, rows, of_key):
    """Make sure that a table has of each key a row of the last time, which of a count window is not said here."""
    assert len(rows) == len(of_key)
    for row in rows:
        mine = of_key[row["key"]]
        if kind not in COUNTED:
            last = max(left.end for left in mine)
            mine = [left for left in mine if left.end == last]
        assert next(iter(told([row]))) in set(expected(mine))


def run(app, items, dice, partitions, seed):
    """Run events in random batches, perhaps with a crash, and then let all time pass."""
    given = [
        testing.Tick(timedelta(seconds=item))
        if isinstance(item, float)
        else {"at": START + timedelta(seconds=item[0]), "key": item[1], "n": item[2]}
        for item in items
    ]
    return testing.run(
        app,
        {"events": [*given, *AT_THE_END]},
        batches=dice.randint(1, 6),
        partitions=partitions,
        seed=seed,
        crash=dice.choice([0, 0, 1]),
    )


def try_out(kind, mode, early, late, extra, seed):
    """Run one combination, or make sure that it is refused."""
    why = refused(kind, mode, early, late, extra)
    if why is not None:
        with pytest.raises(ConfigError, match=why):
            declare(kind, mode, early, late, extra)
        return
    dice = random.Random(seed)
    in_order = late is None or is_once(early)
    items = drawn_events(dice, in_order=in_order, ties=kind != "sliding")
    partitions = dice.choice(PARTITIONS)
    app, followed = declare(kind, mode, early, late, extra)
    out = run(app, items, dice, partitions, seed)
    check(kind, mode, early, out, followed, left_of(kind, mode, early, items, partitions))


# ── windows over rows that are taken back ───────────────────────────────────────────────────────

CHANGING = timedelta(seconds=2)  # the size of the windows above


def declare_over_changes(kind, mode, early, late, extra, above):
    app = ms.App("every", log="unused", buckets=2)
    topic = app.topic("events", {"at": datetime, "key": str, "n": int}, key="key")
    stream = topic.stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None), lateness=LATENESS
    )
    changes = stream.window(ms.tumbling(CHANGING), by="key").emit(above, early="each")
    changes = changes.agg(v=ms.sum("n"), m=ms.count()).filter(pl.col("m") != 2)
    windowed = changes.window(window(kind), by="key")
    rows = windowed.emit(**emit_arguments(mode, early, late, extra)).agg(
        n=ms.count(), s=ms.sum("v")
    )
    as_view(rows)
    as_filter(rows)
    as_topic(rows)
    return app


def left_over_changes(kind, mode, items):
    """Return what must be left of windows over those of which not exactly two events are left."""
    sums = defaultdict(list)
    for item in items:
        if not isinstance(item, float):
            sums[item[1], item[0] // 2 * 2 + 2].append(item[2])
    # They come in the order of time, and each has seen all before it.
    made = sorted(
        (
            Came(end - 1e-6, key, sum(ns), end - 1e-6)
            for (key, end), ns in sums.items()
            if len(ns) != 2
        ),
        key=lambda one: one.time,
    )
    left = emit_model.windows_left(kind, made)
    if kind in ("count", "count with slide"):
        return [one for one in left if one.n == emit_model.COUNT]
    return left


def try_out_over_changes(kind, mode, early, late, extra, seed):
    dice = random.Random(seed)
    above = dice.choice(["update", "retract"])
    why = refused(kind, mode, early, late, extra, changes=True)
    if why is not None:
        with pytest.raises(ConfigError, match=why):
            declare_over_changes(kind, mode, early, late, extra, above)
        return
    items = drawn_events(dice, in_order=late is None, ties=True)
    app = declare_over_changes(kind, mode, early, late, extra, above)
    out = run(app, items, dice, dice.choice(PARTITIONS), seed)
    assert out.late == 0
    check_rows(kind, mode, out, ("view", "filter"), left_over_changes(kind, mode, items))


def case_id(kind, mode, early, late, extra, seed):
    return f"{kind}, {mode}, early {early}, late {late}, {extra}, seed {seed}"


OVER_CHANGES = ("final", "update", "discard", "retract")
FIRST = [(try_out, kind, mode) for kind in KINDS for mode in MODES]
SECOND = [(try_out_over_changes, kind, mode) for kind in KINDS for mode in OVER_CHANGES]
WAYS = [
    pytest.param(
        tried, kind, mode, id=f"{kind}, {mode}" + (" over changes" if tried is not try_out else "")
    )
    for tried, kind, mode in (*FIRST, *SECOND)
]


@pytest.mark.parametrize(("tried", "kind", "mode"), WAYS)
def test_a_share_of_all_ways_to_emit_gives_what_is_left_or_is_refused(tried, kind, mode):
    dice = random.Random()
    for early, late, extra in dice.sample(EMITS, max(1, some(20) // 5)):
        seed = dice.getrandbits(30)
        print(case_id(kind, mode, early, late, extra, seed))
        tried(kind, mode, early, late, extra, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)  # 162 ways
@pytest.mark.parametrize(("tried", "kind", "mode"), WAYS)
def test_every_way_to_emit_gives_what_is_left_or_is_refused(tried, kind, mode):
    for early, late, extra in EMITS:
        seed = random.getrandbits(30)
        print(case_id(kind, mode, early, late, extra, seed))
        tried(kind, mode, early, late, extra, seed)
