"""What the ledger of state must find: a row or an event that is lost, doubled or changed in it."""

import pkgutil
import random
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import CorruptionError
from millstream.kernels.frames import DIFF, ROWS
from millstream.kernels.state import sorted_runs
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.state.timers import Timers, WaitingLedger
from millstream.kernels.windows.count_windows import CountWindow
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    key: str
    n: int
    id: str
    gap_s: int = 0


def at(seconds):
    return START + timedelta(seconds=seconds)


def events(count=60, *, seed=3):
    """Give events that are a little out of order, with clock ticks among them."""
    dice = random.Random(seed)
    rows, time = [], 0
    for number in range(count):
        time += dice.choice([0, 1, 1, 2])
        late = dice.choice([0, 0, 0, 0, 1, 4, 9])
        event = Event(
            at(max(0, time - late)),
            dice.choice("abcdef"),
            dice.randint(1, 9),
            f"{number - (number % 7 == 0)}",
            dice.randint(2, 6),
        )
        rows.append(event)
        if number % 20 == 19:
            rows.append(testing.Tick(after="4 seconds"))
    return [*rows, testing.Watermark("events", at=at(10_000))]


EVENTS = events()


def windowed(window, mode="final", **emit):
    def build(stream):
        out = stream.window(window, by="key").emit(mode, **emit)
        return out.agg(rows=ms.count(), total=ms.sum("n"))

    return build


def own_gaps():
    return ms.session(pl.duration(seconds=pl.col("gap_s")), max_gap="6 seconds")


def spent(stream):
    return stream.budget("key", cost="n", limit=pl.lit(40))


def deduplicated(**options):
    return lambda stream: stream.dedup("id", within="20 seconds", **options)


TUMBLING, HOPPING = ms.tumbling("10 seconds"), ms.hopping("12 seconds", "5 seconds")
SHORT = ms.tumbling("2 seconds")  # several of which lie in one slot of state
SESSION = ms.session("3 seconds")
BY_COUNT = {"early": ms.after_count(3), "late": ms.after_count(2)}
BY_TIME = {"early": "6 seconds", "late": "6 seconds"}
KINDS = {
    "final": windowed(TUMBLING),
    "final hopping": windowed(HOPPING),
    "final corrected": windowed(TUMBLING),
    "update": windowed(TUMBLING, "update"),
    "update hopping": windowed(HOPPING, "update"),
    "retract": windowed(HOPPING, "retract", early=None),
    "discard": windowed(TUMBLING, "discard"),
    "update by count": windowed(HOPPING, "update", **BY_COUNT),
    "discard by count": windowed(TUMBLING, "discard", panes=True, **BY_COUNT),
    "update by time": windowed(TUMBLING, "update", **BY_TIME),
    "discard by time": windowed(HOPPING, "discard", **BY_TIME),
    "final of short windows": windowed(SHORT),
    "update of short windows": windowed(SHORT, "update", early=None),
    "retract of short windows by count": windowed(SHORT, "retract", **BY_COUNT),
    "discard of short windows by time": windowed(SHORT, "discard", panes=True, **BY_TIME),
    "sessions": windowed(SESSION),
    "sessions update": windowed(SESSION, "update"),
    "sessions strict": windowed(ms.session("3 seconds", strict=True), "retract", early=None),
    "sessions discard": windowed(SESSION, "discard"),
    "sessions by count": windowed(SESSION, "discard", **BY_COUNT),
    "sessions by time": windowed(SESSION, "retract", **BY_TIME),
    "sessions of a length": windowed(ms.session("3 seconds", max_length="10 seconds")),
    "sessions of own gaps": windowed(own_gaps(), "update"),
    "count": windowed(ms.count_window(5, unbounded=True)),
    "count sliding": windowed(ms.count_window(6, slide=2, unbounded=True)),
    "count with timeout": windowed(ms.count_window(4, timeout="7 seconds", unbounded=True)),
    "sliding": windowed(ms.sliding("5 seconds")),
    "sliding update": windowed(ms.sliding("5 seconds"), "update"),
    "dedup": deduplicated(),
    "dedup checked": deduplicated(
        bloom=ms.bloom(expect=50, fpr=0.001, rotate="10 seconds", exact_check=True)
    ),
    "budget": spent,
}


def app_of(kind, buckets=1):
    app = ms.App("held", log="unused", buckets=buckets)
    stream = app.topic("events", Event, key="key").stream(
        time="at",
        watermark=ms.watermark("2 seconds", idle=None),
        lateness="40 seconds" if "short" in kind else "6 seconds",
        late="correct" if "corrected" in kind else "drop",
    )
    KINDS[kind](stream).to("out")
    return app


