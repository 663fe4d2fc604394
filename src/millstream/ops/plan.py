"""What an edited app would do to its state, before it runs: `millstream plan`.

It reads the app's state store and the ends of its log, and changes nothing. What it says of the parts is
decided in `views/state_store/program_change.py`; here it becomes records to read, and time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.engine.first_offsets import (
    FirstOffsets,
    load_first_offsets,
    load_first_starts,
    wanted_starts,
)
from millstream.engine.whole_topics import compacted_topics_of_transactions, is_compacted
from millstream.errors import UnknownTopicError
from millstream.kernels.definition import canonical_text, without_code
from millstream.kernels.enrichment.operator import Enrichment
from millstream.kernels.plan import JobPlan
from millstream.kernels.table_inputs import step_inputs
from millstream.ops.fills import held_tables
from millstream.ops.replay_start import ReplayStart, Starts
from millstream.views.commit.committer import view_schemas
from millstream.views.coverage import BatchBoundary, initial_coverage
from millstream.views.position import TOPIC_IDS
from millstream.views.runs.version_folders import kept_until
from millstream.views.schema import JOB
from millstream.views.state_store.part_change import ProgramChange, Verdict
from millstream.views.state_store.program import StoredProgram, buckets_of_state, find_refusals
from millstream.views.state_store.program_change import compare_programs
from millstream.views.state_store.program_state import ProgramOutputs, ProgramState
from millstream.views.state_store.program_switch import SWITCHED_BY, ComparedProgram
from millstream.views.state_store.store import StateStore
from millstream.views.state_store.view_fill import view_paths
from millstream.views.store_location import open_state_store, state_store_exists

if TYPE_CHECKING:
    from millstream.pipeline.app import App

EXIT_CODES: Mapping[Verdict, int] = {"keeps": 0, "drops": 3, "rebuilds": 3, "refuses": 4}
EXIT_GONE = 5
"""The exit code if a rebuild needs records that the log no longer holds."""


@dataclass(frozen=True)
class PartitionReplay:
    """The offsets ``[start, end)`` of a partition that are to be read again.

    ``gone`` are the records before them that the log no longer holds. Offsets are counted: where
    compaction has removed records, or transactions have left markers, there are fewer records
    (:attr:`ChangePlan.compacted`).
    """

    topic: str
    partition: int
    start: int
    end: int
    gone: int


@dataclass(frozen=True)
class FillSize:
    """A view that gets all its rows from another one, the ``source``, which has so many ``rows`` now."""

    view: str
    source: str
    rows: int


@dataclass(frozen=True)
class TableSize:
    """A table whose state is read for steps that are filled of it: at most so many ``rows``."""

    step: str
    rows: int


@dataclass(frozen=True)
class ChangePlan:
    """What a run of an app, as it is declared now, would do to the state that an earlier one has left.

    ``boundary`` is None where nothing was committed yet, so that nothing can change. ``replays`` are what
    the parts that rebuild need of the log. ``records_per_s`` is the speed of the app's largest batch; None
    if none was measured. ``kept_until``: how long the version before the last deployment is kept; None if there is none.
    ``compacted``: of each part that is rebuilt, as ``"view clicks"``, the topics of which compaction may have removed
    records that it needs. A part that reads nothing but tables needs the last record of each key alone.
    ``starts``: where a rebuild was asked to begin; None for the start of the log. ``filled``: the views for which no
    record is read again, as another view has all that they need. ``tables``: those of whose state steps are filled. ``asking``: the steps that ask a service
    what they asked before, and ask it again (``enrich``), as they are on the path of what is computed anew. ``compared``: what
    was there when the plan was made; None where nothing was committed. ``began``: where the app began to read the topics that it
    did not read from their first record, or will begin with its first run.
    """

    app: str
    change: ProgramChange
    boundary: BatchBoundary | None = None
    replays: tuple[PartitionReplay, ...] = ()
    records_per_s: float | None = None
    kept_until: datetime | None = None
    compacted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    starts: Starts | None = None
    filled: tuple[FillSize, ...] = ()
    asking: tuple[str, ...] = ()
    tables: tuple[TableSize, ...] = ()
    compared: ComparedProgram | None = None
    began: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The most that happens to any part."""
        return self.change.verdict

    @property
    def records(self) -> int:
        """How many records are to be read again, by their offsets."""
        return sum(one.end - one.start for one in self.replays)

    @property
    def gone(self) -> int:
        """How many records the log no longer holds of those that a rebuild needs."""
        return sum(one.gone for one in self.replays)

    @property
    def compacted_topics(self) -> list[str]:
        """The topics of ``compacted``, each once, in their order."""
        return sorted({topic for topics in self.compacted.values() for topic in topics})

    @property
    def lacks_records(self) -> bool:
        """Whether a rebuild needs records that the log no longer holds, or that compaction may have removed."""
        return self.verdict == "rebuilds" and bool(self.gone or self.compacted)

    @property
    def seconds(self) -> float | None:
        """How long reading them again takes at the measured speed."""
        return self.records / self.records_per_s if self.records_per_s else None

    @property
    def exit_code(self) -> int:
        """0 if a run keeps all there is, 3 if parts rebuild or are dropped, 4 if refused, 5 if records are gone."""
        if self.lacks_records:
            return EXIT_GONE
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "app": self.app,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "refusals": list(self.change.refusals),
            "parts": [asdict(part) for part in self.change.parts],
            "asks_again": list(self.asking),
            "filled": [asdict(one) for one in self.filled],
            "tables_read": [asdict(one) for one in self.tables],
            "began": dict(self.began),
            "takes_effect_at": None if self.boundary is None else asdict(self.boundary),
            "read_again": [asdict(one) for one in self.replays],
            "records": self.records,
            "records_gone": self.gone,
            "compacted": {part: list(topics) for part, topics in self.compacted.items()},
            "records_per_s": self.records_per_s,
            "seconds": self.seconds,
            "kept_until": None if self.kept_until is None else self.kept_until.isoformat(),
        }


