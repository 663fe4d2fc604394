"""Sessions over rows that are taken back are the sessions of what is left, by a naive model."""

from collections import Counter
from datetime import timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_rows import (
    START,
    UNIT,
    Change,
    Event,
    Kernel,
    at,
    histories,
    signed_stream,
    summed,
    told,
)

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, CorruptionError

GAP = 5
AGGREGATES = {"rows": ms.count(), "total": ms.sum("n"), "top": ms.max("n"), "avg": ms.mean("n")}
drawn = settings(deadline=None, max_examples=some(25))
kinds = st.fixed_dictionaries(
    {
        "inclusive": st.booleans(),
        "max_length": st.sampled_from([None, None, 12]),
        "own_gaps": st.booleans(),
    }
)
PLAIN = {"inclusive": True, "max_length": None, "own_gaps": False}


def window_of(kind):
    length = kind["max_length"] and kind["max_length"] * UNIT
    options = {"gap_inclusive": kind["inclusive"], "max_length": length}
    if kind["own_gaps"]:
        gap = pl.duration(microseconds=pl.col("n") + GAP)
        return ms.session(gap, max_gap=6 * UNIT, **options)
    return ms.session(GAP * UNIT, **options)


def kernel_of(mode, kind=PLAIN, *, lateness=0, policy="drop", **emit):
    stream = signed_stream(lateness=lateness, late=policy)
    windowed = stream.window(window_of(kind), by="key").emit(mode, **emit)
    return Kernel.of(windowed.agg(**AGGREGATES))