def said(run, kind):
    """Give what came out as text, whatever the order; of parts, what they add up to.

    Which part an event is in may hang on a timer; that each is in one is what the ledger is about.
    """
    (table,) = run.rows.values()
    if "discard" in kind or "by time" in kind:
        sign = pl.col(DIFF) if DIFF in table.columns else 1
        whole = table.group_by("window_start", "window_end", "key")
        table = whole.agg((pl.col("rows", "total") * sign).sum())
    return sorted(map(str, table.drop("batch", strict=False).rows()))


# ── good runs ───────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=some(15))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    buckets=st.sampled_from([1, 4, 7]),
    partitions=st.sampled_from([1, 3]),
    batches=st.integers(1, 5),
    crashes=st.integers(0, 2),
    seed=st.integers(0, 999),
)
def test_the_ledger_of_a_good_run_balances_whatever_the_batches_buckets_and_restarts(
    kind, buckets, partitions, batches, crashes, seed
):
    app = app_of(kind, buckets)
    rows = items_of(app.topics["events"], events(50, seed=seed), partitions, seed)
    with tempfile.TemporaryDirectory() as folder:
        views, counts = Path(folder) / "views.db", {"events": partitions}
        engine = KernelEngine(app.plan(), views, counts, random.Random(seed))
        engine.run({"events": rows}, batches, crashes)
    assert engine.logs["events"][0].taken == len(engine.logs["events"][0].items)


# ── rows of state ───────────────────────────────────────────────────────────────────────────────

MONEY = "__charged"


@dataclass
class Damage:
    """Loses, doubles or changes a row of the n-th table of state that is read or written."""

    how: str
    nth: int
    counted_only: bool = False
    tables: int = 0
    done: bool = field(default=False)

    def __call__(self, rows):
        counted = next((name for name in (ROWS, MONEY) if name in rows.columns), None)
        if not rows.height or (counted is None and (self.counted_only or self.how == "changed")):
            return rows
        self.tables += 1
        return self._damaged(rows, counted) if self.tables == self.nth else rows

    def _damaged(self, rows, counted):
        at = random.Random(self.nth).randrange(rows.height)
        before, one, after = rows[:at], rows[at : at + 1], rows[at + 1 :]
        if self.how == "changed" and one[counted][0] is None:  # a mark that there is nothing
            return rows
        self.done = True
        middle = {
            "lost": [],
            "doubled": [one, one],
            "changed": [one.with_columns(pl.col(counted) + 1)] if counted else [one],
        }
        return pl.concat([before, *middle[self.how], after])


def damaged_run(kind, where, damage, rows_given):
    """Run with the damage; give what came out, or None if the ledger found it."""
    read, write = sorted_runs.polars_table, sorted_runs.to_arrow
    with pytest.MonkeyPatch.context() as patch:
        if where == "read":
            patch.setattr(sorted_runs, "polars_table", lambda table: damage(read(table)))
        else:
            patch.setattr(sorted_runs, "to_arrow", lambda rows: write(damage(rows)))
        try:
            run = rows_given(app_of(kind), {"events": EVENTS}, batches=2, partitions=2)
            return said(run, kind)
        except CorruptionError as error:
            assert "does not balance" in str(error) or "its manifest says" in str(error)
            return None
        except (pl.exceptions.PolarsError, IndexError):  # columns that do not fit stop it as well
            return None


# Of every event an update is told at once, so nothing is pending; what deduplication keeps is ids.
UNCOUNTED = {"discard", "discard by count", "sliding", "sliding update", "dedup", "dedup checked"}


@pytest.mark.parametrize(
    ("how", "where"),
    [("lost", "read"), ("doubled", "read"), ("changed", "read"), ("lost", "written")],
)
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - UNCOUNTED))
def test_a_row_of_events_that_is_damaged_in_state_is_found(kind, how, where, rows_given):
    for nth in range(1, 9):
        damage = Damage(how, nth, counted_only=True)
        if damaged_run(kind, where, damage, rows_given) is None:
            assert damage.done
            return
    pytest.fail("no damage was found")


# What these look up stays as it is, so nothing that is stored tells whether all of it was found.
NOT_REPLACED = {"dedup", "sliding update"}


@settings(deadline=None, max_examples=some(15))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    where=st.sampled_from(["read", "written"]),
    how=st.sampled_from(["lost", "doubled", "changed"]),
    nth=st.integers(1, 40),
)
def test_a_row_that_is_damaged_in_state_is_found_or_changes_nothing(
    kind, where, how, nth, rows_given
):
    assume(where == "written" or kind not in NOT_REPLACED)
    came_out = damaged_run(kind, where, Damage(how, nth), rows_given)
    if came_out is not None:
        assert came_out == damaged_run(kind, where, Damage(how, 0), rows_given)


