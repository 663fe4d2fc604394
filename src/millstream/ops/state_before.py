"""The state before a batch that was committed: computed again from a state that is known, by the batches as they were.

Two states are known: the empty one of the app's beginning, and what the last deployment has put in place, which is
kept in ``previous/put-in-place/`` as long as the version that it replaced. From there the batches are run in this process,
each with the range, the running time and the wall time that it had, which the state store keeps with its transaction
(``source_offsets``). So windows close, and events are late, where they were then.

What the batches count is compared with the ledger of then: a state of other records than those is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.open import open_reader
from millstream.engine.source.offsets import check_declared
from millstream.errors import (
    ConfigError,
    DeletionsLostError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from millstream.kernels.adopted_state import Manifests, StatePart, combine_state
from millstream.kernels.enrichment.operator import Enrichment
from millstream.kernels.plan import ForeachSinkSpec, JobPlan, ViewSinkSpec
from millstream.ops.previous_version import link_runs
from millstream.pipeline.compiler import compile_plan
from millstream.views.position import SOURCE_OFFSET
from millstream.views.runs.version_folders import PREVIOUS_FOLDER, PREVIOUS_NEW_FOLDER
from millstream.views.schema import JOB, Fence
from millstream.views.state_store.program import StoredProgram, buckets_of_state, different_steps
from millstream.views.state_store.program_switch import SWITCHED_BY, ProgramSwitch
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

if TYPE_CHECKING:
    from millstream.engine.local_run import LocalProgress
    from millstream.pipeline.app import App

_PUT_IN_PLACE = "put-in-place"
_OF_SOURCES = ("read", "dead", "filtered")
_OF_OPERATORS = ("late", "dead", "duplicate")


@dataclass(frozen=True)
class KnownState:
    """The state before a batch, where the source was, and how its keys are divided. ``folder`` has it; None: it is empty."""

    batch_id: int
    offset: dict[str, Any]
    partitioning: Mapping[str, int]
    folder: Path | None = None


@dataclass(frozen=True)
class StateBefore:
    """The state before a batch: its manifests, the program that they are of, and the position of the log.

    ``start`` and ``end`` are the source offsets of the batch; ``runs`` is the folder of the runs of state. ``read`` is how
    many records the batch has read of topics, by the ledger.
    """

    start: dict[str, Any]
    end: dict[str, Any]
    program: StoredProgram
    manifests: Manifests
    position: Mapping[str, Any]
    runs: Path
    read: Mapping[str, int]


def keep_put_in_place(
    folder: Path, app: str, switch: ProgramSwitch, run: int, batch_id: int
) -> None:
    """Keep what a switch is about to put in place, before ``batch_id``, with the version that it replaces.

    It belongs to ``previous.new/``, which counts once the switch by that ``run`` is durable: a crash before leaves a part
    of it, which is removed with that.
    """
    made = folder / PREVIOUS_NEW_FOLDER
    if not made.exists():
        return  # nothing is kept where it is not known from where a version reads on
    with open_state_store(made / STATE_STORE_FILE, readonly=True) as store:
        offset = store.status(app, JOB)[SOURCE_OFFSET]
    link_runs(folder / "runs", made / _PUT_IN_PLACE / "runs")
    with open_state_store(made / _PUT_IN_PLACE / STATE_STORE_FILE) as store:
        beginning = RunProgram(switch.beginning.program, {}, switch.beginning.at)
        own_run, _ = store.begin_run(app, JOB, _PUT_IN_PLACE, beginning)
        store.commit(
            Fence(app, JOB, own_run, 0),
            [],
            position=switch.position,
            status={SOURCE_OFFSET: offset, "batch_id": batch_id, "run": run},
            state=switch.manifests,
        )


def plan_without_sinks(app: App, stored: StoredProgram, *, answers: bool = False) -> JobPlan:
    """Return the plan of an app in which only views of the state store are written.

    ``answers``: whether its requests are answered, though the answers go nowhere.
    """
    outputs = [
        output
        if output.spec == ViewSinkSpec()
        else replace(
            output, spec=ForeachSinkSpec(_discard), question=output.question if answers else None
        )
        for output in app.outputs
    ]
    return compile_plan(app.name, outputs, buckets_of_state(stored), app.on_error)


def _discard(_rows: Any, _context: Any) -> None:
    """Take rows that would go outside."""


@dataclass(frozen=True)
class EarlierBatches:
    """The batches of an app that were committed, of which the ``store`` and the log know enough or not."""

    app: App
    store: StateStore

    @cached_property
    def last(self) -> int:
        """The last batch that was committed."""
        found = self.store.last_batch_id(self.app.name)
        assert found is not None, "a batch was committed"
        return found

    @cached_property
    def program(self) -> StoredProgram:
        """The program of the batches."""
        found = self.store.program(self.app.name, JOB)
        assert found is not None, "a batch was committed"
        return found

    def compute(
        self, batch_id: int, scratch: Path, on_batch: Callable[[LocalProgress], None] | None = None
    ) -> StateBefore:
        """Compute the state before a batch, in an empty folder.

        Raises:
            ConfigError: not all that is needed is there any more, the app is not declared as it was then, or asks a service.
        """
        known = self._nearest(batch_id)
        # It may have been divided into other buckets since.
        plan = plan_without_sinks(
            self.app, replace(self.program, partitioning=dict(known.partitioning))
        )
        self._check_program(plan)
        offsets = [self._offsets[number] for number in range(known.batch_id, batch_id + 2)]
        for offset in offsets[1:]:
            check_declared(offset, plan)
        *offsets, end = offsets
        try:
            self._run(plan, known, offsets, scratch, on_batch)
        except (OffsetOutOfRangeError, DeletionsLostError) as error:
            raise ConfigError(
                self._cannot(batch_id, f"the log has lost records: {error}")
            ) from None
        with open_state_store(scratch / STATE_STORE_FILE, readonly=True) as computed:
            self._check_ledger(plan, known, computed, batch_id)
            return StateBefore(
                offsets[-1],
                end,
                StoredProgram.of(plan, known.partitioning),
                computed.state_manifests(self.app.name, JOB),
                computed.position(self.app.name),
                scratch / "runs",
                self._read(plan, batch_id),
            )

    def _read(self, plan: JobPlan, batch_id: int) -> dict[str, int]:
        shared = {sink.name for sink in plan.sinks}  # an output adds to the entry of its name
        topics = {one.name: one.topic for one in plan.sources if one.name not in shared}
        lines = self.store.ledger(self.app.name, since=batch_id, until=batch_id)
        return {topics[line["step"]]: line["read"] for line in lines if line["step"] in topics}

    # ── what is known ───────────────────────────────────────────────────────────────────────

    @cached_property
    def _offsets(self) -> dict[int, dict[str, Any]]:
        return self.store.source_offsets(self.app.name, JOB)

    @cached_property
    def _known(self) -> list[KnownState]:
        """The known states before committed batches, whether the log goes back to them or not."""
        first = self._offsets.get(0)
        now = {**self.program.partitioning, "state_buckets": 0}
        return [*([] if first is None else [KnownState(0, first, now)]), *self._put_in_place()]

    def _put_in_place(self) -> Iterator[KnownState]:
        folder = self.app.folder / PREVIOUS_FOLDER / _PUT_IN_PLACE
        if not (folder / STATE_STORE_FILE).exists():
            return
        with open_state_store(folder / STATE_STORE_FILE, readonly=True) as store:
            status, program = store.status(self.app.name, JOB), store.program(self.app.name, JOB)
        assert program is not None, "it was kept with its program"
        # Where a newer deployment was interrupted, what is kept is of the one before.
        switched_by = self.store.description(self.app.name, SWITCHED_BY)
        if status["run"] == switched_by and status["batch_id"] in self._offsets:
            yield KnownState(
                status["batch_id"], status[SOURCE_OFFSET], program.partitioning, folder
            )

    def _nearest(self, batch_id: int) -> KnownState:
        """Return the last known state before a batch from which the log has all records.

        Raises:
            ConfigError: there is none.
        """
        before = [one for one in self._known if one.batch_id <= batch_id]
        usable = [one for one in before if self._lost(one) is None]
        if usable:
            return usable[-1]
        if not before:
            why = (
                "its range and time are not kept any more, or the app was deployed after it, and of the batches since "
                "neither the range nor the state at a beginning is there"
            )
            raise ConfigError(self._cannot(batch_id, why))
        raise ConfigError(self._cannot(batch_id, str(self._lost(before[-1]))))

    def _lost(self, known: KnownState) -> str | None:
        """Say which records the log no longer holds of those behind a known state; None: it holds all."""
        log = open_reader(self.app.log)
        for topic, read in known.offset["topics"].items():
            try:
                same = log.topic_id(topic) == known.offset["topic_ids"].get(topic)
                starts = [start for start, _ in log.offsets(topic)]
            except UnknownTopicError:
                return f"the topic {topic!r} is not there any more"
            if not same:
                return f"the topic {topic!r} was deleted and created again"
            for number, ((offset, *_), start) in enumerate(zip(read, starts, strict=False)):
                if offset < start:
                    return f"the log no longer holds {topic}/{number} [{offset}, {start})"
        return None

    def _cannot(self, batch_id: int, why: str) -> str:
        first = min(
            (one.batch_id for one in self._known if self._lost(one) is None), default=self.last + 1
        )
        found = f"Batches {first} to {self.last} can be captured, and"
        if first >= self.last:
            found = f"Batch {first} can be captured, and" if first == self.last else "Only"
        return (
            f"The state before batch {batch_id} of {self.app.name} cannot be computed again: {why}. {found} batch "
            f"{self.last + 1}, which comes next, once it has failed."
        )

    # ── computing ───────────────────────────────────────────────────────────────────────────

    def _check_program(self, plan: JobPlan) -> None:
        asked = [
            operator.kernel.name
            for stage in plan.stages
            for operator in stage.operators
            if isinstance(operator.kernel, Enrichment)
        ]
        if asked:
            raise ConfigError(
                f"The step {asked[0]!r} of {self.app.name} asks a service, which may give other answers than it gave then. "
                "So of this app only the batch that comes next can be captured."
            )
        now = StoredProgram.of(plan, self.program.partitioning)
        if found := different_steps(self.program, now):
            raise ConfigError(
                f"{self.app.name} is not declared as it ran: {'; '.join(found)}. Capture the batch with the code that ran "
                "it, and mend it afterwards, in the folder."
            )

    def _run(
        self,
        plan: JobPlan,
        known: KnownState,
        offsets: Sequence[dict[str, Any]],
        scratch: Path,
        on_batch: Callable[[LocalProgress], None] | None,
    ) -> None:
        from millstream.engine.local_run import LocalRun  # noqa: PLC0415 - loads pyspark

        run = LocalRun(plan, self.app.log, scratch, scratch / STATE_STORE_FILE)
        (scratch / "runs").mkdir(parents=True)
        if known.folder is not None:
            with open_state_store(known.folder / STATE_STORE_FILE, readonly=True) as store:
                manifests = store.state_manifests(self.app.name, JOB)
                position = store.position(self.app.name)
            shutil.copytree(known.folder / "runs", scratch / "runs", dirs_exist_ok=True)
            keys = {key: key for key in self.program.steps}
            state = combine_state(plan, StatePart(manifests, keys), StatePart({}, {}))
            run.begin_from(offsets[0], position, [], state, partitioning=known.partitioning)
        run.run_planned(offsets, None, on_batch, partitioning=dict(known.partitioning))

    def _check_ledger(
        self, plan: JobPlan, known: KnownState, computed: StateStore, batch_id: int
    ) -> None:
        """Make sure that the batches have counted what they counted when they ran.

        Raises:
            ConfigError: one has not, so its records were others.
        """
        counted = {
            **{source.name: _OF_SOURCES for source in plan.sources},
            **{
                operator.kernel.name: _OF_OPERATORS
                for stage in plan.stages
                for operator in stage.operators
            },
        }
        shift = known.batch_id - (
            0 if known.folder is None else 1
        )  # what it begins with is a batch
        now = {
            (line["batch_id"] + shift, line["step"]): line
            for line in computed.ledger(self.app.name)
        }
        for line in self.store.ledger(self.app.name, since=known.batch_id):
            if line["batch_id"] >= batch_id:
                return
            again = now.get(
                (line["batch_id"], line["step"]), {}
            )  # none: there was nothing to count
            for name in counted.get(line["step"], ()):
                if again.get(name, 0) != line[name]:
                    raise ConfigError(
                        self._cannot(
                            batch_id,
                            f"the step {line['step']!r} counted {line[name]:,} {name} in batch {line['batch_id']}, and "
                            f"{again.get(name, 0):,} now. Compaction may have removed records, or what a function finds "
                            "outside is another",
                        )
                    )
