"""Comparing an edited app with the one that has run, before it takes its place: `millstream compare`.

What the edit rebuilds is computed beside the app, as a deployment does it (`ops/deploy.py`), up to the position
that the rows of the live view are of. So both versions of a view are compared at one position, also while
the app runs; of several views each at its own. A deployment goes on with what was computed.

A view in a database of its own is read there, with the position of its last batch. A deployment discards the rows that a
rebuild makes for it; a comparison keeps them beside those of the other views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from millstream.engine.state_place import load_or_create_place
from millstream.errors import ConflictError, CorruptionError
from millstream.kernels.state.sorted_runs import RunStore
from millstream.kernels.table_feed import Manifests
from millstream.object_store.address import state_url
from millstream.ops.deploy import Deployment, prepare
from millstream.ops.plan import ChangePlan, plan_change
from millstream.ops.replay_start import ReplayStart
from millstream.ops.state_runs import state_runs
from millstream.ops.view_difference import Threshold, ViewDifference, compare_rows, why_unpaired
from millstream.views.coverage import initial_coverage, partial_note
from millstream.views.query import Query, QueryResult
from millstream.views.reader import open_view
from millstream.views.runs.control_files import hold_deployment
from millstream.views.schema import JOB
from millstream.views.state_store.store import StateStore
from millstream.views.state_store.table_fill import TableFill
from millstream.views.state_store.view_fill import ViewFill
from millstream.views.store_location import open_state_store

if TYPE_CHECKING:
    from millstream.engine.local_run import LocalProgress
    from millstream.pipeline.app import App

T = TypeVar("T")

_READS_MAX = 10  # of state that an app replaces meanwhile


@dataclass(frozen=True)
class Comparison:
    """The views that an edit rebuilds, each beside what it is now.

    ``positions`` says of which position of the log each was compared; ``new`` are the views that there are not yet.
    ``not_compared`` are the outputs that the edit changes and that were not compared, with the reason: the new program has no such
    rows beside those that are there. ``lacking`` says of views what the rows that are there lack.
    """

    app: str
    plan: ChangePlan
    views: tuple[ViewDifference, ...] = ()
    positions: Mapping[str, Any] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    not_compared: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)

    def failing(self, thresholds: Sequence[Threshold]) -> list[str]:
        """Return a text for each condition that holds for a view."""
        return [
            f"{view.view}: {threshold.text}"
            for view in self.views
            for threshold in thresholds
            if threshold.holds(view)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "app": self.app,
            "verdict": self.plan.verdict,
            "views": [
                {
                    **view.to_dict(),
                    "position": self.positions.get(view.view),
                    "lacks": self.lacking.get(view.view),
                }
                for view in self.views
            ],
            "new_views": list(self.new),
            "not_compared": dict(self.not_compared),
        }


def compare(
    app: App,
    on_batch: Callable[[LocalProgress], None] | None = None,
    *,
    same_expressions: bool = False,
    gone_ok: bool = False,
    ask_again: bool = False,
    start: ReplayStart | None = None,
    sample_rows: int = 5,
    rows_per_batch: int = 100_000,
) -> Comparison:
    """Compare the views that an edit of an app rebuilds with those that there are. The app is not changed.

    The arguments are those of :func:`millstream.ops.deploy.deploy`; ``sample_rows`` is how many rows that differ are
    returned of each view.

    Raises:
        ConfigError: the edit cannot be deployed.
        ConflictError: a deployment or another comparison is at work.
    """
    with hold_deployment(app.folder):
        plan = plan_change(app, same_expressions=same_expressions, start=start)
        deployment = prepare(
            app, plan, same_expressions=same_expressions, gone_ok=gone_ok, ask_again=ask_again
        )
        if deployment is None:
            return Comparison(app.name, plan, not_compared=_not_compared(app, plan, ()))
        deployment = replace(deployment, beside=frozenset(deployment.database_views))
        deployment.compute(on_batch, rows_per_batch)
        return _compared(_Comparer(deployment, on_batch, sample_rows, rows_per_batch))


@dataclass
class _Comparer:
    """Compares views as they are read, each at its own position, and keeps what was found."""

    deployment: Deployment
    on_batch: Callable[[LocalProgress], None] | None
    sample_rows: int
    rows_per_batch: int
    views: list[ViewDifference] = field(default_factory=list)
    positions: dict[str, Any] = field(default_factory=dict)
    unpaired: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    def take(self, view: str, found: QueryResult, after: pl.DataFrame) -> None:
        """Compare a view as it is with all rows that it would have, at one position."""
        key = next(sink.key for sink in self.deployment.plan.sinks if sink.name == view)
        if (why := why_unpaired(key, found.rows, after)) is not None:
            self.unpaired[view] = why
            return
        self.views.append(compare_rows(view, key, found.rows, after, sample_rows=self.sample_rows))
        self.positions[view] = found.position
        if (note := partial_note(found.coverage)) is not None:
            self.lacking[view] = note

    def compute(self, view: str, found: QueryResult) -> None:
        """Compute a view up to the position that it is of, and compare it there."""
        self.deployment.compute(self.on_batch, self.rows_per_batch, found.position)
        self.take(view, found, self.deployment.rows(view))

    def result(self, new: Collection[str]) -> Comparison:
        """Return what was found; ``new`` are the views that there are not yet."""
        app, plan = self.deployment.app, self.deployment.change
        others = _not_compared(app, plan, {*self.positions, *self.unpaired})
        return Comparison(
            app.name,
            plan,
            tuple(self.views),
            self.positions,
            tuple(sorted(new)),
            {**self.unpaired, **others},
            self.lacking,
        )


def _compared(comparer: _Comparer) -> Comparison:
    """Compare each view that is rebuilt."""
    deployment = comparer.deployment
    app, change = deployment.app, deployment.change.change
    of_steps = deployment.step_fills.views
    changed = deployment.rebuilt_views | deployment.filled_views.keys()
    changed |= change.table_fills.keys() | of_steps
    with open_state_store(app.state_store, readonly=True) as live:
        there = {schema.name for schema in live.views()}
        written = _written(live, deployment)
        with_steps = _filled_with_steps(deployment, live, of_steps & there)
        for view in sorted(changed & there):
            if (fill := deployment.filled_views.get(view)) is not None:
                comparer.take(view, *_filled(live, view, fill))
            elif (table := change.table_fills.get(view)) is not None:
                comparer.take(view, *_filled_from_table(deployment, live, table))
            elif view in with_steps:
                comparer.take(view, with_steps[view], deployment.step_fills.rows(view))
            else:
                comparer.compute(view, live.select(view, Query()))
    # Databases have a batch before the state store has it: read behind it, they are never of an earlier position.
    in_databases = deployment.database_views
    for view in sorted(in_databases.keys() & written):
        with open_view(view, None, app.name, store=in_databases[view]) as opened:
            comparer.compute(view, opened.source.select(view, Query()))
    return comparer.result((changed - there) | (in_databases.keys() - written))


def _written(live: StateStore, deployment: Deployment) -> set[str]:
    """Return the outputs that were written until now where the new program writes them."""
    outputs = live.outputs(deployment.app.name, JOB)
    written = {output for output, one in outputs.items() if one.spans[-1].until is None}
    return {name for name, _ in written & initial_coverage(deployment.plan).keys()}


def _not_compared(app: App, plan: ChangePlan, compared: Collection[str]) -> dict[str, str]:
    """Return the outputs that there are, of which the edit changes what they get, and that were not compared; and why."""
    if plan.boundary is None:
        return {}
    with open_state_store(app.state_store, readonly=True) as store:
        written = store.outputs(app.name, JOB)
    there = {name for (name, _), one in written.items() if one.spans[-1].until is None}
    there &= {output.name for output in app.outputs}
    return {
        one.name: _NOT_COMPARED[one.kind]
        for one in plan.change.parts
        if one.kind in _NOT_COMPARED and one.verdict == "keeps" and one.why
        if one.name in there.difference(compared)
    }


_STAYS = "what was written there stays, and"
_NOT_COMPARED: Mapping[str, str] = {
    "view": "only stateless steps of it differ, or steps that are filled; its rows stay, and no others are computed",
    "dataset": f"{_STAYS} how many rows it has for a result depends on batches",
    "topic": f"{_STAYS} how many records it has for a result depends on batches",
    "function": "what a function has done is not known",
}


def _filled(live: StateStore, view: str, fill: ViewFill) -> tuple[QueryResult, pl.DataFrame]:
    """Return a view as it is, and the rows that it would be filled with, both of one commit."""
    while True:
        version = live.version()
        found, source = live.select(view, Query()), live.select(fill.source, Query())
        if live.version() == version:
            return found, fill.rows(source.rows)


def _filled_from_table(
    deployment: Deployment, live: StateStore, fill: TableFill
) -> tuple[QueryResult, pl.DataFrame]:
    """Return a view as it is, and the rows that it would have of a table's state, both of one commit."""
    view = fill.schema.name
    found, after = _of_one_commit(deployment, live, {view}, fill.rows)
    return found[view], after


