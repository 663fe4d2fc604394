"""A case of the semantics: events in, a pipeline, and what must come out, on any engine.

A case is declared once and run by `test_cases.py`, in process, and by `tests/spark/test_cases.py`, on
Spark. Many share one app: each has a topic, a stream and outputs of its own, and that once for every
number of partitions.

Times are seconds after :data:`ORIGIN`, in rows and in answers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import polars as pl

import millstream as ms
from millstream import testing

ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)
LONG = 10.0**9  # seconds, later than any time of a case
PARTITIONS = (1, 4, 7)
EVERY = os.environ.get("MILLSTREAM_EVERY_BATCHING") == "1"
"""Whether each batching is tried in every number of partitions, on Spark, too: `make test-long` does."""


@dataclass(frozen=True)
class Event:
    """What every case's topic holds. ``clock`` marks a row that only tells the time, in ``wm``."""

    at: datetime | None = None
    key: str | None = "a"
    n: int | None = 1
    id: str | None = None
    part: int | None = None
    gap_s: int = 0
    wm: datetime | None = None
    clock: bool = False


@dataclass(frozen=True)
class Reach:
    """Every partition says that no earlier event is to come."""

    seconds: float


Given = Event | Reach | testing.Tick | testing.Row


def when(seconds: float) -> datetime:
    return ORIGIN + timedelta(microseconds=round(seconds * 1e6))


def utc(text: str) -> float:
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - ORIGIN).total_seconds()


def event(seconds: float, n: int | None = 1, key: str | None = "a", **values: Any) -> Event:
    return Event(when(seconds), key, n, **values)


@dataclass(frozen=True)
class Answer:
    """What one output must hold: the columns that are looked at, and their rows.

    ``kind``: ``"view"``: the rows of a view, whatever their order. ``"changelog"``: every row that came
    out, in order; where window_start or key are among the columns, in order within each of them.
    ``"net"``: rows that came out less those that were retracted.
    """

    columns: str
    rows: Sequence[tuple[Any, ...]]
    kind: Literal["view", "changelog", "net"] = "view"
    key: Sequence[str] | None = None  # the view's, where its own default does not do


@dataclass(frozen=True)
class Case:
    """``build`` gets the stream and the case's name, which its steps begin with."""

    id: str
    says: str
    rows: Sequence[Given]
    build: Callable[[ms.Stream, str], Mapping[str, ms.Stream]]
    expected: Mapping[str, Answer]
    delay: float | None = 0
    lateness: float = 0
    policy: Literal["drop", "side", "correct"] = "drop"
    late: int = 0
    duplicate: int = 0
    dead: int = 0
    spread: bool = False  # events go to all partitions in turn: their order does not matter
    partitions_min: int = 1
    rule: Mapping[str, Any] = field(default_factory=dict)  # of the watermark, beside the usual
    ahead: float = LONG  # how far the partitions are that have no part


@dataclass(frozen=True)
class Trial:
    """A case in a topic of so many partitions."""

    case: Case
    partitions: int

    @property
    def name(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in self.case.says)
        return f"{self.case.id}-in-{self.partitions}-{words}"[:52]

    def view_of(self, output: str) -> str:
        return f"{self.name}_{output}".replace("-", "_").lower()

    def items(self) -> list[Any]:
        """Lay the rows into partitions; those that have no part are far ahead from the beginning."""
        case, own, items = self.case, self.partitions - 1, []
        given = {row.partition for row in case.rows if isinstance(row, testing.Row)} - {None}
        if not case.spread:
            others = sorted({*range(self.partitions)} - (given or {own}))
            items += [_clock(case.ahead, other) for other in others]
        for number, row in enumerate(case.rows):
            if isinstance(row, Reach):
                places = range(self.partitions) if case.spread else [own]
                items += [_clock(row.seconds, place) for place in places]
            elif isinstance(row, Event):
                place = number % self.partitions if case.spread else own
                items.append(testing.Row(row, partition=place))
            elif isinstance(row, testing.Row) and row.partition is None:
                items.append(replace(row, partition=own))
            else:
                items.append(row)
        return items


def trials_of(cases: Sequence[Case], partitions: Sequence[int] = PARTITIONS) -> list[Trial]:
    """Every case in every number of partitions; those that are too few for it are left out."""
    return [
        Trial(case, count) for case in cases for count in partitions if count >= case.partitions_min
    ]


def _clock(seconds: float, partition: int) -> testing.Row:
    return testing.Row(Event(None, wm=when(seconds), clock=True), partition=partition)