class Model:
    """Puts the events that are left together anew after every batch."""

    def __init__(self, kind, lateness):
        self.kind, self.lateness = kind, lateness
        self.events, self.closed = [], []  # (key, time, n, end, till, back), (key, till, row)

    def span(self, change):
        gap = min(change.n + GAP, 6) if self.kind["own_gaps"] else GAP
        end = change.time + gap
        till = end if self.kind["inclusive"] else end - 1
        if length := self.kind["max_length"]:
            cut = (change.time // length + 1) * length
            end, till = min(end, cut), min(till, cut - 1)
        return end, till

    def batch(self, changes, seen, now):
        """Take a batch; give how many rows were late."""
        late = 0
        for change in sorted(changes, key=lambda c: -c.diff):
            end, till = self.span(change)
            if seen > till + self.lateness:
                late += 1
                continue
            event = (change.key, change.time, change.n, end, till)
            if change.diff > 0:
                self.events.append((*event, max(change.time, seen - self.lateness)))
            else:
                self.events.remove(max(e for e in self.events if e[:5] == event))
        gone = [s for s in self.sessions() if max(e[4] for e in s) + self.lateness < now]
        ended = [(s[0][0], max(e[4] for e in s)) for s in gone]
        over = [(key, till) for key, till, _ in self.closed] + ended
        for session, (key, till) in zip(gone, ended, strict=True):
            self.closed.append((key, till, self.row(session, over)))
            for event in session:
                self.events.remove(event)
        return late

    def sessions(self):
        left, found = list(self.events), []
        while left:
            part = [left.pop()]
            while met := [
                e for e in left if any(e[0] == o[0] and e[5] <= o[4] and o[5] <= e[4] for o in part)
            ]:
                part += met
                for e in met:
                    left.remove(e)
            found.append(part)
        return found

    def row(self, session, over):
        key, start, back = session[0][0], min(e[1] for e in session), min(e[5] for e in session)
        values = [e[2] for e in session]
        overlaps = any(k == key and start <= till < back for k, till in over)
        end = max(e[3] for e in session)
        mean = sum(values) / len(values)
        return (start, end, key, len(values), sum(values), max(values), mean, overlaps)

    def rows(self, visible):
        over = [(key, till) for key, till, _ in self.closed]
        opened = [self.row(s, over) for s in self.sessions() if visible(max(e[4] for e in s))]
        return Counter([row for _, _, row in self.closed] + opened)


@pytest.mark.parametrize("early", ["batch", None])
@drawn
@given(history=histories(), kind=kinds, lateness=st.sampled_from([0, 3, 30]))
def test_what_was_emitted_and_not_retracted_are_the_sessions_of_the_events_left(
    early, history, kind, lateness
):
    kernel, model = (
        kernel_of("retract", kind, lateness=lateness, early=early),
        Model(kind, lateness),
    )
    bag = Counter()
    for number, (changes, watermark) in enumerate(history):
        late = model.batch(changes, kernel.watermark, watermark)
        before_us = kernel.operator.output_watermark(kernel.watermark)
        result = kernel.batch(changes, watermark)
        assert result.counts["late"] == late
        if result.rows is not None and number:
            assert result.rows["__time"].min() >= before_us
        for row, count in summed(told(result.rows)).items():
            bag[row] += count
        expected = model.rows(lambda till: early == "batch" or till < watermark)  # noqa: B023
        assert bag == expected


@drawn
@given(history=histories(), kind=kinds, lateness=st.sampled_from([0, 3, 30]))
def test_final_sessions_come_once_and_in_time_for_the_next_operator(history, kind, lateness):
    kernel, model = kernel_of("final", kind, lateness=lateness), Model(kind, lateness)
    said = Counter()
    for number, (changes, watermark) in enumerate(history):
        model.batch(changes, kernel.watermark, watermark)
        before_us = kernel.operator.output_watermark(kernel.watermark)
        result = kernel.batch(changes, watermark)
        if result.rows is not None and number:
            assert result.rows["__time"].min() >= before_us
        assert all(sign == 1 for sign, *_ in told(result.rows))
        said.update(tuple(row) for _, *row in told(result.rows))
        assert said == model.rows(lambda _: False)


@pytest.mark.parametrize("how", ["update", "correct"])
@drawn
@given(history=histories(), kind=kinds, lateness=st.sampled_from([0, 3, 30]))
def test_an_update_sets_a_session_or_deletes_it(how, history, kind, lateness):
    if how == "correct":
        lateness = lateness or 3
        kernel = kernel_of("final", kind, lateness=lateness, policy="correct")
    else:
        kernel = kernel_of("update", kind, lateness=lateness)
    model, view, places = Model(kind, lateness), {}, 3 if kind["own_gaps"] else 1
    for changes, watermark in history:
        model.batch(changes, kernel.watermark, watermark)
        for sign, *row in told(kernel.batch(changes, watermark).rows):
            place = (row[0], row[2], row[1]) if places == 3 else (row[0], row[2])
            view[place] = tuple(row) if sign > 0 else None
        expected = model.rows(lambda till: how == "update" or till < watermark)  # noqa: B023
        assert Counter(row for row in view.values() if row is not None) == expected


def story(result):
    return told(result.rows, "window_start", "window_end", "total")


def test_two_sessions_are_two_again_when_the_event_that_joined_them_is_taken_back():
    kernel = kernel_of("retract")
    kernel.batch([Change(0, "a", 1, 1), Change(8, "a", 3, 1)], 0)
    joined = kernel.batch([Change(4, "a", 2, 1)], 2)
    assert story(joined) == [(-1, 0, 5, 1), (-1, 8, 13, 3), (1, 0, 13, 6)]
    parted = kernel.batch([Change(4, "a", 2, -1)], 3)
    assert story(parted) == [(-1, 0, 13, 6), (1, 0, 5, 1), (1, 8, 13, 3)]
    gone = kernel.batch([Change(8, "a", 3, -1)], 4)
    assert story(gone) == [(-1, 8, 13, 3)]


def test_what_is_left_of_a_session_and_over_by_then_comes_at_once():
    kernel = kernel_of("final")
    kernel.batch([Change(0, "a", 1, 1), Change(4, "a", 2, 1), Change(8, "a", 3, 1)], 8)
    assert story(kernel.batch([Change(4, "a", 2, -1)], 8)) == [(1, 0, 5, 1)]
    assert story(kernel.batch([], 14)) == [(1, 8, 13, 3)]


def test_a_retraction_is_late_when_the_events_own_session_has_expired():
    kernel = kernel_of("update")
    kernel.batch([Change(0, "a", 1, 1), Change(4, "a", 2, 1), Change(8, "a", 3, 1)], 10)
    late = kernel.batch([Change(4, "a", 2, -1)], 10)
    assert (+late.counts, late.rows) == ({"late": 1}, None)


@pytest.mark.parametrize("mode", ["final", "update", "retract"])
def test_taking_back_what_never_came_is_damage(mode):
    kernel = kernel_of(mode)
    kernel.batch([Change(5, "a", 1, 1)], 0)
    with pytest.raises(CorruptionError, match="take back an event that it does not hold"):
        kernel.batch([Change(5, "a", 1, -1), Change(5, "a", 1, -1)], 1)


def test_nothing_is_held_when_all_sessions_are_over():
    kernel = kernel_of("update")
    for n in range(60):
        kernel.batch([Change(n * 7, "ab"[n % 2], 1, 1), Change(n * 7, "c", 1, 1)], n * 7)
        kernel.batch([Change(n * 7, "c", 1, -1)], n * 7)
    for n in range(500, 700, 20):
        kernel.batch([], n)
    runs = kernel.message["runs"]
    assert sum(entry[4] for family in ("events", "closed") for entry in runs.get(family, [])) == 0
    assert kernel.message["values"]["waiting"] == {}


# ── behind windows that retract ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["final", "update", "retract"])
@settings(deadline=None, max_examples=some(12))
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.integers(-3, 3)), max_size=40
    ),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    crash=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_behind_a_window_that_retracts_sessions_are_those_of_what_it_shows_at_last(
    mode, rows, partitions, batches, crash, seed
):
    app = ms.App("behind", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=20 * UNIT
    )
    sums = stream.window(ms.tumbling(2 * UNIT), by="key").emit("retract").agg(n=ms.sum("n"))
    shown = sums.filter(pl.col("n") > 0)
    shown.view("shown")
    sessions = shown.window(ms.session(GAP * UNIT), by="key").emit(mode).agg(**AGGREGATES)
    sessions.view("out")
    last = sessions if mode == "retract" else None
    if last is not None:  # sessions of sessions
        last.window(ms.tumbling(10 * UNIT), by="key").agg(sessions=ms.count()).view("counts")
    end = testing.Watermark("events", at=at(10**6))
    run = testing.run(
        app,
        {"events": [*(Event(at(time), key, n) for time, key, n in rows), end]},
        partitions=partitions,
        batches=batches,
        crash=crash,
        seed=seed,
    )
    table = run["shown"] if "shown" in run.views else pl.DataFrame()
    changes = [
        Change((row["window_end"] - START) // UNIT - 1, row["key"], row["n"], 1)
        for row in table.to_dicts()
    ]
    model = Model(PLAIN, 0)
    model.batch(changes, -1, 10**6)
    names = ["window_start", "window_end", "key", *AGGREGATES, "overlaps_closed"]
    found = told(run["out"].select(names)) if rows else []
    expected = model.rows(lambda _: True)
    assert Counter(tuple(row) for _, *row in found) == expected
    assert run.late == run.ledger.filter(pl.col("step").str.starts_with("tumbling"))["late"].sum()
    if last is not None and rows:
        counts = Counter()
        for row in expected:
            counts[(row[1] - 1) // 10 * 10, row[2]] += 1
        table = run["counts"].with_columns(pl.col("window_start").dt.epoch("us"))
        assert {(s, k): n for s, k, n in table["window_start", "key", "sessions"].rows()} == counts


def test_what_sessions_over_rows_that_are_taken_back_cannot_do_is_refused():
    def refused(match):
        return pytest.raises(ConfigError, match=match)

    with refused("strict=True"):
        signed_stream().window(ms.session("1 minute", strict=True)).agg(rows=ms.count())
    with refused("leave panes=True out of emit"):
        kernel_of("update", panes=True)
    with refused("leave suppress_unchanged=False out of emit"):
        kernel_of("update", suppress_unchanged=False)
    with refused('emit\'s early is "batch" or None'):
        kernel_of("retract", early=timedelta(seconds=1))
    with refused('emit\'s late is "batch" or None'):
        kernel_of("retract", late=ms.after_count(3))
    with refused("cannot be emitted as parts"):
        kernel_of("discard")
    with refused("first is over rows that can be retracted"):
        signed_stream().window(ms.session("1 minute")).agg(x=ms.first("n"))