def _filled_with_steps(
    deployment: Deployment, live: StateStore, views: Collection[str]
) -> dict[str, QueryResult]:
    """Fill steps of the state of tables, and return views below them as they are: all of one commit."""
    if not views:
        return {}
    return _of_one_commit(deployment, live, views, deployment.step_fills.compute)[0]


def _of_one_commit(
    deployment: Deployment,
    live: StateStore,
    views: Collection[str],
    made: Callable[[Manifests, RunStore], T],
) -> tuple[dict[str, QueryResult], T]:
    """Return views as they are, and what is made of the state of the app, both of one commit.

    Manifests and the runs that they name stay as they are, so an app that commits meanwhile does not matter. It removes runs that it has
    replaced, though, so one that is missing says nothing if there was a commit: then newer ones are read.

    Raises:
        ConflictError: the app has replaced what was read, again and again.
    """
    app = deployment.app
    place = load_or_create_place(app.name, live, state_url(app.state), app.folder)
    with state_runs(app.folder, place) as runs:
        for _ in range(_READS_MAX):
            version, found, manifests = _read_together(app, live, views)
            try:
                return found, made(manifests, runs)
            except CorruptionError:
                if live.version() == version:
                    raise
    raise ConflictError(
        f"{app.name} has replaced runs of its state while they were read, {_READS_MAX} times. Nothing was changed. "
        "Compare again when it has less to do, or is stopped."
    )


def _read_together(
    app: App, live: StateStore, views: Collection[str]
) -> tuple[tuple[int, ...], dict[str, QueryResult], Manifests]:
    """Return the version of the store, and views and manifests of it."""
    while True:
        version = live.version()
        found = {view: live.select(view, Query()) for view in views}
        manifests = live.state_manifests(app.name, JOB)
        if live.version() == version:
            return version, found, manifests