@dataclass
class ForeachCalls:
    """What functions of ``foreach`` were given: a call that is repeated counts once."""

    calls: dict[str, dict[str, pl.DataFrame]] = field(default_factory=dict)

    def listener(self, output: str) -> Callable[[pl.DataFrame, Any], None]:
        def listen(rows: pl.DataFrame, context: Any) -> None:
            self.calls.setdefault(output, {})[context.key] = rows

        return listen

    def rows(self, output: str) -> pl.DataFrame:
        calls = list(self.calls.get(output, {}).values())
        return pl.concat(calls, how="diagonal") if calls else pl.DataFrame()


def app_of(
    trials: Sequence[Trial],
    calls: ForeachCalls,
    *,
    log: str = "unused",
    buckets: int = 2,
    **places: Any,
) -> ms.App:
    """Declare all in one app; what functions are given goes to ``calls``, ``places`` are arguments of ms.App."""
    app = ms.App("cases", log=log, buckets=buckets, **places)
    for trial in trials:
        case = trial.case
        usual = {"punctuation": "wm", "punctuation_only": pl.col("clock"), "idle": None}
        delay = None if case.delay is None else timedelta(seconds=case.delay)
        topic = app.topic(trial.name, Event, key="key", partitions=trial.partitions)
        stream = topic.stream(
            time="at",
            watermark=ms.watermark(delay, **{**usual, **case.rule}),
            lateness=timedelta(seconds=case.lateness),
            late=case.policy,
            name=f"{trial.name} read",
        )
        outputs = case.build(stream, trial.name)
        assert set(outputs) == set(case.expected), trial.name
        for output, answer in case.expected.items():
            view = trial.view_of(output)
            if answer.kind == "view":
                outputs[output].view(view, key=answer.key)
            else:
                outputs[output].foreach(calls.listener(view), name=view)
    return app


def run(trials: Sequence[Trial], **options: Any) -> None:
    """Run all in one app, and make sure of every answer; ``options`` are those of testing.run."""
    calls = ForeachCalls()
    inputs = {trial.name: trial.items() for trial in trials}
    check_all(trials, testing.run(app_of(trials, calls), inputs, **options), calls)


def check_all(trials: Sequence[Trial], out: testing.Result, calls: ForeachCalls) -> None:
    """Make sure of every answer, and that the ledger balances."""
    ledger = out.ledger
    exits = ledger.select("emitted", "held", "late", "dead", "filtered", "duplicate")
    assert (ledger["read"] == exits.sum_horizontal()).all()
    totals = ledger.group_by("step").sum()
    for trial in trials:
        check(trial, out, calls, totals)


def check(trial: Trial, out: testing.Result, calls: ForeachCalls, totals: pl.DataFrame) -> None:
    """Make sure of a case's answers, and that all its events are accounted for."""
    case, name = trial.case, trial.name
    for output, answer in case.expected.items():
        wanted = _in_order([tuple(row) for row in answer.rows], answer)
        assert found(trial, output, out, calls) == wanted, (name, output)
    step = pl.col("step")
    read = totals.filter(step == f"{name} read")
    own = totals.filter((step == name) | step.str.starts_with(name + "/"))
    assert (own["late"].sum(), own["duplicate"].sum()) == (case.late, case.duplicate), name
    assert read["dead"].sum() == out.dead.filter(topic=name).height == case.dead, name
    events = sum(not isinstance(row, Reach | testing.Tick) for row in case.rows)
    assert read["emitted"].sum() + read["dead"].sum() == events, name


def found(
    trial: Trial, output: str, out: testing.Result, calls: ForeachCalls
) -> list[tuple[Any, ...]]:
    """Give what an output holds, as the case's answer looks at it."""
    answer, view = trial.case.expected[output], trial.view_of(output)
    table = out[view] if answer.kind == "view" else calls.rows(view)
    if table.is_empty():
        return []
    columns = answer.columns.split()
    if answer.kind == "net":
        return _net(table, columns)
    rows = [tuple(_plain(row[name]) for name in columns) for row in table.iter_rows(named=True)]
    return _in_order(rows, answer)


def _net(table: pl.DataFrame, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    left: Counter[tuple[Any, ...]] = Counter()
    for row in table.iter_rows(named=True):
        left[tuple(_plain(row[name]) for name in columns)] += row.get("_diff") or 1
    assert min(left.values(), default=0) >= 0
    return sorted(left.elements(), key=repr)


def _in_order(rows: Sequence[tuple[Any, ...]], answer: Answer) -> list[tuple[Any, ...]]:
    if answer.kind != "changelog":
        return sorted(rows, key=repr)
    names = answer.columns.split()
    apart = [names.index(name) for name in ("window_start", "key") if name in names]
    return sorted(rows, key=lambda row: [repr(row[place]) for place in apart])


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return round((value - ORIGIN).total_seconds(), 6)
    return value.total_seconds() if isinstance(value, timedelta) else value
