"""Random pipelines: drawn from a seed, declared to the library, and put to the published rules."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import polars as pl
from published import rules
from published.aggregates import Drawn, drawn_from, total
from published.rules import Judged, Row, Values

import millstream as ms
from millstream import testing

ORIGIN = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = 1_000_000
START = (ORIGIN - EPOCH) // timedelta(microseconds=1)
DAY = 86_400 * SECOND
PANED = ("tumbling", "hopping", "cumulating", "session")
REALS = (0.1, 1e15 + 0.3, -1e15, 2.0**-40, 3.0, -0.7)
SPECIALS = (*REALS, float("inf"), float("-inf"), float("nan"))

SCHEMA = {
    "at": datetime | None,
    "hint": datetime | None,
    "k": str | None,
    "g": str | None,
    "who": str,
    "id": str | None,
    "i": int | None,
    "which": int,
    "limit": int | None,
    "gap": int | None,
    "s": str | None,
}


def instant(time_us: int | None) -> datetime | None:
    return None if time_us is None else EPOCH + timedelta(microseconds=time_us)


@dataclass(frozen=True)
class Outcome:
    """What a view must hold, and how many rows its steps must have called late."""

    rows: list[Row]
    columns: tuple[str, ...]
    key: tuple[str, ...]
    late: int


@dataclass
class Pipeline:
    """A declared app with its input, what each view must hold, and a text that says what was drawn."""

    app: ms.App
    partitions: int
    records: list[list[Values]]
    arrivals: list[int]  # which partition the next record goes to
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    dead: int = 0
    said: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)  # how many rows each named step calls late

    def inputs(self) -> list[Any]:
        """Give the rows in order of arrival, and the end of time."""
        left = [iter(records) for records in self.records]
        rows = [
            testing.Row(
                {
                    name: instant(value) if name in ("at", "hint") else value
                    for name, value in next(left[p]).items()
                    if name != "f"
                },
                partition=p,
            )
            for p in self.arrivals
        ]
        return [*rows, testing.Watermark("t", at=ORIGIN + timedelta(days=3000))]


class Draw:
    """Draws one pipeline; every choice comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.seed = seed
        self.one_place = self.r.random() < 0.6  # equal keys are in one partition
        self.bounded = self.r.random() < 0.4  # no event is late
        self.delay = self.r.choice([0, 0, 2, 10]) * SECOND
        self.lateness = self.r.choice([0, 0, 3, 20]) * SECOND
        self.late = self.r.choice(["drop", "drop", "side", "correct" if self.lateness else "drop"])
        self.specials = self.r.random() < 0.5
        self.unit = self.r.choice([SECOND, SECOND, 250_000])
        self.per = self.r.random() < 0.2
        self.punctuated = self.r.random() < 0.15 and not self.bounded

    def pipeline(self) -> Pipeline:
        r = self.r
        partitions = r.choice([1, 1, 2, 4, 7])
        records, arrivals = self._records(partitions, r.choice([3, 8, 20, 45]))
        app = ms.App("published", log="unused", buckets=r.choice([1, 2, 3]))
        pipeline = Pipeline(app, partitions, records, arrivals)
        rule = rules.WatermarkRule(
            self.delay, "who" if self.per else None, "hint" if self.punctuated else None
        )
        rows = rules.read(records, "at", rule)
        pipeline.dead = sum(map(len, records)) - len(rows)
        topic = app.topic("t", SCHEMA, partitions=partitions)
        stream = topic.stream(
            time="at",
            watermark=ms.watermark(
                f"{self.delay // SECOND} seconds",
                idle=None,
                per=rule.producer,
                punctuation=rule.punctuation,
            ),
            lateness=timedelta(microseconds=self.lateness),
            late=self.late,
        )
        pipeline.said.append(
            f"{partitions} partitions, {len(arrivals)} records, {rule}, lateness {self.lateness},"
            f" late={self.late}, one place {self.one_place}, bounded {self.bounded}"
        )
        reals = SPECIALS if self.specials else REALS
        real = pl.lit(pl.Series(reals, dtype=pl.Float64)).implode().list
        stream = stream.with_columns(f=real.get(pl.col("which")))
        rows = rules.extend(rows, f=lambda values: reals[values["which"]])
        for number in range(r.choice([1, 2, 3])):
            _Chain(self, pipeline, stream, rows, f"v{number}").draw()
        return pipeline

    def _records(self, partitions: int, count: int) -> tuple[list[list[Values]], list[int]]:
        records: list[list[Values]] = [[] for _ in range(partitions)]
        arrivals = []
        newest = [START] * partitions
        for number in range(count):
            k = self.r.choice(["a", "b", "c", "ä", None])
            p = hash_of(k) % partitions if self.one_place else self.r.randrange(partitions)
            time = self._time(number, newest[p])
            if time is not None:
                newest[p] = max(newest[p], time)
            arrivals.append(p)
            records[p].append(self._values(k, p, number, time, newest[p]))
        return records, arrivals

    def _time(self, number: int, newest: int) -> int | None:
        r = self.r
        if r.random() < 0.03:
            return None
        if self.bounded:
            behind = r.randrange(self.delay // self.unit + 1) * self.unit
            return max(newest + r.choice([0, 1, 1, 4, 30]) * self.unit - behind, START - self.delay)
        return START + (number * r.choice([0, 1, 1, 2]) + r.randrange(-10, 25)) * self.unit

    def _values(self, k: str | None, p: int, number: int, time: int | None, newest: int) -> Values:
        r = self.r
        hint = newest - r.choice([0, 5]) * self.unit if r.random() < 0.2 else None
        reals = SPECIALS if self.specials else REALS
        which = r.randrange(len(reals))
        return {
            "at": time,
            "hint": hint,
            "k": k,
            "g": r.choice(["x", "y", None]),
            # Where no event may be late, a partition has one producer: another begins at its watermark.
            "who": f"{p}/{0 if self.bounded else r.randrange(3)}",
            "id": None if r.random() < 0.1 else f"{p}:{r.randrange(6)}",
            "i": None if r.random() < 0.1 else r.randrange(-3, 12),
            "which": which,
            "limit": r.choice([5, 10, 20, None]),
            "gap": r.choice([None, 0, 1, 3, 9]),
            "s": None if r.random() < 0.1 else r.choice(["p", "q", "", "zz", f"n{number}"]),
        }


def hash_of(text: str | None) -> int:
    return sum((text or "").encode())


class _Chain:
    """Steps, a window, perhaps another over it, and a view; beside them what the rules give."""

    def __init__(
        self, draw: Draw, pipeline: Pipeline, stream: ms.Stream, rows: list[Row], name: str
    ) -> None:
        self.r, self.d, self.p = draw.r, draw, pipeline
        self.stream, self.rows, self.name = stream, rows, name
        self.mode = "final"
        self.judged = Judged([])
        self.names: list[str] = []

    def draw(self) -> None:
        self._steps()
        if self.r.random() < 0.08 and self.d.one_place:
            self._budget()
            return
        if self.r.random() < 0.06 and self.d.late != "correct":
            self._parts()
            return
        by, kind = self._first_window()
        # Rows of count windows that complete late are late for what comes next.
        follows = self.d.bounded or kind != "count"
        if self.mode != "update" and follows and self.r.random() < 0.5:
            self._second_window(by, kind in PANED)
        elif self.name + "w1" not in self.p.outcomes:
            self._view(kind, self.judged, by, self.names, f"{self.name}w1")

    def _say(self, text: str) -> None:
        self.p.said.append(f"{self.name}: {text}")

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    def _steps(self) -> None:
        if self.r.random() < 0.3:
            self._say("filter i > 0")
            self.stream = self.stream.filter(pl.col("i") > 0)
            self.rows = rules.keep(self.rows, lambda v: None if v["i"] is None else v["i"] > 0)
        if self.r.random() < 0.3:
            within, null = self.r.choice([0, 4, 30]) * SECOND, self.r.choice(["pass", "drop"])
            self._say(f"dedup within {within} null {null}")
            step = f"{self.name} dedup"
            self.stream = self.stream.dedup(
                "id", within=timedelta(microseconds=within), null=null, late="drop", name=step
            )
            judged = rules.dedup(
                self.rows, "id", within, self.d.lateness, null_passes=null == "pass"
            )
            self.rows = judged.rows
            self.p.steps[step] = judged.late

    def _budget(self) -> None:
        self._say("budget")
        by = "k"
        limited = self.stream.budget(by, cost="i", limit="limit", name=f"{self.name} budget")
        counted = limited.window(
            ms.tumbling("1 day"), by=["k", "decision"], name=f"{self.name} day"
        )
        counted.emit("final").agg(n=ms.count(), spent=ms.max("spent")).view(self.name)
        rows = rules.budget(self.rows, by, "i", "limit", DAY)
        judged = rules.windows(
            rows,
            rules.tumbling(DAY),
            ["k", "decision"],
            self.d.lateness,
            {"n": len, "spent": lambda rows: max(row.values["spent"] for row in rows)},
        )
        self._expect(judged, ["k", "decision"], ["n", "spent"])

    def _parts(self) -> None:
        """Windows that tell what came since the last row, added up by windows over them."""
        emit = {
            "early": self.r.choice([None, "each", "batch", ms.after_count(2)]),
            "late": self.r.choice(["each", "batch", ms.after_count(2)]),
        }
        size, above = self.r.choice([5, 7, 20]), self.r.choice([10, 30])
        self._say(f"parts of {size} s in {above} s, {emit}")
        parts = self.stream.window(ms.tumbling(f"{size} seconds"), by="g", name=f"{self.name} w1")
        told = parts.emit("discard", **emit).agg(n=ms.count(), i=ms.sum("i"))
        whole = told.window(ms.tumbling(f"{above} seconds"), by="g").emit("final")
        whole.agg(n=ms.sum("n"), i=ms.sum("i")).view(self.name)
        sums = {name: total(name, floats=False) for name in ("n", "i")}
        first = rules.windows(
            self.rows, rules.tumbling(size * SECOND), ["g"], self.d.lateness, {**sums, "n": len}
        )
        self.p.steps[f"{self.name} w1"] = first.late
        judged = rules.windows(first.rows, rules.tumbling(above * SECOND), ["g"], 0, sums)
        self._expect(judged, ["g"], ["n", "i"])

    # ── windows ─────────────────────────────────────────────────────────────────────────────

    def _first_window(self) -> tuple[list[str], str]:
        r = self.r
        kinds = ["tumbling", "tumbling", "hopping", "hopping", "cumulating", "sliding"]
        by = r.choice([["k"], ["k"], ["g"], ["k", "g"], []])
        if self.d.bounded and (not self.d.per):
            kinds += ["session", "session"]
        if self.d.one_place and "k" in by and self.d.late == "drop":
            kinds += ["count"]
        kind = r.choice(kinds)
        aggregates = self._aggregates("i", "f", "s", ordered=True)
        self._window(kind, by, aggregates, self.d.lateness, "w1", first=True)
        return by, kind

    def _second_window(self, by: list[str], ordered_by: bool) -> None:
        r = self.r
        integer = "n"
        if r.random() < 0.4 and self.mode == "final":
            self._say("filter n > 1")
            self.stream = self.stream.filter(pl.col(integer) > 1)
            self.rows = rules.keep(self.rows, lambda v: v[integer] > 1)
        above = r.choice([by, by, by[:1], []])
        kinds = ["tumbling", "hopping", "cumulating"]
        if self.mode == "final":
            kinds += ["session", "sliding"]
        ordered = ordered_by and above == by and self.mode == "final"
        aggregates = self._aggregates(integer, None, None, ordered=ordered)
        self._window(r.choice(kinds), above, aggregates, 0, "w2", first=False)

    def _aggregates(
        self, integer: str, real: str | None, text: str | None, *, ordered: bool
    ) -> dict[str, Drawn]:
        every = drawn_from(integer, real, text, ordered=ordered)
        chosen = self.r.sample(every, self.r.choice([1, 2, 4]))
        return {"n": every[0], **{f"a{number}": drawn for number, drawn in enumerate(chosen)}}

    def _window(
        self,
        kind: str,
        by: list[str],
        aggregates: dict[str, Drawn],
        lateness: int,
        suffix: str,
        *,
        first: bool,
    ) -> None:
        r = self.r
        late_policy = self.d.late if first else "drop"
        meant = {name: drawn.meant for name, drawn in aggregates.items()}
        declared = {name: drawn.declared for name, drawn in aggregates.items()}
        step = f"{self.name} {suffix}"
        emit: dict[str, Any] = {"mode": "final"}
        if kind in PANED:
            emit = self._emission(first=first, late_policy=late_policy)
        elif kind == "sliding" or kind == "count":
            modes = ["final", "update"] + (["retract"] if kind == "sliding" else [])
            emit = {"mode": r.choice(modes)}
        allowed = 0 if emit.get("late", "") is None else lateness
        window, judge = self._kind(kind, by, meant, allowed, emit["mode"])
        mode = emit["mode"]
        self._say(f"{suffix}: {window} by {by} emit {emit} {sorted(declared)} {declared}")
        self.stream = self.stream.window(window, by=by, name=step).emit(**emit).agg(**declared)
        judged = judge(self.rows)
        self.rows = judged.rows
        if kind != "session" and mode != "discard":
            self.p.steps[step] = judged.late
        corrected = mode == "final" and late_policy == "correct"
        self.mode = "update" if corrected else mode
        if mode == "discard":
            return
        self.judged, self.names = judged, list(aggregates)
        if r.random() < 0.8 or not first:
            self._view(kind, judged, by, self.names, f"{self.name}{suffix}")

    def _emission(self, *, first: bool, late_policy: str) -> dict[str, Any]:
        r = self.r
        mode = r.choice(["final", "final", "update", "retract"])
        if self.mode == "retract" and mode == "discard":
            mode = "retract"
        emit: dict[str, Any] = {"mode": mode}
        if mode != "final":
            if r.random() < 0.5:
                emit["early"] = r.choice([None, "each", "batch", ms.after_count(2)])
            if r.random() < 0.5 and first and late_policy != "correct":
                emit["late"] = r.choice([None, "each", "batch", ms.after_count(2)])
            if r.random() < 0.2:
                emit["suppress_unchanged"] = False
        return emit

    def _kind(
        self, kind: str, by: Sequence[str], meant: Any, lateness: int, mode: str
    ) -> tuple[Any, Callable[[list[Row]], Judged]]:
        r = self.r
        if kind == "tumbling":
            size, offset = r.choice([5, 7, 20]), r.choice([0, 3, -1])
            assign = rules.tumbling(size * SECOND, offset * SECOND)
            window = ms.tumbling(f"{size} seconds", offset=f"{offset} seconds")
            return window, lambda rows: rules.windows(rows, assign, by, lateness, meant)
        if kind == "hopping":
            size, slide = r.choice([(20, 10), (20, 7), (7, 20), (6, 4)])
            assign = rules.hopping(size * SECOND, slide * SECOND)
            hops = ms.hopping(f"{size} seconds", f"{slide} seconds", allow_gaps=True)
            return hops, lambda rows: rules.windows(rows, assign, by, lateness, meant)
        if kind == "cumulating":
            size, step = r.choice([(20, 5), (21, 7), (6, 6)])
            assign = rules.cumulating(size * SECOND, step * SECOND)
            growing = ms.cumulating(f"{size} seconds", f"{step} seconds")
            return growing, lambda rows: rules.windows(rows, assign, by, lateness, meant)
        if kind == "sliding":
            size = r.choice([3, 10])
            return (
                ms.sliding(f"{size} seconds"),
                lambda rows: rules.sliding(rows, size * SECOND, by, lateness, meant),
            )
        if kind == "count":
            count = r.choice([1, 2, 3])
            slide = r.randrange(1, count + 1)
            partial = mode == "update"
            return (
                ms.count_window(count, slide=slide, unbounded=True),
                lambda rows: rules.count_windows(rows, count, slide, by, meant, partial=partial),
            )
        return self._session(by, meant)

    def _session(self, by: Sequence[str], meant: Any) -> tuple[Any, Callable[[list[Row]], Judged]]:
        r = self.r
        inclusive = r.random() < 0.6
        if r.random() < 0.3 and self.mode == "final" and "gap" in self.stream.columns:
            own = ms.session(
                pl.duration(seconds="gap"), max_gap="9 seconds", gap_inclusive=inclusive
            )
            return own, lambda rows: rules.sessions(
                rows, lambda v: (v["gap"] or 0) * SECOND, by, meant, inclusive=inclusive
            )
        gap = r.choice([1, 4, 9])
        window = ms.session(f"{gap} seconds", gap_inclusive=inclusive)
        return window, lambda rows: rules.sessions(
            rows, lambda _: gap * SECOND, by, meant, inclusive=inclusive
        )

    def _view(self, kind: str, judged: Judged, by: list[str], names: list[str], name: str) -> None:
        starts = {
            "sliding": "window_end",
            "cumulating": "window_end",
            "count": "window_number",
        }.get(kind, "window_start")
        key = (starts, *by)
        self.stream.view(name, key=list(key))
        columns = (*key, "window_start", "window_end", *names)
        self.p.outcomes[name] = Outcome(
            judged.rows, tuple(dict.fromkeys(columns)), key, judged.late
        )

    def _expect(self, judged: Judged, by: list[str], names: list[str]) -> None:
        key = ("window_start", *by)
        self.p.outcomes[self.name] = Outcome(judged.rows, (*key, *names), key, judged.late)


def close(found: Any, meant: Any) -> bool:
    """Whether two values are the same: floats to their last bits, lists one by one."""
    if isinstance(found, str) and isinstance(meant, list):
        return close(json.loads(found), meant)  # lists are JSON in a view
    if isinstance(found, list) and isinstance(meant, list):
        return len(found) == len(meant) and all(map(close, found, meant))
    if isinstance(found, dict) and isinstance(meant, dict):
        return found.keys() == meant.keys() and all(close(found[k], meant[k]) for k in meant)
    if isinstance(found, float) and isinstance(meant, float):
        if found != found or meant != meant:
            return found != found and meant != meant
        return found == meant or abs(found - meant) <= 2**-50 * max(abs(found), abs(meant))
    return type(found) is type(meant) and found == meant


__all__ = ["SCHEMA", "Draw", "Fraction", "Outcome", "Pipeline", "close", "instant"]
