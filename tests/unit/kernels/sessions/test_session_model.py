"""Sessions of every kind are those of a naive model, in any batches and any number of partitions."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from session_model import Rules, run

import millstream as ms
from millstream import testing
from millstream.kernels.frames import DIFF
from millstream.log.murmur2 import partition_of

START = datetime(1970, 1, 1, tzinfo=UTC)
UNIT = timedelta(microseconds=1)
FAR = 10**6
UNSEEN = -(10**12)
GAP = 5


@dataclass
class Event:
    at: datetime
    key: str
    n: int = 0
    gap: int = GAP


def at(time):
    return START + time * UNIT


@dataclass
class Drawn:
    """One example: events in the order of the topic, with their partitions, and how they are read."""

    events: list
    partitions: int
    batches: int
    seed: int
    delay: int
    lateness: int
    spread: bool

    def __post_init__(self):
        dice = random.Random(self.seed)
        keyed = lambda key: partition_of(key.encode(), self.partitions)  # noqa: E731
        self.places = [
            dice.randrange(self.partitions) if self.spread else keyed(event.key)
            for event in self.events
        ]

    @property
    def items(self):
        """What goes into the topic; at the end every partition is flushed."""
        rows = zip(self.events, self.places, strict=True)
        flush = [(Event(at(FAR), f"z{p}"), p) for p in range(self.partitions)]
        return [testing.Row(event, partition=place) for event, place in (*rows, *flush)]

    @property
    def reached(self):
        """What each event's partition had reached before it."""
        seen, found = defaultdict(lambda: UNSEEN), []
        for event, place in zip(self.events, self.places, strict=True):
            found.append(seen[place] - self.delay if seen[place] > UNSEEN else UNSEEN)
            seen[place] = max(seen[place], (event.at - START) // UNIT)
        return found

    def in_order(self, rules, *, own_gaps):
        """The model's sessions, by key."""
        told = [
            (
                event.key,
                (event.at - START) // UNIT,
                event.gap if own_gaps else GAP,
                event.n,
                reached,
            )
            for event, reached in zip(self.events, self.reached, strict=True)
        ]
        by_place = sorted(zip(told, self.places, strict=True), key=lambda one: one[1])
        return run([event for event, _ in by_place], rules)


drawn = st.builds(
    Drawn,
    events=st.lists(
        st.builds(
            lambda time, key, n, gap: Event(at(time), key, n, gap),
            st.integers(-12, 40),
            st.sampled_from("ab"),
            st.integers(-3, 3),
            st.integers(1, 12),
        ),
        max_size=24,
    ),
    partitions=st.sampled_from([1, 4, 7]),
    batches=st.integers(1, 6),
    seed=st.integers(0, 99),
    delay=st.sampled_from([0, 3]),
    lateness=st.sampled_from([0, 2, 9, 100]),
    spread=st.booleans(),
)
kinds = st.fixed_dictionaries(
    {
        "inclusive": st.booleans(),
        "max_length": st.sampled_from([None, None, 12]),
        "strict": st.booleans(),
    }
)
checked = settings(
    deadline=None,
    max_examples=some(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def window_of(kind, *, own_gaps):
    gap = pl.duration(microseconds="gap") if own_gaps else GAP * UNIT
    return ms.session(
        gap,
        gap_inclusive=kind["inclusive"],
        strict=kind["strict"],
        max_length=kind["max_length"] and kind["max_length"] * UNIT,
        max_gap=12 * UNIT if own_gaps else None,
    )


def app_of(example, window, mode, policy, **emit):
    app = ms.App("sessions", log="unused")
    stream = app.topic("events", Event).stream(
        time="at",
        watermark=ms.watermark(example.delay * UNIT, idle=None),
        lateness=example.lateness * UNIT,
        late=policy,
    )
    windowed = stream.window(window, by="key").emit(mode, **emit)
    windowed.agg(rows=ms.count(), total=ms.sum("n")).view("out")
    return app


def emitted(rows_given, example, app):
    inputs = {"events": example.items}
    shape = {"batches": example.batches, "partitions": example.partitions, "seed": example.seed}
    return rows_given(app, inputs, **shape)


def near(rows):
    return [row for row in rows if row["window_start"] < at(FAR)]


def told(row):
    times = [(row[name] - START) // UNIT for name in ("window_start", "window_end")]
    return (*times, row["rows"], row["total"], row["overlaps_closed"])


def late_count(run, example):
    books = next((line for step, line in run.books.items() if step.startswith("session")), {})
    assert books.get("held", 0) + books.get("late", 0) == len(example.items)
    return books.get("late", 0)


# A session that had its on-time pane, and which an event makes reach just beyond the watermark again.
GROWING = Drawn(
    [Event(at(25), "b"), Event(at(35), "b2"), Event(at(28), "b")],
    partitions=1,
    batches=1,
    seed=0,
    delay=3,
    lateness=9,
    spread=False,
)
APART = {"inclusive": False, "max_length": None, "strict": False}


@pytest.mark.parametrize("policy", ["drop", "side"])
@pytest.mark.parametrize("own_gaps", [False, True], ids=["one gap", "own gaps"])
@checked
@given(example=drawn, kind=kinds)
def test_final_sessions_are_the_models(own_gaps, policy, example, kind, rows_given):
    model = example.in_order(Rules(lateness=example.lateness, **kind), own_gaps=own_gaps)
    app = app_of(example, window_of(kind, own_gaps=own_gaps), "final", policy)
    out = emitted(rows_given, example, app)
    found = sorted((row["key"], *told(row)) for row in near(out.rows["out"].to_dicts()))
    assert found == sorted((key, *row) for key, one in model.items() for row in one.answers)
    assert late_count(out, example) == sum(len(one.late) for one in model.values())


FIRINGS = {
    "batch": "batch",
    "each": "each",
    "in twos": ms.after_count(2),
    "in threes": ms.after_count(3),
    "none": None,
}
COUNTS = {"each": 1, "in twos": 2, "in threes": 3, "none": None, "batch": None}


@pytest.mark.parametrize("mode", ["update", "retract", "discard", "correct"])
@pytest.mark.parametrize("own_gaps", [False, True], ids=["one gap", "own gaps"])
@checked
@given(
    example=drawn,
    kind=kinds,
    early=st.sampled_from([*FIRINGS]),
    late=st.sampled_from([*FIRINGS]),
    panes=st.booleans(),
)
def test_what_a_view_holds_is_the_models_sessions(
    mode, own_gaps, example, kind, early, late, panes
):
    emit = {"early": FIRINGS[early], "late": FIRINGS[late], "panes": panes or mode == "discard"}
    if mode == "correct":
        emit = {} if late == "none" else {"late": FIRINGS[late]}
        example.lateness = example.lateness or 1  # without any there is nothing to correct
    lateness = 0 if late == "none" and mode != "correct" else example.lateness
    model = example.in_order(Rules(lateness=lateness, **kind), own_gaps=own_gaps)
    policy = "correct" if mode == "correct" else "drop"
    window = window_of(kind, own_gaps=own_gaps)
    app = app_of(example, window, "final" if mode == "correct" else mode, policy, **emit)
    shape = {"batches": example.batches, "partitions": example.partitions, "seed": example.seed}
    out = testing.run(app, {"events": example.items}, **shape)
    rows = near(out["out"].to_dicts())
    assert out.late == sum(len(one.late) for one in model.values())
    if mode == "discard":
        parts = Counter()
        for row in rows:
            parts[row["key"], "rows"] += row["rows"]
            parts[row["key"], "total"] += row["total"]
        whole = Counter()
        for key, one in model.items():
            for _, _, count, total, _ in one.answers:
                whole[key, "rows"] += count
                whole[key, "total"] += total
        assert {k: v for k, v in parts.items() if v} == {k: v for k, v in whole.items() if v}
    else:
        found = sorted((row["key"], *told(row)) for row in rows)
        assert found == sorted((key, *row) for key, one in model.items() for row in one.answers)


@pytest.mark.parametrize("mode", ["update", "retract", "discard"])
@pytest.mark.parametrize("own_gaps", [False, True], ids=["one gap", "own gaps"])
@checked
@example(example=GROWING, kind=APART, firings=("in threes", "each"))
@given(
    example=drawn,
    kind=kinds,
    firings=st.tuples(
        st.sampled_from(["each", "in twos", "in threes", "none"]),
        st.sampled_from(["each", "in twos", "none"]),
    ).filter(lambda both: both != ("none", "none")),
)
def test_panes_by_count_are_the_models(mode, own_gaps, example, kind, firings, rows_given):
    early, late = firings
    example.spread = False  # a key in one partition
    example.__post_init__()
    rules = Rules(
        lateness=0 if late == "none" else example.lateness,
        mode=mode,
        early=COUNTS[early],
        late=COUNTS[late],
        apart_by_end=own_gaps,
        **kind,
    )
    model = example.in_order(rules, own_gaps=own_gaps)
    emit = {"early": FIRINGS[early], "late": FIRINGS[late], "panes": True}
    app = app_of(example, window_of(kind, own_gaps=own_gaps), mode, "drop", **emit)
    out = emitted(rows_given, example, app)
    found = defaultdict(Counter)
    for row in near(out.rows["out"].to_dicts()):
        pane = (row["pane_kind"], row["pane_index"])
        found[row["key"]][(row.get(DIFF, 1), *told(row), *pane)] += 1
    assert found == {key: one.rows for key, one in model.items() if one.rows}
    assert late_count(out, example) == sum(len(one.late) for one in model.values())


@pytest.mark.parametrize("mode", ["update", "retract", "discard"])
@pytest.mark.parametrize("own_gaps", [False, True], ids=["one gap", "own gaps"])
@checked
@given(
    example=drawn,
    kind=kinds,
    count=st.integers(1, 4),
    policy=st.sampled_from(["drop", "side"]),
    suppress=st.booleans(),
)
def test_a_session_that_fires_once_has_the_one_pane_of_the_model(
    mode, own_gaps, example, kind, count, policy, suppress, rows_given
):
    example.spread = False  # a key in one partition
    example.__post_init__()
    rules = Rules(mode=mode, early=count, once=True, **kind)  # without lateness
    model = example.in_order(rules, own_gaps=own_gaps)
    emit = {"early": ms.once(ms.after_count(count)), "suppress_unchanged": suppress, "panes": True}
    app = app_of(example, window_of(kind, own_gaps=own_gaps), mode, policy, **emit)
    out = emitted(rows_given, example, app)
    found = defaultdict(Counter)
    for row in near(out.rows["out"].to_dicts()):
        assert (row["pane_first"], row["pane_last"]) == (True, True)
        pane = (row["pane_kind"], row["pane_index"])
        found[row["key"]][(row.get(DIFF, 1), *told(row), *pane)] += 1
    assert found == {key: one.rows for key, one in model.items() if one.rows}
    line = next((line for step, line in out.books.items() if step.startswith("session")), Counter())
    left_out = sum(one.left_out for one in model.values())
    late = sum(len(one.late) for one in model.values())
    assert (line["filtered"], line["windows_closed"], line["late"]) == (left_out, left_out, late)
    assert line["held"] == len(example.items) - left_out - late


@pytest.mark.parametrize("early", ["in threes", "none"])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_session_that_grows_beyond_the_watermark_has_another_on_time_pane(batches, early):
    emit = {"early": FIRINGS[early], "late": "batch", "panes": True}
    app = app_of(GROWING, window_of(APART, own_gaps=False), "retract", "drop", **emit)
    told = testing.run(app, {"events": GROWING.items}, batches=batches, partitions=1)
    of_b = [row for row in told["out"].to_dicts() if row["key"] == "b"]
    assert [(row["rows"], row["pane_kind"]) for row in of_b] == [(2, "on_time")]


@pytest.mark.parametrize("mode", ["update", "retract"])
def test_sessions_that_have_told_nothing_yet_are_kept_when_those_that_did_are_gone(
    mode, rows_given
):
    app = ms.App("sessions", log="unused", buckets=1)
    stream = app.topic("events", Event).stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=100 * UNIT
    )
    windowed = stream.window(ms.session(GAP * UNIT), by="key").emit(
        mode, early=None, late="each", panes=True
    )
    windowed.agg(rows=ms.count(), total=ms.sum("n")).view("out")
    events = [
        (0, "a", 1),
        (10, "b", 10),
        (18, "b", 20),
        (14, "b", 30),
        (40, "c", 0),
        (60, "c", 0),
        (300, "c", 0),
    ]
    rows = [Event(at(time), key, n) for time, key, n in events]
    apart = [item for row in rows[3:] for item in (testing.Tick(after="1 second"), row)]
    rows = rows_given(app, {"events": [*rows[:3], *apart]}).rows["out"].to_dicts()
    story = [(row["rows"], row["total"], row[DIFF]) for row in rows if row["key"] == "b"]
    back = [(1, 10, -1)] if mode == "retract" else []
    assert story == [(1, 10, 1), *back, (3, 60, 1)]
