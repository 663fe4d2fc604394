"""Deploying an edited app: what it changes is computed beside the app that runs, and then takes its place.

1. The plan says what is rebuilt (`ops/plan.py`). A program of these parts alone is compiled, with all that is
   above them.
2. It reads the log from its start up to the app's position, into ``next/`` in the app's folder. The app may
   run meanwhile; nothing that it reads or writes is touched. A deployment that is stopped or killed resumes.
3. Once the app is stopped, the rest is read, and one transaction of the app's state store puts state and views of
   the parts in the place of the old ones (`views/state_store/program_switch.py`, with the crash table). Steps
   that keep their state keep it; topics, datasets and functions go on.

What the app was then is kept in ``previous/`` (`ops/previous_version.py`), so that going back reads only what came
since (`ops/rollback.py`). ``next/`` is removed after that; a crash before leaves it, and the next deployment removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.durations import Duration
from millstream.engine.first_offsets import load_first_offsets
from millstream.engine.state_place import begin_at_place, load_or_create_place
from millstream.errors import ConfigError, ConflictError, CorruptionError, FencedError
from millstream.kernels.adopted_state import StatePart, combine_state
from millstream.kernels.plan import ForeachSinkSpec, JobPlan, TopicSinkSpec, ViewSinkSpec
from millstream.object_store.address import state_url
from millstream.object_store.place import StatePlace
from millstream.ops.deploy_refusals import cannot_go_back, check_deployable
from millstream.ops.fills import FILLED_FOLDER, StepFills
from millstream.ops.plan import ChangePlan, plan_change
from millstream.ops.previous_version import (
    BEGUN_FROM,
    KeptCoverage,
    PreviousVersion,
    has_lost_records,
    has_read_past,
    keep_previous,
    put_runs,
)
from millstream.ops.program_part import end_offsets, keys_in_part
from millstream.ops.replay_start import ReplayStart, Starts
from millstream.ops.state_before import keep_put_in_place
from millstream.ops.state_runs import state_runs
from millstream.ops.version_retention import KEEPS_NOTHING, Keeping, utc_now
from millstream.pipeline.compiler import compile_plan
from millstream.pipeline.graph import Output
from millstream.views.commit.committer import DEAD_LETTERS_VIEW, BatchCommitter, view_schemas
from millstream.views.commit.open_committer import open_committer
from millstream.views.coverage import (
    STATE_STORE_VIEW,
    BatchBoundary,
    CoverageSpan,
    OutputCoverage,
    OutputSink,
    initial_coverage,
    topic_label,
)
from millstream.views.position import SOURCE_OFFSET
from millstream.views.runs.control_files import (
    active_runs,
    hold_deployment,
    hold_run_lock,
)
from millstream.views.runs.version_folders import (
    NEXT_FOLDER,
    drop_expired,
    kept_until,
    remove_version,
    settle_previous,
)
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.state_store.program import StoredProgram, buckets_of_state
from millstream.views.state_store.program_change import compare_programs
from millstream.views.state_store.program_paths import ProgramPaths
from millstream.views.state_store.program_state import ProgramOutputs, ProgramState
from millstream.views.state_store.program_switch import (
    SWITCHED_BY,
    ComparedProgram,
    FilledView,
    ProgramSwitch,
    RebuiltView,
    coverage_of,
)
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.state_store.view_fill import ViewFill, fill_views
from millstream.views.store_location import STATE_STORE_FILE, open_state_store, state_store_exists

if TYPE_CHECKING:
    from millstream.engine.local_run import LocalProgress
    from millstream.pipeline.app import App

_STARTS = "starts"
"""The description of what is computed that says where it was asked to begin."""

KEEP = "7 days"
"""How long the version before is kept, by default."""


@dataclass(frozen=True)
class DeployResult:
    """What a deployment did.

    ``switched``: the app's next run goes on with the new program. Otherwise the app was running: stop it, and
    deploy again, which reads what it has read since. ``records`` were read by this deployment. ``kept_until``: how
    long the version before is kept to go back to; None if there is none. ``topics`` are the topics whose records are of
    the new program from an offset of each partition on, if they differ from those before.
    """

    app: str
    plan: ChangePlan
    records: int
    switched: bool
    kept_until: datetime | None = None
    topics: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def deploy(
    app: App,
    on_batch: Callable[[LocalProgress], None] | None = None,
    *,
    same_expressions: bool = False,
    gone_ok: bool = False,
    ask_again: bool = False,
    start: ReplayStart | None = None,
    rows_per_batch: int = 100_000,
    keep: Duration = KEEP,
    clock: Callable[[], datetime] = utc_now,
    by_run: bool = False,
) -> DeployResult:
    """Compute what an edited app changes, and let it take the place of the app before.

    Args:
        on_batch: Called after every batch that was computed; if it raises, the deployment stops and can be resumed.
        same_expressions: As in :meth:`millstream.App.run`.
        gone_ok: Rebuild although the log no longer holds all records; what is rebuilt lacks them, and says so.
        ask_again: Rebuild although a step asks its service again (``enrich``), and may get other answers than it gave then.
        start: Where in the log to begin, by default at its start; what is rebuilt lacks what is before, and says so.
        rows_per_batch: The most records that are in memory at once.
        keep: How long the version before is kept, so that :func:`millstream.ops.rollback.rollback` goes back to it.
        clock: What time it is.
        by_run: A run does it before it begins, to fill what is new; a rollback says so.

    Raises:
        ConfigError: the plan refuses, or the log no longer holds all that is needed.
        ConflictError: the app was run or deployed meanwhile: deploy again. Or another deployment is at work.
    """
    keeping = Keeping.of(keep, clock, by_run=by_run)
    with hold_deployment(app.folder):
        settle(app, clock())
        plan = plan_change(app, same_expressions=same_expressions, start=start)
        deployment = prepare(
            app, plan, same_expressions=same_expressions, gone_ok=gone_ok, ask_again=ask_again
        )
        if deployment is None:
            remove_version(app.folder, NEXT_FOLDER)
            return DeployResult(app.name, plan, 0, switched=True)
        deployment = replace(deployment.with_computed(), keeping=keeping)
        return deployment.complete(on_batch, rows_per_batch)


def settle(app: App, now: datetime) -> None:
    """Complete what an interrupted deployment has left of the version before, and drop it if its time has run out."""
    if state_store_exists(app.state_store):
        with open_state_store(app.state_store, readonly=True) as store:
            switched_by = store.description(app.name, SWITCHED_BY)
        settle_previous(app.folder, switched_by)
    drop_expired(app.folder, now)


def prepare(
    app: App, plan: ChangePlan, *, same_expressions: bool, gone_ok: bool, ask_again: bool
) -> Deployment | None:
    """Return the deployment of an edited app; None if a run goes on without one.

    Raises:
        ConfigError: it is not possible; see :func:`deploy`.
    """
    check_deployable(app, plan, gone_ok=gone_ok, ask_again=ask_again)
    if plan.compared is None or (plan.verdict == "keeps" and not plan.change.moves_state):
        return None
    if plan.compared.program.partitioning.get("state_buckets"):
        raise ConfigError(
            f"{app.name} was rescaled, and has not run since. Run it once as it was, and then deploy."
        )
    return Deployment(app, plan, plan.compared, same_expressions)


@dataclass(frozen=True)
class Deployment:
    """One edited app beside the state that another program has left.

    ``change`` is what was planned, and ``compared`` what was there then. ``back``: what is rebuilt begins with the version
    that is kept, or not at all. ``beside``: views in databases whose rows are kept as they are computed, for a comparison.
    """

    app: App
    change: ChangePlan
    compared: ComparedProgram
    same_expressions: bool
    keeping: Keeping = KEEPS_NOTHING
    back: bool = False
    beside: frozenset[str] = frozenset()

    @property
    def stored(self) -> StoredProgram:
        """The program that made the state."""
        return self.compared.program

    @property
    def folder(self) -> Path:
        return self.app.folder / NEXT_FOLDER

    @cached_property
    def plan(self) -> JobPlan:
        return self.app.plan(buckets_of_state(self.stored))

    @cached_property
    def program(self) -> StoredProgram:
        return StoredProgram.of(self.plan, self.stored.partitioning)

    @property
    def ends(self) -> Mapping[str, Any]:
        assert self.change.boundary is not None, "without a batch nothing is deployed"
        return self.change.boundary.position

    @property
    def rebuilt_views(self) -> set[str]:
        """The views whose rows are computed anew."""
        parts = self.change.change.parts
        return {part.name for part in parts if part.kind == "view" and part.is_computed}

    @property
    def filled_views(self) -> Mapping[str, ViewFill]:
        """The views that get their rows from another one."""
        return self.change.change.fills

    def fill(self, live: StateStore, place: StatePlace | None) -> list[FilledView]:
        """Fill what is filled, of the store and the state of the app; return the views with all their rows."""
        outputs = live.outputs(self.app.name, JOB)
        filled = fill_views(self.filled_views.values(), outputs, live.scan)
        change = self.change.change
        if not change.table_fills and not change.step_fills:
            return filled
        manifests = live.state_manifests(self.app.name, JOB)
        with state_runs(self.app.folder, place) as runs:
            filled += (fill.filled(manifests, runs) for fill in change.table_fills.values())
            self.step_fills.compute(manifests, runs)
        return [*filled, *self.step_fills.filled()]

    @cached_property
    def step_fills(self) -> StepFills:
        """The steps that are filled of tables."""
        return StepFills(
            self.app.name,
            self.plan,
            self.change.change,
            self.app.log,
            self.folder / FILLED_FOLDER,
            self.stored.partitioning,
        )

    def outputs(self) -> list[Output]:
        """Return the outputs that lead to all that is rebuilt. Only views of the state store keep their sinks."""
        parts = self.change.change.parts
        steps = {one.key for one in parts if one.kind == "step" and one.is_computed}
        program, found = self.program, []
        paths = ProgramPaths(program)
        for output in self.app.outputs:
            above = paths.steps_of(program.outputs[output.name])
            if output.name in self.rebuilt_views and output.spec == ViewSinkSpec():
                found.append(output)
            elif steps & above and output.name in self.beside:
                found.append(replace(output, spec=ViewSinkSpec()))
            elif steps & above:
                found.append(replace(output, spec=ForeachSinkSpec(_discard), question=None))
        return found

    @property
    def database_views(self) -> dict[str, str]:
        """The views in databases of their own that are below what is rebuilt, and the addresses of these."""
        below = {one.name for one in self.outputs()}
        views = {o.name: o.spec for o in self.app.outputs if isinstance(o.spec, ViewSinkSpec)}
        return {name: one.store for name, one in views.items() if name in below and one.store}

    def with_computed(self) -> Deployment:
        """Return the deployment with the rows of views in databases, if a comparison has computed these with the rest."""
        wider = replace(self, beside=frozenset(self.database_views))
        return wider if wider.beside and wider.is_computed else self

    @property
    def is_computed(self) -> bool:
        """Whether what there is of a deployment is of exactly this one."""
        if not self._store.exists():
            return False
        with open_state_store(self._store, readonly=True) as store:
            known = store.program(self.app.name, JOB)
        now = StoredProgram.of(self._part(self.outputs()), self.stored.partitioning)
        return known is not None and known.to_json() == now.to_json()

    def complete(
        self, on_batch: Callable[[LocalProgress], None] | None, rows_per_batch: int
    ) -> DeployResult:
        """Compute what is rebuilt, and switch if the app does not run."""
        records = self.compute(on_batch, rows_per_batch)
        switched = not active_runs(self.app.folder)
        if switched:
            settle_previous(self.app.folder, self.switch())
            remove_version(self.app.folder, NEXT_FOLDER)
        until = kept_until(self.app.folder)
        topics = self._changed_topics() if switched else {}
        return DeployResult(self.app.name, self.change, records, switched, until, topics)

    def _changed_topics(self) -> dict[str, tuple[int, ...]]:
        """Return the topics that have records of the new program from here on, and the offsets of that."""
        assert self.change.boundary is not None, "without a batch nothing is deployed"
        next_batch_id, labels = self.change.boundary.batch_id, {}
        for sink in self.plan.sinks:
            if isinstance(sink.spec, TopicSinkSpec):
                labels[sink.name, topic_label(sink.spec.topic)] = sink.spec.topic
        with open_state_store(self.app.state_store, readonly=True) as store:
            outputs = store.outputs(self.app.name, JOB)
        spans = {topic: outputs[output].spans[-1] for output, topic in labels.items()}
        return {
            topic: span.first_offsets
            for topic, span in spans.items()
            if span.since is not None and span.since.batch_id == next_batch_id
        }

    def compute(
        self,
        on_batch: Callable[[LocalProgress], None] | None,
        rows_per_batch: int,
        position: Mapping[str, Any] | None = None,
    ) -> int:
        """Compute what is rebuilt up to a position, by default the app's as it was planned.

        Return how many records that read.
        """
        outputs = self.outputs()
        if not outputs:
            return 0
        from millstream.engine.local_run import LocalRun  # noqa: PLC0415 - loads pyspark

        part = self._part(outputs)
        log = open_reader(self.app.log)
        ends = end_offsets(log, part, position or self.ends)
        self._remove_other(part, ends, log)
        self.folder.mkdir(parents=True, exist_ok=True)
        read = []

        def count(progress: LocalProgress) -> None:
            read.append(progress.read)
            if on_batch is not None:
                on_batch(progress)

        run = LocalRun(part, self.app.log, self.folder, self._store, rows_per_batch)
        starts = self.change.starts
        if not self._store.exists() and starts is not None:
            with open_state_store(self._store) as store:
                store.put_description(self.app.name, _STARTS, _as_lists(starts))
        elif not self._store.exists():
            previous = PreviousVersion(self.app.name, self.app.folder)
            refusal = previous.begin(run, part, ends, partial_ok=self.back)
            if self.back and refusal is not None:
                raise cannot_go_back(self.app, refusal)
        if starts is not None:
            # Of topics that only outputs read, nothing is rebuilt: their rows would be discarded.
            starts = {topic: starts.get(topic, tuple(offsets)) for topic, offsets in ends.items()}
        else:
            starts = self._first_offsets(log, ends)
        run.run(ends, count, starts=starts, partitioning=dict(self.stored.partitioning))
        return sum(read)

    def _first_offsets(self, log: Reader, ends: Mapping[str, list[int]]) -> Starts:
        """Return where the app began to read some topics, as far as the log has the records."""
        with open_state_store(self.app.state_store, readonly=True) as store:
            first = load_first_offsets(store, self.app.name)
        found = {}
        for topic in ends:
            began = first.get(topic, ())
            begins = [start for start, _ in log.offsets(topic)]
            began += (0,) * (len(begins) - len(began))
            found[topic] = tuple(map(max, begins, began))
        return found

    def rows(self, view: str) -> pl.DataFrame:
        """Return the rows of a rebuilt view as they have been computed."""
        with open_state_store(self._store, readonly=True) as store:
            return store.scan(view)

    def switch(self) -> int:
        """Let the new program take the place of the one before. The app is stopped. Return the run that did it.

        Raises:
            ConflictError: the app was run or deployed meanwhile, here or on another machine.
        """
        try:
            return self._switch_in_store()
        except FencedError as error:
            raise ConflictError(
                f"Another run or deployment of {self.app.name} began before this one could put the new program in place. "
                "Nothing was changed by this one. See what this program would change now (millstream plan), and deploy "
                "again."
            ) from error

    def _switch_in_store(self) -> int:
        self.app.folder.mkdir(parents=True, exist_ok=True)  # it may have run on another machine
        with (
            open_committer(self.plan, self.app.state_store, self.app.log) as committer,
            hold_run_lock(
                self.app.folder, committer.state_store.newest_run(self.app.name, JOB) + 1
            ),
        ):
            # A switch that would be refused fences nobody.
            committer.state_store.check_unchanged(self.app.name, JOB, self.ends, self.compared)
            place = load_or_create_place(
                self.app.name, committer.state_store, state_url(self.app.state), self.app.folder
            )
            checkpoint_id = committer.state_store.checkpoint_id(self.app.name, JOB)
            assert checkpoint_id is not None, "it has committed batches"
            try:
                committer.switch_program(
                    JOB,
                    checkpoint_id,
                    lambda start, beginning: self._switch(committer, place, start, beginning),
                    partitioning=self.stored.partitioning,
                    same_expressions=self.same_expressions,
                )
            except CorruptionError:
                # A newer run removes the runs of state that it has replaced: report only the cause.
                committer.check_not_fenced()
                raise
            return committer.run

    def _switch(
        self,
        committer: BatchCommitter,
        place: StatePlace | None,
        start: RunStart,
        beginning: RunProgram,
    ) -> ProgramSwitch:
        live = committer.state_store
        # From here on nobody else changes it without fencing this run: what is read below is what was planned for.
        live.check_unchanged(self.app.name, JOB, self.ends, self.compared)
        if place is not None:
            begin_at_place(place, committer)
        keep_previous(
            self.app.folder,
            live,
            self.app.name,
            self._views_to_keep(live, beginning),
            place=place,
            run=start.run,
            at=beginning.at,
            until=self.keeping.until(),
            by_run=self.keeping.by_run,
        )
        switch = self._put_together(live, place, start, beginning)
        if place is None:
            assert self.change.boundary is not None, "without a batch nothing is deployed"
            keep_put_in_place(
                self.app.folder, self.app.name, switch, start.run, self.change.boundary.batch_id
            )
        return switch

    def _put_together(
        self, live: StateStore, place: StatePlace | None, start: RunStart, beginning: RunProgram
    ) -> ProgramSwitch:
        """Return what takes the place of the program before: state that is kept, and what was computed."""
        kept = StatePart(live.state_manifests(self.app.name, JOB), self.change.change.kept)
        outputs, filled = self.outputs(), self.fill(live, place)
        coverage = coverage_of(filled)
        target = self.app.folder / "runs" if place is None else place
        of_tables = self.step_fills.state(target, start.run)
        if not outputs:
            manifests = combine_state(self.plan, kept, of_tables)
            return ProgramSwitch(beginning, self.compared, self.ends, manifests, filled, coverage)
        with open_state_store(self._store, readonly=True) as store:
            keys = keys_in_part(self.program, self._part(outputs))
            computed = store.state_manifests(self.app.name, JOB)
            moved = put_runs(self.folder / "runs", computed, target, start.run)
            rebuilt = StatePart(computed, keys, moved)
            schemas = [one for one in view_schemas(self.plan) if one.name in self.rebuilt_views]
            views = [RebuiltView(schema, store.scan(schema.name)) for schema in schemas]
        manifests = combine_state(self.plan, kept, of_tables, rebuilt)
        return ProgramSwitch(
            beginning,
            self.compared,
            self.ends,
            manifests,
            [*views, *filled],
            {**self._coverage(beginning.at), **coverage},
        )

    def _views_to_keep(self, live: StateStore, beginning: RunProgram) -> list[str]:
        """Return the views whose rows the new program changes or leaves out, or that going back would rebuild.

        Going back rebuilds what was left out, with all that is on its paths: it misses what the new program has read.
        """
        # If it is another one by now, the store refuses the switch.
        stored = live.program(self.app.name, JOB)
        assert stored is not None, "it has committed batches"
        there = {one.name: one for one in live.views() if one.name != DEAD_LETTERS_VIEW}
        schemas = {one.name: one for one in view_schemas(self.plan)}
        after = ProgramState(
            beginning.program,
            ProgramOutputs(beginning.outputs, schemas),
            BatchBoundary(0, {}, beginning.at),
        )
        written = {  # those that were left out before may read steps that are no longer there
            output: one
            for output, one in live.outputs(self.app.name, JOB).items()
            if output[0] in stored.outputs
        }
        before = ProgramOutputs(
            written,
            {name: one for name, one in there.items() if (name, STATE_STORE_VIEW) in written},
        )
        left_out = there.keys() & before.schemas.keys() - schemas.keys()
        back = compare_programs(after, stored, before, same_expressions=True, again=left_out)
        rebuilt = {one.name for one in back.parts if one.verdict == "rebuilds"}
        changing = rebuilt | {one.name for one in self.change.change.parts if one.is_made_anew}
        return sorted(there.keys() & changing | there.keys() - schemas.keys())

    def _coverage(self, at: str) -> dict[OutputSink, OutputCoverage]:
        """Return the coverage of rebuilt views: of all that the log holds, or as that of the version that was kept."""
        starts: dict[str, dict[str, int]] = {}
        for one in self.change.replays:
            starts.setdefault(one.topic, {})[str(one.partition)] = one.start
        chosen = self.change.starts is not None and any(one.start for one in self.change.replays)
        lacks = self.change.gone or chosen
        since = BatchBoundary(0, starts, at) if lacks else None
        with open_state_store(self._store, readonly=True) as store:
            begun = KeptCoverage.from_json(store.description(self.app.name, BEGUN_FROM))
            has_read = begun is None or store.position(self.app.name) != begun.position

        def spans(view: str) -> tuple[CoverageSpan, ...]:
            compacted = self.change.compacted.get(f"view {view}", ()) if has_read else ()
            if begun is None:
                return (CoverageSpan(since, compacted=compacted),)
            *before, last = begun.spans[view]
            every = tuple(sorted({*compacted, *last.compacted}))
            return (*before, replace(last, compacted=every))

        return {
            (name, label): replace(one, spans=spans(name))
            for (name, label), one in initial_coverage(self.plan).items()
            if label == STATE_STORE_VIEW and name in self.rebuilt_views
        }

    def _part(self, outputs: list[Output]) -> JobPlan:
        buckets = buckets_of_state(self.stored)
        return compile_plan(self.app.name, outputs, buckets, self.app.on_error, self.program.topics)

    @property
    def _store(self) -> Path:
        return self.folder / STATE_STORE_FILE

    def _remove_other(self, part: JobPlan, ends: Mapping[str, list[int]], log: Reader) -> None:
        """Remove what was computed for another edit, with other buckets, or past the app: it was restored since.

        So is what was read from another place in the log on, a folder without a batch, which may say that it begins with the kept version, and has not begun;
        what cannot go on, as the log has lost records behind it; and for a rollback, what was read from the start
        of the log.
        """
        if not self._store.exists():
            remove_version(self.app.folder, NEXT_FOLDER)
            return
        now = StoredProgram.of(part, self.stored.partitioning)
        with open_state_store(self._store) as store:
            known, read = store.program(self.app.name, JOB), store.position(self.app.name)
            offset = store.status(self.app.name, JOB).get(SOURCE_OFFSET)
            begun_from = store.description(self.app.name, BEGUN_FROM)
            starts = store.description(self.app.name, _STARTS)
        past = has_read_past(read, ends)
        lost = offset is not None and has_lost_records(log, offset, ends)
        other = known is None or known.to_json() != now.to_json()
        other |= starts != _as_lists(self.change.starts)
        if offset is None or other or past or lost or (self.back and begun_from is None):
            remove_version(self.app.folder, NEXT_FOLDER)


def _as_lists(starts: Starts | None) -> dict[str, list[int]] | None:
    """Return where a rebuild begins as JSON values."""
    return None if starts is None else {topic: list(found) for topic, found in starts.items()}


def _discard(_rows: Any, _context: Any) -> None:
    """Take rows that only lead to state: what is written already is not written again."""