def plan_change(
    app: App,
    *,
    same_expressions: bool = False,
    start: ReplayStart | None = None,
    again: Collection[str] = (),
) -> ChangePlan:
    """Return what a run of the app as it is declared now would do. Changes nothing.

    Args:
        same_expressions: As in :meth:`millstream.App.run`.
        start: Where in the log what is rebuilt begins; None for its start.
        again: Views of the app that are rebuilt whatever is there.

    Raises:
        ConfigError: the app is declared wrongly, or its state store cannot be read; or ``start`` is not in the log.
        RetriableError: a database or broker is away.
    """
    location = app.state_store
    if not state_store_exists(location):
        return _first_run(app)
    with open_state_store(location, readonly=True) as store:
        switched_by = store.description(
            app.name, SWITCHED_BY
        )  # before the program: if it is older, a switch is refused
        left = _left(app, store)
        if left is None:
            return _first_run(app)
        known_ids = store.description(app.name, TOPIC_IDS) or {}
        speed = _speed(store, app.name)
        first, began = load_first_offsets(store, app.name), load_first_starts(store, app.name)
        plan, now, change = _compared(app, left, same_expressions=same_expressions, again=again)
        filled = tuple(
            FillSize(view, fill.source, store.count(fill.source))
            for view, fill in change.fills.items()
        )
        tables = _table_sizes(app, store, plan, change)
    log = open_reader(app.log)
    refusals = [
        *find_refusals(left.program, now, app.buckets),
        *_other_topics(plan, log, known_ids),
        *_not_computed_here(plan, change),
    ]
    if not refusals:
        refusals += _compacted_transactions(plan, log)
    change = replace(change, refusals=tuple(refusals))
    starts = None
    if start is not None and not refusals:
        starts = start.starts(log, change.topics, left.boundary.position)
    replays = [] if refusals else _replays(log, change.topics, left, starts, first)
    compacted = {} if refusals else _compacted_inputs(plan, change, log)
    kept = kept_until(app.folder)
    return ChangePlan(
        app.name,
        change,
        left.boundary,
        tuple(replays),
        speed,
        kept,
        compacted,
        starts,
        () if refusals else filled,
        () if refusals else tuple(_asking(plan, change, left.program)),
        () if refusals else tables,
        ComparedProgram(left.program, switched_by),
        began,
    )


def _table_sizes(
    app: App, store: StateStore, plan: JobPlan, change: ProgramChange
) -> tuple[TableSize, ...]:
    """Return the tables that are read for steps that are filled, by name."""
    if not change.step_fills:
        return ()
    manifests = store.state_manifests(app.name, JOB)
    sizes = [
        TableSize(table.operator.kernel.name, table.count(manifests))
        for table in held_tables(plan, change)
    ]
    return tuple(sorted(sizes, key=lambda one: one.step))


def edited_parts(app: App, store: StateStore) -> tuple[str, ...]:
    """Return the names of the steps and outputs of an app that are not declared as they last ran."""
    left = _left(app, store)
    if left is None:
        return ()
    _, _, change = _compared(app, left, same_expressions=True)
    return tuple(sorted({one.name for one in change.parts if one.verdict != "keeps" or one.why}))


def only_fills_new(app: App, *, same_expressions: bool = False) -> bool:
    """Return whether all that an edited app changes is new and filled. Reads the state store alone."""
    location = app.state_store
    if not state_store_exists(location):
        return False
    with open_state_store(location, readonly=True) as store:
        left = _left(app, store)
        if left is None:
            return False
        _, now, change = _compared(app, left, same_expressions=same_expressions)
    refused = any(part.verdict == "refuses" for part in change.parts)
    refused |= any(find_refusals(left.program, now, app.buckets))
    return change.only_fills_new and not refused


