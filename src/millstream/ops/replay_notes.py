"""What qualifies an answer that was found by replaying the log: what the replay cannot know, where that may matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from millstream.engine.whole_topics import is_compacted
from millstream.ops.reading_order import ReadAt, RecordId
from millstream.ops.record_replay import PlanOverLog
from millstream.views.coverage import STATE_STORE_VIEW, partial_note
from millstream.views.schema import JOB
from millstream.views.state_store.program_switch import SWITCHED_BY
from millstream.views.state_store.store import StateStore


def replay_notes(
    over: PlanOverLog,
    store: StateStore,
    records: Iterable[RecordId],
    read_at: Mapping[RecordId, ReadAt],
) -> Iterator[str]:
    """Yield what an answer about some records does not know, of which ``read_at`` says when they were read."""
    yield from over.said_of_edits()
    yield from over.said_of_lookups()
    yield from _said_of_compaction(over)
    several = sum(len(starts) for starts in over.starts.values()) > 1
    rules = [source.rule for source in over.plan.sources]
    if any(rule.idle_advance or (several and rule.idle_ms is not None) for rule in rules):
        yield "Partitions that were idle for a time may have let the job's watermark go on, which is not repeated here."
    if several:
        yield from _said_of_order(over, store, records, read_at)
    yield from _said_of_coverage(over, store)


def _said_of_compaction(over: PlanOverLog) -> Iterator[str]:
    """Name the compacted topics that are read as streams: tables need the last record of each key alone."""
    streams = {source.topic for source in over.plan.sources if source.table_key is None}
    for topic in sorted(streams):
        if is_compacted(over.reader, topic):
            yield f"The topic {topic!r} is compacted: what records did that compaction has removed since is not known here."


def _said_of_order(
    over: PlanOverLog,
    store: StateStore,
    records: Iterable[RecordId],
    read_at: Mapping[RecordId, ReadAt],
) -> Iterator[str]:
    """Say where it is not known in which order partitions were read."""
    when = [read_at.get(record) for record in records]
    if any(one is None or one.before is None for one in when):
        yield (
            "The history no longer has all batches: of other partitions, what had arrived before a record counts as read "
            "before it."
        )
    first = _first_batch_since_deployment(over.plan.app, store)
    if any(one is not None and one.batch_id < first for one in when):
        yield (
            f"The last deployment came before batch {first}. What it computed anew has read the log again, and may have taken "
            "the records of several partitions in another order than here."
        )


def _first_batch_since_deployment(app: str, store: StateStore) -> int:
    """Return the first batch since the last deployment, as far as it is known; 0 if there was none."""
    if store.description(app, SWITCHED_BY) is None:
        return 0
    last = store.last_batch_id(app)
    return min(store.source_offsets(app, JOB), default=0 if last is None else last + 1)


def _said_of_coverage(over: PlanOverLog, store: StateStore) -> Iterator[str]:
    """Say what the views lack that the replay has."""
    outputs = store.outputs(over.plan.app, JOB)
    for sink in over.plan.sinks:
        known = outputs.get((sink.name, STATE_STORE_VIEW))
        note = None if known is None else partial_note(known.spans)
        if note is not None:
            yield f"The view {sink.name!r} {note}."
