"""Comparing an edited app with the one that has run, before it takes its place: `millstream compare`.

What the edit rebuilds is computed beside the app, as a deployment does it (`ops/deploy.py`), up to the position
that the rows of the live view are of. So both versions of a view are compared at one position, also while
the app runs; of several views each at its own. A deployment goes on with what was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

from millstream.engine.state_place import load_or_create_place
from millstream.errors import ConflictError, CorruptionError
from millstream.kernels.plan import ViewSinkSpec
from millstream.kernels.state.sorted_runs import RunStore
from millstream.kernels.table_feed import Manifests
from millstream.object_store.address import state_url
from millstream.ops.deploy import Deployment, prepare
from millstream.ops.plan import ChangePlan, plan_change
from millstream.ops.replay_start import ReplayStart
from millstream.ops.state_runs import state_runs
from millstream.ops.view_difference import Threshold, ViewDifference, compare_rows
from millstream.views.query import Query, QueryResult
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

    ``positions`` says of which position of the log each was compared; ``new`` are the views that there are not yet. ``not_compared`` are
    changed views in databases of their own, and datasets: what was written there stays, so the new program has no such rows beside it.
    """

    app: str
    plan: ChangePlan
    views: tuple[ViewDifference, ...] = ()
    positions: Mapping[str, Any] | None = None
    new: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

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
                {**view.to_dict(), "position": (self.positions or {}).get(view.view)}
                for view in self.views
            ],
            "new_views": list(self.new),
            "not_compared": list(self.not_compared),
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
        ConfigError: the edit cannot be deployed, or a view has another key.
        ConflictError: a deployment or another comparison is at work.
    """
    with hold_deployment(app.folder):
        plan = plan_change(app, same_expressions=same_expressions, start=start)
        deployment = prepare(
            app, plan, same_expressions=same_expressions, gone_ok=gone_ok, ask_again=ask_again
        )
        if deployment is None:
            return Comparison(app.name, plan, not_compared=_written_elsewhere(app, plan))
        deployment.compute(on_batch, rows_per_batch)
        return _compared(
            deployment, on_batch, sample_rows=sample_rows, rows_per_batch=rows_per_batch
        )


def _compared(
    deployment: Deployment,
    on_batch: Callable[[LocalProgress], None] | None,
    *,
    sample_rows: int,
    rows_per_batch: int,
) -> Comparison:
    """Compare each view that is rebuilt, at its own position."""
    app = deployment.app
    views: list[ViewDifference] = []
    positions: dict[str, Any] = {}
    of_tables = deployment.change.change.table_fills
    of_steps = deployment.step_fills.views
    changed = (
        deployment.rebuilt_views | deployment.filled_views.keys() | of_tables.keys() | of_steps
    )
    with open_state_store(app.state_store, readonly=True) as live:
        there = {schema.name for schema in live.views()}
        with_steps = _filled_with_steps(deployment, live, of_steps & there)
        for view in sorted(changed & there):
            fill = deployment.filled_views.get(view)
            if fill is not None:
                found, after = _filled(live, view, fill)
            elif view in of_tables:
                found, after = _filled_from_table(deployment, live, of_tables[view])
            elif view in with_steps:
                found, after = with_steps[view], deployment.step_fills.rows(view)
            else:
                found = live.select(view, Query())
                deployment.compute(on_batch, rows_per_batch, found.position)
                after = deployment.rows(view)
            key = _key_of(deployment, view)
            views.append(compare_rows(view, key, found.rows, after, sample_rows=sample_rows))
            positions[view] = found.position
    new = tuple(sorted(changed - there))
    elsewhere = _written_elsewhere(app, deployment.change)
    return Comparison(app.name, deployment.change, tuple(views), positions, new, elsewhere)


def _written_elsewhere(app: App, plan: ChangePlan) -> tuple[str, ...]:
    """Return the outputs with rows of which none are replaced, and that get others from the edit on."""
    elsewhere = {output.name for output in app.outputs if output.spec != ViewSinkSpec()}
    changed = (one.name for one in plan.change.parts if one.kind in ("view", "dataset") and one.why)
    return tuple(sorted(elsewhere.intersection(changed)))


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


def _key_of(deployment: Deployment, view: str) -> tuple[str, ...]:
    return next(sink.key for sink in deployment.plan.sinks if sink.name == view)
