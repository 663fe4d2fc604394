"""Questions to the state of a job between two batches: of named steps, the rows of keys.

The manifests of one commit name all runs of state as of one position of the log. So whoever has them, and can read
the runs, answers for that position, whatever the job does meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, MillstreamError, UserCodeError
from millstream.kernels.columns import filter_rows
from millstream.kernels.errors.user_code import FAILURES, error_reason
from millstream.kernels.frames import HASH, visible
from millstream.kernels.plan import ConsumerEdge, JobPlan, OperatorPlan, PlanEdge, StepEdge
from millstream.kernels.queryable import KeyColumns, QueryableOperator, QueryKeys
from millstream.kernels.state.keyhash import buckets_of, hash_columns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Run, RunStore
from millstream.kernels.steps import Step

Bucket = tuple[int, int]
"""A stage and a bucket of it."""


@dataclass(frozen=True)
class QueryTarget:
    """What a name stands for: a stateful step, and what its rows go through on the way to a view of that name.

    ``columns`` are those of the view; None: all.
    """

    name: str
    stage: int
    operator: OperatorPlan
    kernel: QueryableOperator
    steps: tuple[Step, ...] = ()
    columns: tuple[str, ...] | None = None

    @property
    def key(self) -> KeyColumns:
        """The columns by which rows are asked for."""
        key = self.kernel.query_key
        assert key is not None, "targets are steps that can be asked"
        return key

    @property
    def kind(self) -> str:
        """What has the name: "step" or "view"."""
        return "step" if self.columns is None else "view"

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.key)

    def shown(self, rows: pl.DataFrame, *hidden: str) -> pl.DataFrame:
        """Return rows of the step as they are asked for under the name; of hidden columns, only these.

        Raises:
            UserCodeError: a step on the way to the view fails on a row.
        """
        for step in self.steps:
            try:
                rows = step.apply(rows).table
            except MillstreamError:
                raise
            except FAILURES as error:
                raise UserCodeError(
                    f"{step.name!r}, on the way to {self.name!r}, fails on a row of the answer: {error_reason(error)}. Correct it, "
                    f"or ask the step {self.kernel.name!r}.",
                    step=step.name,
                ) from error
        names = visible(rows.columns) if self.columns is None else list(self.columns)
        return rows[[*names, *hidden]]


@dataclass(frozen=True)
class QueryTargets:
    """All that can be asked in a plan, by name: steps by theirs, and views by theirs where one step gives their rows."""

    plan: JobPlan

    @cached_property
    def by_name(self) -> Mapping[str, QueryTarget]:
        found: dict[str, QueryTarget] = {}
        several: set[str] = set()
        views = {sink.port: sink.name for sink in self.plan.sinks}
        for stage, operators in enumerate(self.plan.stages):
            for operator in operators.operators:
                kernel = operator.kernel
                for steps, edge in _paths(operator.edges):
                    view = views.get(edge.port)
                    if view is None:
                        continue
                    several |= {view} & found.keys()
                    if _is_queryable(kernel) and kernel.queried_as_emitted:
                        found[view] = QueryTarget(
                            view, stage, operator, kernel, steps, edge.columns
                        )
                    else:
                        several.add(view)
        mixed = several | (set(views.values()) & _read_otherwise(self.plan, views))
        targets = {name: target for name, target in found.items() if name not in mixed}
        for stage, operators in enumerate(self.plan.stages):
            for operator in operators.operators:
                kernel = operator.kernel
                if _is_queryable(kernel):
                    targets[kernel.name] = QueryTarget(kernel.name, stage, operator, kernel)
        return targets

    def find(self, name: str) -> QueryTarget:
        """Return what a name stands for.

        Raises:
            ConfigError: nothing that can be asked has the name.
        """
        target = self.by_name.get(name)
        if target is not None:
            return target
        known = [*self.by_name]
        there = name in self.plan.steps or any(sink.name == name for sink in self.plan.sinks)
        what = (
            f"{name!r} of {self.plan.app} cannot be asked: it holds no rows by key, or its rows come from several steps."
            if there
            else f"{self.plan.app} has no step and no view {name!r}."
        )
        listed = ", ".join(map(repr, known)) or "nothing"
        raise ConfigError(
            f"{what} What can be asked: {listed}. Choose one of these.{did_you_mean(name, known)}"
        )


def _is_queryable(kernel: object) -> TypeGuard[QueryableOperator]:
    return isinstance(kernel, QueryableOperator) and kernel.query_key is not None


def _paths(edges: Sequence[PlanEdge]) -> Iterator[tuple[tuple[Step, ...], ConsumerEdge]]:
    """Yield the consumers below an operator, each with the steps on the way."""
    for edge in edges:
        if isinstance(edge, StepEdge):
            for steps, consumer in _paths(edge.downstream):
                yield (edge.step, *steps), consumer
        else:
            yield (), edge


def _read_otherwise(plan: JobPlan, views: Mapping[int, str]) -> set[str]:
    """Return the views that get rows of sources, of native steps, or that came too late for a step."""
    late = [one.late_edges for stage in plan.stages for one in stage.operators]
    others = [
        *(one.edges for one in plan.sources),
        *(one.edges for one in plan.natives),
        *(one.edges for one in plan.frames),
    ]
    return {
        views[edge.port]
        for edges in (*late, *others)
        for _, edge in _paths(edges)
        if edge.port in views
    }


@dataclass(frozen=True)
class StateQuery:
    """Reads the state of one commit. ``manifests`` are those of the buckets that are read, or of all.

    What was opened stays open: the state of a step in a bucket is read from its manifest once.
    """

    targets: QueryTargets
    manifests: Mapping[Bucket, bytes]
    run_store: RunStore
    _messages: dict[Bucket, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    _states: dict[tuple[Bucket, str], OperatorState] = field(
        default_factory=dict, init=False, repr=False
    )

    def rows(self, target: QueryTarget, keys: pl.DataFrame | None) -> pl.DataFrame:
        """Return the rows of some keys (a row each, in the columns of the target's key), or of all.

        Rows that are held in one bucket come together, in an order that depends on the state alone.
        """
        return target.shown(self._held(target, keys))

    def rows_of_each(self, target: QueryTarget, keys: pl.DataFrame) -> EachRows | None:
        """Return the rows of many keys, which are looked up at once, and whose they are.

        None if that does not show in the rows: then each key is to be asked alone.
        """
        names, seed = [*target.key_names], self.targets.plan.buckets.seed
        keys = keys[names].hstack([pl.Series(HASH, hash_columns(keys, target.key_names, seed))])
        numbered = keys.unique(maintain_order=True).with_row_index(_NUMBER)
        rows = self._held(target, keys)
        if any(rows.schema.get(name) != dtype for name, dtype in target.key):
            return None
        rows = rows.hstack([pl.Series(HASH, hash_columns(rows, target.key_names, seed))])
        rows, asked = (_joined(one, numbered, [*names, HASH]) for one in (rows, keys))
        if any(rows[name].null_count() for name in (*names, _NUMBER)):
            return None  # of a join, rows without a partner have nulls there
        rows = target.shown(rows, _NUMBER)
        return EachRows(rows.drop(_NUMBER), rows[_NUMBER].to_list(), asked[_NUMBER].to_list())

    def _held(self, target: QueryTarget, keys: pl.DataFrame | None) -> pl.DataFrame:
        """Return the visible columns of the rows of some keys, or of all, as the step gives them."""
        if keys is None or not target.key:
            buckets = self.targets.plan.buckets.numbers
            parts = [self._current(target, (target.stage, bucket), None) for bucket in buckets]
        else:
            divided = divide_keys(self.targets.plan, target, keys)
            parts = [self._current(target, bucket, some) for bucket, some in divided.items()]
        if not parts:
            return self._current(target, (target.stage, 0), _no_keys(target))
        return pl.concat(parts)

    def _current(self, target: QueryTarget, bucket: Bucket, keys: QueryKeys | None) -> pl.DataFrame:
        message, key = self._message(target, bucket), target.operator.key
        state = self._states.get((bucket, key))
        if state is None:
            state = OperatorState.from_message(message, self.run_store)
            self._states[bucket, key] = state
        watermark_us = _NO_STATE if message is None else message["watermark"]
        rows = target.kernel.current_rows(state, keys, watermark_us)
        return rows[visible(rows.columns)]

    def _message(self, target: QueryTarget, bucket: Bucket) -> dict[str, Any] | None:
        manifest = self.manifests.get(bucket)
        if manifest is None:
            return None
        if bucket not in self._messages:
            self._messages[bucket] = json.loads(manifest)
        found: dict[str, Any] | None = self._messages[bucket].get(target.operator.key)
        if found is None or found["seed"] != self.targets.plan.buckets.seed:
            raise ConfigError(
                f"The state of {self.targets.plan.app} is not of this program: it has no {target.kernel.name!r} as it is "
                "declared here. Ask with the program that runs."
            )
        return found


class EachRows(NamedTuple):
    """The rows of many keys: each row with the number of its key, and for each asked key its number."""

    rows: pl.DataFrame
    numbers: list[int]
    asked: list[int]


def _joined(rows: pl.DataFrame, numbered: pl.DataFrame, on: list[str]) -> pl.DataFrame:
    return rows.join(numbered, on=on, how="left", nulls_equal=True, maintain_order="left")


_NO_STATE = -(2**62)
_NUMBER = "__number"


def runs_of(manifests: Mapping[Bucket, bytes]) -> Iterator[Run]:
    """Yield all runs that manifests name."""
    for manifest in manifests.values():
        for message in json.loads(manifest).values():
            for entries in message["runs"].values():
                yield from map(Run.from_message, entries)


def divide_keys(plan: JobPlan, target: QueryTarget, keys: pl.DataFrame) -> dict[Bucket, QueryKeys]:
    """Return keys by the bucket that has them, each once and with its hash."""
    names, seed = target.key_names, plan.buckets.seed
    keys = keys[list(names)].unique(maintain_order=True)
    hashes = hash_columns(keys, names, seed)
    # Where all rows are in one bucket, the step has no columns that choose it.
    chosen = hashes if target.kernel.by else hash_columns(keys, (), seed)
    buckets = buckets_of(chosen, plan.buckets.count)
    hashed = keys.hstack([pl.Series(HASH, hashes)])
    return {
        (target.stage, bucket): QueryKeys(filter_rows(hashed, buckets == bucket))
        for bucket in sorted({*buckets.tolist()})
    }


def _no_keys(target: QueryTarget) -> QueryKeys:
    return QueryKeys(pl.DataFrame(schema={**dict(target.key), HASH: pl.UInt64()}))