def _left(app: App, store: StateStore) -> ProgramState | None:
    return store.left_by(app.name, JOB, datetime.now(UTC).isoformat(timespec="seconds"))


def _compared(
    app: App, left: ProgramState, *, same_expressions: bool, again: Collection[str] = ()
) -> tuple[JobPlan, StoredProgram, ProgramChange]:
    """Compile an app as it is declared now, and compare it with what an earlier run has left."""
    plan = app.plan(buckets_of_state(left.program))
    now = StoredProgram.of(plan, left.program.partitioning)
    declared = ProgramOutputs(
        initial_coverage(plan),
        {s.name: s for s in view_schemas(plan)},
        view_paths(plan),
        step_inputs(plan),
    )
    change = compare_programs(left, now, declared, same_expressions=same_expressions, again=again)
    return plan, now, change


def _first_run(app: App) -> ChangePlan:
    """Return the plan of an app that has committed nothing: all of it is computed for the first time."""
    job = app.job()
    wanted = wanted_starts(app.plan(), job.starts, None)
    began = {topic: start.text(topic) for topic, start in wanted.items()}
    return ChangePlan(app.name, ProgramChange(()), began=began)


def _speed(store: StateStore, app: str) -> float | None:
    largest = store.status(app, JOB).get("largest_batch")
    if not largest or not largest["duration_ms"]:
        return None
    return float(largest["read"] / largest["duration_ms"] * 1000)


def _other_topics(plan: JobPlan, log: Reader, known: Mapping[str, str]) -> Iterable[str]:
    for topic in sorted({source.topic for source in plan.sources}):
        try:
            is_known = topic not in known or log.topic_id(topic) == known[topic]
        except UnknownTopicError:
            yield f"the topic {topic!r} is not there, and the state was made of it"
            continue
        if not is_known:
            yield f"the topic {topic!r} was deleted and created again since the state was made of it"


def _not_computed_here(plan: JobPlan, change: ProgramChange) -> Iterable[str]:
    """Refuse to rebuild below what only a running Spark query can compute."""
    if any(part.is_computed for part in change.parts) and plan.spark_steps:
        names = ", ".join(map(repr, plan.spark_steps))
        yield (
            f"parts of it would have to be rebuilt, and it has steps of Spark's own ({names}), "
            "whose rows are not read again: give the app another name"
        )


def _asking(plan: JobPlan, change: ProgramChange, stored: StoredProgram) -> Iterable[str]:
    """Yield the steps that are computed anew, and ask a service what they asked it before.

    It may give other answers than it gave then. What is above such a step may have changed.
    """
    computed = {part.key for part in change.parts if part.is_computed}
    asked = {_question(step["definition"]) for step in stored.steps.values()}
    for stage in plan.stages:
        for operator in stage.operators:
            definition = plan.program.steps[operator.key].description
            asks = isinstance(operator.kernel, Enrichment) and operator.key in computed
            if asks and _question(definition) in asked:
                yield operator.kernel.name


def _question(definition: Mapping[str, Any]) -> str:
    """Return what of the definition of a step says whom it asks, and for what."""
    own = [definition.get(name) for name in ("function", "by", "columns", "cache_ms")]
    return canonical_text(without_code(own))


def _compacted_transactions(plan: JobPlan, log: Reader) -> Iterable[str]:
    """Refuse what a run refuses: whole transactions of topics that lose records."""
    for topic in compacted_topics_of_transactions(plan, log):
        yield f"the topic {topic!r} is compacted, and the app applies whole transactions of it"


def _compacted_inputs(
    plan: JobPlan, change: ProgramChange, log: Reader
) -> dict[str, tuple[str, ...]]:
    """Return of which topics each part that is rebuilt may lack records that compaction has removed."""
    compacted = {topic for topic in change.topics if is_compacted(log, topic)}
    streams = {source.topic for source in plan.sources if source.table_key is None}
    return {
        f"{part.kind} {part.name}": topics
        for part in change.parts
        if part.is_computed and streams.intersection(part.topics)
        if (topics := tuple(topic for topic in part.topics if topic in compacted))
    }


def _replays(
    log: Reader,
    topics: Iterable[str],
    left: ProgramState,
    starts: Starts | None,
    first: FirstOffsets,
) -> Iterable[PartitionReplay]:
    """Yield what is read again: from where it was asked to begin, or from where the app began."""
    for topic in topics:
        read = left.boundary.position.get(topic, {})
        began = dict(enumerate(first.get(topic, ())))
        for partition, (start, _) in enumerate(log.offsets(topic)):
            end = int(read.get(str(partition), 0))
            if end and starts is not None:
                yield PartitionReplay(topic, partition, starts[topic][partition], end, 0)
            elif end:
                wanted = began.get(partition, 0)
                begin = min(max(start, wanted), end)
                yield PartitionReplay(topic, partition, begin, end, begin - min(wanted, end))