# ── events on their way ─────────────────────────────────────────────────────────────────────────

LOSSES = [
    ("final", "windows.final:FinalWindowOperator._ending"),
    ("final hopping", "windows.final:FinalWindowOperator._ending"),
    ("final", "windows.final:FinalWindowOperator._merge"),
    ("update", "windows.panes:PaneWindowOperator._by_window"),
    ("update hopping", "windows.panes:PaneWindowOperator.explode_windows"),
    ("retract", "windows.pending_panes:PendingPanes.merged"),
    ("update by time", "windows.pending_panes:PendingPanes._time"),
    ("discard by count", "windows.pending_panes:PendingPanes._reduce"),
    ("update", "windows.pane_values:PaneValues.to_store"),
    ("discard by count", "windows.pane_values:PaneValues.to_store"),
    ("sessions", "sessions.open_sessions:OpenSessions.partials"),
    ("sessions update", "sessions.open_sessions:OpenSessions.merge_overlapping"),
    ("sessions discard", "sessions.open_sessions:OpenSessions.merge_overlapping"),
    ("sessions by count", "sessions.open_sessions:OpenSessions.merge_overlapping"),
    ("sessions of own gaps", "sessions.open_sessions:OpenSessions.one_row_per_event"),
    ("sessions of a length", "sessions.batch:SessionBatch._fired"),
    ("count", "windows.count_windows:CountWindowOperator._partials"),
    ("count sliding", "windows.count_windows:CountWindowOperator._partials"),
    ("count sliding", "windows.count_windows:CountWindowOperator.heads"),
    ("count with timeout", "windows.count_windows:CountWindowOperator._merged"),
    ("sliding", "windows.sliding_windows:SlidingWindowOperator.rows"),
    ("sliding", "windows.sliding_windows:SlidingWindowOperator.known"),
]


def once(change):
    """Change the first table that has rows."""
    left = [change]

    def changed(given):
        if isinstance(given, pl.DataFrame) and given.height and left:
            return left.pop()(given)
        return given

    return changed


@pytest.mark.parametrize(
    "change",
    [lambda rows: rows[1:], lambda rows: pl.concat([rows[:1], rows])],
    ids=["lost", "doubled"],
)
@pytest.mark.parametrize(("kind", "name"), LOSSES)
def test_what_a_step_loses_or_doubles_of_its_state_is_found(
    monkeypatch, rows_given, kind, name, change
):
    owner, _, attribute = f"millstream.kernels.{name}".rpartition(".")
    target, changed = pkgutil.resolve_name(owner), once(change)
    real = getattr(target, attribute)
    monkeypatch.setattr(target, attribute, lambda *given, **named: changed(real(*given, **named)))
    with pytest.raises(CorruptionError, match="does not balance"):
        rows_given(app_of(kind), {"events": EVENTS}, batches=2, partitions=2)


@pytest.mark.parametrize("kind", ["sessions", "sessions update", "count with timeout"])
def test_what_is_never_looked_at_again_because_its_timer_was_lost_is_found(
    monkeypatch, rows_given, kind
):
    due = Timers.due
    monkeypatch.setattr(Timers, "due", lambda timers, until: due(timers, until)[1:])
    with pytest.raises(CorruptionError, match="rows were waiting for a timer"):
        rows_given(app_of(kind), {"events": EVENTS}, batches=2, partitions=2)


def test_rows_that_wait_are_counted_until_their_time_has_come():
    state = OperatorState(MemoryRunStore())
    waiting, none = WaitingLedger("step", state, 10), np.empty(0, np.int64)
    waiting.update(none, np.array([5, 9, 12]), 4)
    waiting.update(np.array([5]), np.array([14]), 8)
    with pytest.raises(
        CorruptionError, match="1 more rows were waiting for a timer than were found"
    ):
        waiting.update(none, none, 9)
    waiting.update(np.array([9]), none, 9)
    with pytest.raises(CorruptionError, match="does not balance"):
        waiting.update(np.array([12, 14, 14]), none, 10)


@given(st.integers(1, 9), st.data(), st.integers(0, 60))
def test_places_in_count_windows_are_as_many_as_events_in_each_window(count, data, seen):
    window = CountWindow(count, data.draw(st.integers(1, count)))
    begun = range(0, seen, window.slide)
    held = sum(min(count, seen - first) for first in begun)
    assert window.taken_places(np.array([seen])).tolist() == [held]
