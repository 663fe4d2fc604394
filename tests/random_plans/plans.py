"""Random plans over tables: the same plan as a pipeline of Millstream, and as one query of SQL.

A plan is drawn from a seed. It begins with tables of topics, with streams whose rows are only added, and with windows
whose rows are taken back whenever they change, and up to six operators make others of them. The
query computes over the tables' rows what the pipeline maintains. All columns are whole numbers, so that both
mean the same by every value. Of a join's result every column has a name of its own, drawn before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import polars as pl

import millstream as ms

TABLES = ("t0", "t1", "t2")
STREAMS = ("s0", "s1")  # of which all rows are kept
WINDOWS = ("w0", "w1")  # of which each group is a window that emits with every change
EVENTS = (*STREAMS, *WINDOWS)
BASES = (*TABLES, *EVENTS)
COLUMNS = ("id", "k", "v")
SCHEMA = {"id": int, "k": int | None, "v": int | None}
OPERATORS_MAX = 6
JOINS = ("inner", "left", "right", "full", "semi", "anti")


@dataclass(frozen=True)
class Drawn:
    """A table of a plan: declared, and as a query. ``words`` says how it was made."""

    table: ms.Table
    query: str
    words: str

    @property
    def columns(self) -> list[str]:
        return list(self.table.columns)


@dataclass
class PlanDraw:
    """Draws one plan. ``seed`` decides everything."""

    seed: int
    app: ms.App = field(init=False)
    dice: random.Random = field(init=False)
    names: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.app = ms.App(f"plan{self.seed}", log="unused", buckets=self.dice.choice([1, 2, 3]))

    def draw(self) -> Drawn:
        """Draw a plan; its result is the view ``result``."""
        pool = [self._base(name) for name in BASES]
        operators = self.dice.randint(1, OPERATORS_MAX)
        for _ in range(operators):
            made = self._operator(pool)
            pool.append(made)
        result = pool[-1]
        if result.table.primary_key is None:
            result = self._distinct(result)
        result.table.view("result")
        return result

    def _base(self, name: str) -> Drawn:
        if name in WINDOWS:
            return self._windows(name)
        if name in STREAMS:
            events = self.app.topic(name, SCHEMA, partitions=3).stream()
            table = events.table(keep="all", unbounded=True)
        else:
            table = self.app.table(name, SCHEMA, key="id", partitions=3)
        columns = {column: self._name(column) for column in COLUMNS}
        renames = ", ".join(f"{old} AS {new}" for old, new in columns.items())
        return Drawn(table.rename(columns), f"SELECT {renames} FROM {name}", name)

    def _windows(self, name: str) -> Drawn:
        """Make a table of rows that are replaced, or taken back, with every event."""
        events = self.app.topic(name, SCHEMA, partitions=3).stream()
        mode = self.dice.choice(["update", "retract"])
        early = self.dice.choice(["each", "batch"])
        k, n, total = (self._name(column) for column in ("k", "n", "total"))
        counts = (
            events.window(ms.tumbling("1 day"), by="k")
            .emit(mode, early=early)
            .agg(**{n: ms.count(), total: ms.sum("v")})
        )
        if (
            self.dice.random() < 0.3
        ):  # only some of them, so that rows go without another in their place
            counts = counts.filter(pl.col(n) % 3 != 0)
            kept = " HAVING count(*) % 3 != 0"
        else:
            kept = ""
        rows = counts.select(n, total, **{k: pl.col("k")})
        table = rows.table(keep="all", unbounded=True)
        query = (
            f"SELECT count(*) AS {n}, coalesce(sum(v), 0)::BIGINT AS {total}, k AS {k} FROM {name} "
            f"GROUP BY k{kept}"
        )
        return Drawn(table, query, f"{name}, {mode} {early}{kept}")

    def _name(self, stem: str) -> str:
        self.names += 1
        return f"{stem[0]}{self.names}"

    def _operator(self, pool: list[Drawn]) -> Drawn:
        # Mostly the newest, so that plans get deep.
        one = self.dice.choice([*pool, pool[-1], pool[-1], pool[-1]])
        made = [
            self._filter,
            self._computed,
            self._group,
            self._top,
            self._distinct,
            self._enriched,
        ]
        if self.dice.random() < 0.5:
            other = self.dice.choice(pool)
            return self.dice.choice([self._join, self._join, self._join, self._set])(one, other)
        step: Callable[[Drawn], Drawn] = self.dice.choice(made)
        return step(one)

    # ── one input ───────────────────────────────────────────────────────────────────────────

    def _filter(self, one: Drawn) -> Drawn:
        column, least = self.dice.choice(one.columns), self.dice.randint(-2, 3)
        table = one.table.filter(pl.col(column) >= least)
        query = f"SELECT * FROM ({one.query}) WHERE {column} >= {least}"
        return Drawn(table, query, f"filter({one.words}, {column} >= {least})")

    def _computed(self, one: Drawn) -> Drawn:
        first, second = (self.dice.choice(one.columns) for _ in range(2))
        new = self._name("x")
        table = one.table.with_columns((pl.col(first) + pl.col(second) % 3).alias(new))
        # Of numbers below zero, % has the sign of the divisor in polars.
        query = f"SELECT *, {first} + (({second} % 3) + 3) % 3 AS {new} FROM ({one.query})"
        if self.dice.random() < 0.4:
            kept = [c for c in table.columns if self.dice.random() < 0.7] or [new]
            table = table.select(*kept)
            query = f"SELECT {', '.join(kept)} FROM ({query})"
        return Drawn(table, query, f"computed({one.words}, {', '.join(table.columns)})")

    def _group(self, one: Drawn) -> Drawn:
        by = self.dice.sample(one.columns, min(len(one.columns), self.dice.randint(1, 2)))
        value = self.dice.choice(one.columns)
        n, total, most, least, different = (self._name("a") for _ in range(5))
        table = one.table.group_by(*by).agg(
            **{
                n: ms.count(),
                total: ms.sum(value),
                most: ms.max(value),
                least: ms.min(value),
                different: ms.distinct(value),
            }
        )
        aggregates = (
            f"count(*) AS {n}, coalesce(sum({value}), 0)::BIGINT AS {total}, max({value}) AS {most}, "
            f"min({value}) AS {least}, count(DISTINCT {value}) AS {different}"
        )
        query = f"SELECT {', '.join(by)}, {aggregates} FROM ({one.query}) GROUP BY {', '.join(by)}"
        return Drawn(table, query, f"group({one.words} by {', '.join(by)}, {value})")

    def _top(self, one: Drawn) -> Drawn:
        per = self.dice.choice(one.columns)
        by, direction = self.dice.choice(one.columns), self.dice.choice(["asc", "desc"])
        count, ties = (
            self.dice.randint(1, 3),
            self.dice.choice(["row_number", "rank", "dense_rank"]),
        )
        if ties == "row_number" and one.table.primary_key is None:
            ties = "rank"
        rank = self._name("r")
        table = one.table.top(count, by=[(by, direction)], per=per, ties=ties, rank=rank)
        order = f"{by} {direction} NULLS LAST"
        if ties == "row_number":
            order += "".join(f", {c} ASC NULLS LAST" for c in one.table.primary_key or ())
        query = (
            f"SELECT * FROM (SELECT *, {ties}() OVER (PARTITION BY {per} ORDER BY {order})::BIGINT AS "
            f"{rank} FROM ({one.query})) WHERE {rank} <= {count}"
        )
        return Drawn(
            table, query, f"top({one.words}, {count} {ties} by {by} {direction} per {per})"
        )

    def _distinct(self, one: Drawn) -> Drawn:
        return Drawn(
            one.table.distinct(), f"SELECT DISTINCT * FROM ({one.query})", f"distinct({one.words})"
        )

    def _enriched(self, one: Drawn) -> Drawn:
        key, new = self.dice.choice(one.columns), self._name("y")

        def answers(keys: pl.DataFrame) -> pl.DataFrame:
            known = keys.filter(pl.col(key) != 1)
            return known.with_columns((2 * pl.col(key)).alias(new))

        table = one.table.enrich(answers, on=key, schema={new: pl.Int64}, cache=None)
        query = f"SELECT *, CASE WHEN {key} != 1 THEN 2 * {key} END AS {new} FROM ({one.query})"
        return Drawn(table, query, f"enriched({one.words}, {key})")

    # ── two inputs ──────────────────────────────────────────────────────────────────────────

    def _renamed(self, one: Drawn) -> Drawn:
        columns = {column: self._name(column) for column in one.columns}
        renames = ", ".join(f"{old} AS {new}" for old, new in columns.items())
        return replace(
            one, table=one.table.rename(columns), query=f"SELECT {renames} FROM ({one.query})"
        )

    def _join(self, one: Drawn, other: Drawn) -> Drawn:
        right = self._renamed(other)
        keys = min(len(one.columns), len(right.columns), self.dice.choice([1, 1, 1, 2]))
        on = dict(
            zip(
                self.dice.sample(one.columns, keys),
                self.dice.sample(right.columns, keys),
                strict=True,
            )
        )
        how, nulls_equal = self.dice.choice(JOINS), self.dice.random() < 0.2
        equal = "IS NOT DISTINCT FROM" if nulls_equal else "="
        conditions = [f"l.{ours} {equal} r.{theirs}" for ours, theirs in on.items()]
        where = None
        left_rest = [c for c in one.columns if c not in on]
        right_rest = [c for c in right.columns if c not in on.values()]
        if left_rest and right_rest and self.dice.random() < 0.3:
            a, b = self.dice.choice(left_rest), self.dice.choice(right_rest)
            where = pl.col(a) <= pl.col(b)
            conditions.append(f"l.{a} <= r.{b}")
        table = one.table.join(right.table, on, how=how, where=where, nulls_equal=nulls_equal)
        query = _join_query(one, right, on, how, " AND ".join(conditions))
        words = f"{how}({one.words}, {other.words} on {on}, {' AND '.join(conditions)})"
        return Drawn(table, query, words)

    def _set(self, one: Drawn, other: Drawn) -> Drawn:
        width = min(len(one.columns), len(other.columns), 3)
        ours, theirs = one.columns[:width], other.columns[:width]
        left = one.table.select(*ours)
        names = {old: new for old, new in zip(theirs, ours, strict=True) if old != new}
        right = other.table.select(*theirs)
        right = right.rename(names) if names else right
        word = self.dice.choice(["union", "except_", "intersect"])
        whole = self.dice.random() < 0.5
        table = getattr(left, word)(right, all=whole)
        renames = ", ".join(f"{old} AS {new}" for old, new in zip(theirs, ours, strict=True))
        sql = f"{word.strip('_').upper()}{' ALL' if whole else ''}"
        query = f"SELECT {', '.join(ours)} FROM ({one.query}) {sql} SELECT {renames} FROM ({other.query})"
        return Drawn(table, query, f"{sql}({one.words}, {other.words})")


def _join_query(left: Drawn, right: Drawn, on: Mapping[str, str], how: str, condition: str) -> str:
    if how in ("semi", "anti"):
        exists = f"EXISTS (SELECT 1 FROM ({right.query}) r WHERE {condition})"
        return f"SELECT * FROM ({left.query}) l WHERE {'NOT ' if how == 'anti' else ''}{exists}"
    columns = [
        f"coalesce(l.{c}, r.{on[c]}) AS {c}" if c in on else f"l.{c} AS {c}" for c in left.columns
    ]
    columns += [f"r.{c} AS {c}" for c in right.columns if c not in on.values()]
    return (
        f"SELECT {', '.join(columns)} FROM ({left.query}) l {how.upper()} JOIN ({right.query}) r "
        f"ON {condition}"
    )
