"""The partial matches that an app's patterns have, from the state that its last batch has committed.

It reads what the manifests in the state store name: sorted runs, which never change. So it needs no job, and disturbs none that
runs. What a job has replaced meanwhile it removes after its commit: a run that is gone is looked for in newer manifests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.choices import did_you_mean
from millstream.durations import format_us
from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.adopted_state import Manifests
from millstream.kernels.patterns.partial_matches import PartialMatch
from millstream.kernels.patterns.pattern_operator import PatternOperator
from millstream.kernels.plan import JobPlan, OperatorPlan
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import RunStore
from millstream.object_store.place import DESCRIPTION, StatePlace
from millstream.ops.state_before import plan_without_sinks
from millstream.ops.state_runs import state_runs
from millstream.views.questions.key_rows import key_value
from millstream.views.schema import JOB
from millstream.views.state_store.program import StoredProgram, different_steps
from millstream.views.store_location import open_state_store

if TYPE_CHECKING:
    from millstream.pipeline.app import App

LIMIT_DEFAULT = 100
_TRIES = 5


@dataclass(frozen=True)
class PartialMatches:
    """The partial matches of an app after its batch ``batch_id``; ``more``: there are others, beyond the limit."""

    batch_id: int
    found: tuple[PartialMatch, ...]
    more: bool

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is found, for people: one sentence for each partial match, and one for each of its rows."""
        if not self.found:
            return (f"After batch {self.batch_id} there is no such partial match.",)
        count = (
            "1 partial match" if len(self.found) == 1 else f"{len(self.found):,} partial matches"
        )
        more = ", and there are more (--limit)" if self.more else ""
        lines = [f"After batch {self.batch_id}: {count}{more}."]
        for one in self.found:
            lines += _said(one)
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        found = [one.to_dict() for one in self.found]
        return {"batch_id": self.batch_id, "partial_matches": found, "more": self.more}


def partial_matches(
    app: App,
    step: str | None = None,
    key: Mapping[str, Any] | None = None,
    limit: int = LIMIT_DEFAULT,
) -> PartialMatches:
    """Return the partial matches of an app's patterns as of its last batch, whether it runs or not.

    Args:
        app: The app, declared as it runs.
        step: Only of this step, ``match`` or ``match_recognize``.
        key: Only of keys with these values, by column. With all columns of the key, only what it has is read; otherwise all
            that the step holds.
        limit: At most so many, those of a key in the order in which they began.

    Raises:
        ConfigError: the app has had no batch, is declared otherwise, or has no such step or column; or the limit is below 1.
    """
    if limit < 1:
        raise ConfigError(f"limit is {limit}. Give a whole number of 1 or more.")
    for _ in range(_TRIES):
        try:
            return _read(app, step, key, limit)
        except CorruptionError as error:  # the job has replaced a run since its manifest was read
            failed = error
    raise failed


@dataclass(frozen=True)
class OperatorPart:
    """What a manifest has of an operator in a bucket, and where its runs are."""

    operator: OperatorPlan
    message: Mapping[str, Any]
    runs: RunStore


def operator_parts(
    plan: JobPlan, manifests: Manifests, runs: Callable[[tuple[int, int], str], RunStore]
) -> Iterator[OperatorPart]:
    """Yield what manifests have of each operator; ``runs`` opens the runs of one, given stage and bucket and its key."""
    for at, manifest in sorted(manifests.items()):
        stored = json.loads(manifest)
        for operator in plan.stages[at[0]].operators:
            if operator.key in stored:
                yield OperatorPart(operator, stored[operator.key], runs(at, operator.key))


def matches_in(
    plan: JobPlan,
    parts: Iterator[OperatorPart],
    step: str | None,
    key: Mapping[str, Any] | None,
) -> Iterator[PartialMatch]:
    """Yield the partial matches of the patterns of a plan, of which parts of state are given."""
    kernels = _patterns(plan, step)
    keys = {name: _key_row(kernel, key) for name, kernel in kernels.items()}
    for part in parts:
        kernel = kernels.get(part.operator.kernel.name)
        if kernel is not None:
            state = OperatorState.from_message(part.message, part.runs)
            yield from kernel.partial_matches(
                state, part.message["watermark"], part.message["seed"], keys[kernel.name]
            )


def _read(app: App, step: str | None, key: Mapping[str, Any] | None, limit: int) -> PartialMatches:
    with open_state_store(app.state_store, readonly=True) as store:
        stored, batch_id = store.program(app.name, JOB), store.last_batch_id(app.name)
        if stored is None or batch_id is None:
            raise ConfigError(f"The app {app.name!r} has had no batch yet. Run it first.")
        plan = plan_without_sinks(app, stored)
        if found := different_steps(stored, StoredProgram.of(plan, stored.partitioning)):
            raise ConfigError(
                f"{app.name} is not declared as it runs: {'; '.join(found)}. Give the file that runs, or deploy this one."
            )
        place = StatePlace.from_message(store.description(app.name, DESCRIPTION))
        manifests = store.state_manifests(app.name, JOB)
    with state_runs(app.folder, place) as runs:
        matches = matches_in(plan, operator_parts(plan, manifests, lambda *_: runs), step, key)
        taken = [one for one, _ in zip(matches, range(limit + 1), strict=False)]
    return PartialMatches(batch_id, tuple(taken[:limit]), len(taken) > limit)


def _patterns(plan: JobPlan, step: str | None) -> dict[str, PatternOperator]:
    kernels = [operator.kernel for stage in plan.stages for operator in stage.operators]
    found = {one.name: one for one in kernels if isinstance(one, PatternOperator)}
    if not found:
        raise ConfigError(f"The app {plan.app!r} has no step of match or match_recognize.")
    if step is None:
        return found
    if step not in found:
        raise ConfigError(
            f"The app {plan.app!r} has no pattern {step!r}. It has {', '.join(map(repr, found))}.{did_you_mean(step, found)}"
        )
    return {step: found[step]}


def _key_row(kernel: PatternOperator, key: Mapping[str, Any] | None) -> pl.DataFrame | None:
    """Return the values of columns of the key as a row; texts as what they say."""
    if not key:
        return None
    types = dict(kernel.columns)
    made = []
    for name, value in key.items():
        if name not in kernel.by:
            raise ConfigError(
                f"{name!r} is no column of the key of {kernel.name!r}: {', '.join(kernel.by)}.{did_you_mean(name, kernel.by)}"
            )
        made.append(_typed(name, value, types[name]))
    return pl.DataFrame(made)


def _typed(name: str, value: Any, dtype: pl.DataType) -> pl.Series:
    try:
        return pl.Series(name, [key_value(value, dtype)], dtype, strict=True)
    except (TypeError, OverflowError, pl.exceptions.PolarsError, ConfigError) as error:
        raise ConfigError(
            f"{name}={value!r} is no {dtype}, which the column is: {error}."
        ) from None


def _said(one: PartialMatch) -> Iterator[str]:
    key = ", ".join(f"{name}={value!r}" for name, value in one.key.items())
    waits = "; ".join(one.waits_for)
    ends = "it has no within" if one.ends is None else f"within ends at {_time(one.ends)}"
    yield f"{one.step}, {key}: since {_time(one.since)}, {ends}. It waits for: {waits}."
    for row in one.rows:
        values = ", ".join(f"{name}={value!r}" for name, value in row.values.items())
        after_us = (row.time - one.since).total_seconds() * 1e6
        yield f"  {row.variable}: {_time(row.time)} (+{format_us(round(after_us))}), {values}"


def _time(at: datetime) -> str:
    return at.isoformat(sep=" ").replace("+00:00", "Z")
