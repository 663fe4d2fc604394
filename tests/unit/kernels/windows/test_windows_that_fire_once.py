"""Windows that fire once: against a naive model event by event, and Beam's published case (E15).

Sessions that do are in ``tests/unit/kernels/sessions``, but for what Beam says of merging them.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.windows.count_windows import CountWindow
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)
NEVER = -(10**9)


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int = 1


def event(at, key, n=1):
    return Event(START + timedelta(seconds=at), key, n)


def seconds(at):
    return (at - START).total_seconds()


def declared(window, early, *, mode="update", lateness=0, policy="drop", delay=0, **emit):
    app = ms.App("once", log="unused", buckets=2)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark(timedelta(seconds=delay), idle=None),
        lateness=timedelta(seconds=lateness),
        late=policy,
    )
    windowed = stream.window(window, by="key", name="windows").emit(mode, early=early, **emit)
    out = windowed.agg(n=ms.count(), total=ms.sum("n"), values=ms.list("n"))
    counted = isinstance(window, CountWindow)
    out.view("out", key=["window_number" if counted else "window_start", "window_end", "key"])
    return app


def told(table):
    found = defaultdict(list)
    for row in table.to_dicts() if table.width else ():
        window = seconds(row["window_start"]), seconds(row["window_end"]), row["key"]
        if "window_number" in row:
            window = row["window_number"], row["key"]
        pane = row.get("pane_kind"), row.get("pane_index"), row.get("pane_last")
        found[window].append((*pane, row.get("__diff", 1), sorted(row["values"]), row["total"]))
    return dict(found)


class OnePane:
    """A window of one key, as the rule tells it: one pane, at its trigger or at its end."""

    def __init__(self, end, firing):
        self.end, self.firing, self.events, self.due = end, firing, [], None
        self.fired = self.ended = None

    def tick(self, clock):
        if self.due is not None and clock >= self.due and not self.fired and not self.ended:
            self.fired = "early"

    def take(self, number, clock):
        """Return whether the event is taken."""
        if self.fired:
            return False
        self.events.append(number)
        if isinstance(self.firing, int) and len(self.events) == self.firing:
            self.fired = "early"
        if isinstance(self.firing, float) and self.due is None:
            self.due = clock + self.firing
        return True

    def reach(self, watermark):
        if watermark >= self.end:
            self.ended = True
            self.fired = self.fired or "on_time"


def holding(kind, at):
    if kind == "cumulating":
        start = at // 12 * 12
        return [(start, start + size) for size in (4, 8, 12) if at < start + size]
    size, slide = {"tumbling": (10, 10), "hopping": (10, 4), "gaps": (4, 10)}[kind]
    starts = range(int(at // slide * slide), int(at - size), -slide)
    return [(start, start + size) for start in starts]


def window_of(kind):
    if kind == "tumbling":
        return ms.tumbling("10 seconds")
    if kind == "cumulating":
        return ms.cumulating("12 seconds", "4 seconds")
    size, slide = {"hopping": (10, 4), "gaps": (4, 10)}[kind]
    return ms.hopping(timedelta(seconds=size), timedelta(seconds=slide), allow_gaps=True)


def model(rows, *, partitions, kind, delay, firing):
    seen = dict.fromkeys(range(partitions), NEVER)
    windows, books, clock = {}, Counter(), 0.0
    for row in rows:
        if isinstance(row, float):
            clock += row
            for window in windows.values():
                window.tick(clock)
            continue
        at, partition = seconds(row.at), partition_of(row.key.encode(), partitions)
        reached = seen[partition] - delay
        inside = holding(kind, at)
        open_for_it = [(start, end) for start, end in inside if end > reached]
        taken = 0
        for start, end in open_for_it:
            window = windows.setdefault((start, end, row.key), OnePane(end, firing))
            taken += window.take(row.n, clock)
        books["windows_closed"] += len(open_for_it) - taken
        books["windows_missed"] += len(inside) - len(open_for_it)
        late = inside and not open_for_it
        books["late" if late else "held" if taken else "filtered"] += 1
        seen[partition] = max(seen[partition], at)
        watermark = min(seen.values()) - delay
        for window in windows.values():
            window.reach(watermark)
    return windows, books


@settings(deadline=None, max_examples=some(30))
@given(
    drawn=st.lists(
        st.tuples(st.integers(-30, 70), st.sampled_from("abcdef"), st.integers(-1, 3))
        | st.sampled_from([3.0, 10.0]),
        max_size=40,
    ),
    mode=st.sampled_from(["update", "discard", "retract"]),
    firing=st.sampled_from([1, 2, 3, 5.0, 12.0]),
    kind=st.sampled_from(["tumbling", "hopping", "gaps", "cumulating"]),
    delay=st.sampled_from([0, 7, 30]),
    lateness=st.sampled_from([0, 40]),
    policy=st.sampled_from(["drop", "side"]),
    suppress=st.booleans(),
    panes=st.booleans(),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_a_window_has_the_one_pane_of_the_model(
    rows_given, drawn, mode, firing, kind, delay, lateness, policy, suppress, panes, partitions, batches, seed
):  # fmt: skip
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    windows, books = model(rows, partitions=partitions, kind=kind, delay=delay, firing=firing)
    trigger = ms.after_count(firing) if isinstance(firing, int) else timedelta(seconds=firing)
    app = declared(
        window_of(kind), ms.once(trigger), mode=mode, lateness=lateness, policy=policy, delay=delay,
        suppress_unchanged=suppress, panes=panes,
    )  # fmt: skip
    given_rows = [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]
    out = rows_given(app, {"events": given_rows}, batches=batches, partitions=partitions, seed=seed)
    expected = {
        key: [
            (*((w.fired, 0, True) if panes else (None,) * 3), 1, sorted(w.events), sum(w.events)),
        ]
        for key, w in windows.items()
        if w.fired
    }
    assert told(out.rows["out"]) == expected
    line = out.books.get("windows", Counter())
    assert {name: line[name] for name in books} == dict(books)
    assert line["read"] == sum(books[name] for name in ("held", "late", "filtered"))


def timed_out_model(rows, *, partitions, count, timeout, firing):
    """Count windows that are timed out: one of a key at a time, which has fired or not."""
    seen, windows, numbers, books = defaultdict(lambda: NEVER), {}, Counter(), Counter()
    opened, clock = {}, 0.0

    def reach(key, watermark):
        if key in opened and watermark >= opened[key][0]:
            window = windows[numbers[key], key]
            window.fired = window.fired or "on_time"
            window.ended = True
            del opened[key]
            numbers[key] += 1

    for row in rows:
        if isinstance(row, float):
            clock += row
            for window in windows.values():
                window.tick(clock)
            continue
        at, key, partition = seconds(row.at), row.key, partition_of(row.key.encode(), partitions)
        reach(key, seen[partition])
        if key not in opened:
            opened[key] = at + timeout, 0
            windows[numbers[key], key] = OnePane(None, firing)
        due, came = opened[key]
        opened[key] = due, came + 1
        window = windows[numbers[key], key]
        full = came + 1 == count
        if full and not window.fired:
            window.events.append(row.n)
            window.fired, taken = "on_time", True
        else:
            taken = window.take(row.n, clock)
        if full:
            del opened[key]
            numbers[key] += 1
        books["windows_closed"] += not taken
        books["held" if taken else "filtered"] += 1
        seen[partition] = max(seen[partition], at)
        for other in list(opened):
            reach(other, min(seen[number] for number in range(partitions)))
    return windows, books


def count_model(rows, *, count, slide, firing):
    windows, books, places, clock = {}, Counter(), Counter(), 0.0
    for row in rows:
        if isinstance(row, float):
            clock += row
            for window in windows.values():
                window.tick(clock)
            continue
        place = places[row.key]
        places[row.key] += 1
        taken = 0
        inside = [n for n in range(place // slide + 1) if n * slide <= place < n * slide + count]
        for number in inside:
            window = windows.setdefault((number, row.key), OnePane(None, firing))
            full = place == number * slide + count - 1
            if full and not window.fired and len(window.events) == count - 1:
                window.events.append(row.n)
                window.fired, taken = "on_time", taken + 1
            else:
                taken += window.take(row.n, clock)
        books["windows_closed"] += len(inside) - taken
        books["held" if taken else "filtered"] += 1
    return windows, books


@settings(deadline=None, max_examples=some(30))
@given(
    drawn=st.lists(
        st.tuples(st.integers(-30, 70), st.sampled_from("abc"), st.integers(-1, 3))
        | st.sampled_from([3.0, 10.0]),
        max_size=40,
    ),
    mode=st.sampled_from(["update", "discard", "retract"]),
    firing=st.sampled_from([1, 2, 3, 5, 5.0, 12.0]),
    count=st.integers(1, 6),
    slide=st.integers(1, 6),
    timeout=st.sampled_from([None, 1, 7, 20, 60]),
    suppress=st.booleans(),
    panes=st.booleans(),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_a_count_window_has_the_one_pane_of_the_model(
    rows_given, drawn, mode, firing, count, slide, timeout, suppress, panes, partitions, batches, seed
):  # fmt: skip
    rows = [d if isinstance(d, float) else event(*d) for d in drawn]
    if timeout is None:
        slide, until = min(count, slide), None
        windows, books = count_model(rows, count=count, slide=slide, firing=firing)
    else:
        slide, until = count, timedelta(seconds=timeout)
        windows, books = timed_out_model(
            rows, partitions=partitions, count=count, timeout=timeout, firing=firing
        )
    trigger = ms.after_count(firing) if isinstance(firing, int) else timedelta(seconds=firing)
    window = ms.count_window(count, slide=slide, timeout=until, unbounded=True)
    app = declared(window, ms.once(trigger), mode=mode, suppress_unchanged=suppress, panes=panes)
    given_rows = [testing.Tick(timedelta(seconds=r)) if isinstance(r, float) else r for r in rows]
    out = rows_given(app, {"events": given_rows}, batches=batches, partitions=partitions, seed=seed)
    expected = {
        key: [
            (*((w.fired, 0, True) if panes else (None,) * 3), 1, sorted(w.events), sum(w.events)),
        ]
        for key, w in windows.items()
        if w.fired
    }
    assert told(out.rows["out"]) == expected
    line = out.books.get("windows", Counter())
    assert {name: line[name] for name in books} == dict(books)
    assert line["read"] == line["held"] + line["filtered"]


@pytest.mark.parametrize("seed", range(20))
def test_a_session_that_merges_with_one_that_has_fired_is_finished_too(rows_given, seed):
    # Beam, AfterPane.onMerge: a trigger that is finished in any of the windows that merge is finished.
    app = declared(ms.session("10 seconds"), ms.once(ms.after_count(2)), panes=True, delay=60)
    rows = [event(0, "a", 1), event(5, "a", 2), event(20, "a", 3), event(12, "a", 4)]
    rows += [event(28, "a", 5), event(50, "a", 6), event(200, "a", 9)]
    out = rows_given(app, {"events": rows}, batches=1 + seed % 6, seed=seed)
    assert told(out.rows["out"]) == {
        (0, 15, "a"): [("early", 0, True, 1, [1, 2], 3)],
        (50, 60, "a"): [("on_time", 0, True, 1, [6], 6)],
    }
    line = out.books["windows"]
    assert (line["held"], line["filtered"], line["windows_closed"]) == (4, 3, 3)


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_a_session_can_fire_once_by_running_time(rows_given, batches):
    app = declared(ms.session("10 seconds"), ms.once("30 seconds"), panes=True, delay=60)
    later = testing.Tick("31 seconds")
    rows = [
        event(0, "a", 1),
        event(9, "a", 2),
        later,
        event(12, "b", 3),
        event(15, "a", 4),
        event(300, "a", 5),
    ]
    out = rows_given(app, {"events": rows}, batches=batches, partitions=1, seed=batches)
    assert told(out.rows["out"]) == {
        (0, 19, "a"): [("early", 0, True, 1, [1, 2], 3)],
        (12, 22, "b"): [("on_time", 0, True, 1, [3], 3)],
    }


@pytest.mark.parametrize("trigger", ["each", "5 seconds"])
def test_what_count_windows_emit_once_is_in_time_for_the_windows_behind_them(trigger):
    app = ms.App("behind", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    first = stream.window(ms.count_window(3, unbounded=True), by="key").emit(
        "retract", early=ms.once(trigger)
    )
    above = first.agg(n=ms.sum("n"))
    above.window(ms.tumbling("10 seconds"), by="key").agg(total=ms.sum("n")).view("out")
    rows = [
        event(1, "a"),
        event(2, "a"),
        event(25, "b"),
        testing.Tick("6 seconds"),
        event(100, "c"),
    ]
    out = testing.run(app, {"events": [*rows, event(200, "d")]}, partitions=1, batches=6)
    assert out.late == 0
    assert out["out"]["total"].sum() >= 2


@pytest.mark.parametrize("mode", ["update", "retract"])
@pytest.mark.parametrize("kind", ["session", "tumbling"])
def test_what_fires_once_comes_with_the_signs_of_its_mode(kind, mode):
    window = ms.session("2 seconds") if kind == "session" else ms.tumbling("10 seconds")
    app = ms.App("signs", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at")
    first = stream.window(window, by="key").emit(mode, early=ms.once(ms.after_count(2)))
    rows = first.agg(n=ms.count())
    rows.to("rows", partitions=1)
    above = rows.window(ms.tumbling("1 day"), by="key").emit("update")
    above.agg(total=ms.sum("n"), most=ms.max("n")).view("out")
    given_rows = [event(1, "a"), event(2, "a"), event(3, "a")]
    out = testing.run(app, {"events": given_rows}, partitions=1)
    assert out["out"].select("total", "most").rows() == [(2, 2)]
    assert ("_diff" in out.topic("rows").columns) == (mode == "retract")


@pytest.mark.parametrize("seed", range(20))
def test_a_trigger_that_is_not_repeated_closes_its_window(rows_given, seed):
    # semantics.md, E15 (Beam): AfterCount(2), events 1, 2, 3 in a window: one pane {1, 2}; 3 is dropped.
    app = declared(ms.tumbling("10 seconds"), ms.once(ms.after_count(2)), panes=True)
    rows = [event(1, "a", 1), event(2, "a", 2), event(3, "a", 3), event(60, "a", 9)]
    out = rows_given(app, {"events": rows}, batches=1 + seed % 5, seed=seed)
    (pane,) = told(out.rows["out"])[0, 10, "a"]
    assert pane == ("early", 0, True, 1, [1, 2], 3)
    line = out.books["windows"]
    assert (line["held"], line["filtered"], line["windows_closed"], line["late"]) == (3, 1, 1, 0)


WINDOWS = {
    "hopping": ms.hopping("10 seconds", "5 seconds"),
    "session": ms.session("2 seconds"),
    "count": ms.count_window(7, slide=3, unbounded=True),
    "count with timeout": ms.count_window(7, timeout="12 seconds", unbounded=True),
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_answers_are_the_same_under_all_batchings_and_crashes(window):
    app = declared(window, ms.once(ms.after_count(3)), panes=True)
    keys = ["a", "d", "b", "a", "", "é"]
    rows = [event(n * 7 % 50 + n // 4, keys[n % 6], n) for n in range(120)]
    for partitions in (1, 4, 7):  # whether an event is late depends on its partition
        testing.replay(app, {"events": rows}, batchings=3, partitions=(partitions,))


def test_of_a_window_that_has_expired_no_mark_is_left(rows_given):
    app = declared(ms.tumbling("10 seconds"), ms.once("each"))
    rows = [event(n, key) for n in range(0, 400, 3) for key in "abc"] + [event(900, "end")]
    out = rows_given(app, {"events": rows}, batches=40)
    states = out.engine.states.values()
    held = [t for s in states for store in s.stores.values() for t in store.tables.values()]
    assert {key for table in held for key in table["key"].to_pylist()} <= {"end"}


def test_what_cannot_fire_once_is_refused():
    def refused(match):
        return pytest.raises(ConfigError, match=match)

    for what in ("batch", None, ms.once("each")):
        with refused("once has the trigger"):
            ms.once(what)
    with refused("once's trigger"):
        ms.once("often")
    with refused(r"once\(…\) and late='batch'"):
        declared(ms.tumbling("10 seconds"), ms.once("each"), late="batch")
    with refused('late="correct": nothing would correct'):
        declared(ms.tumbling("10 seconds"), ms.once("each"), policy="correct", lateness=5)
    with refused("a final row comes once"):
        declared(ms.tumbling("10 seconds"), ms.once("each"), mode="final")
    app = ms.App("changes", log="unused")
    stream = app.topic("events", Event, key="key").stream(time="at")
    above = stream.window(ms.tumbling("1 second"), by="key").emit("retract").agg(n=ms.sum("n"))
    with refused("after rows of which some take others back"):
        above.window(ms.tumbling("10 seconds")).emit("update", early=ms.once("each"))
