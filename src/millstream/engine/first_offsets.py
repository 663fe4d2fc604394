"""Where an app begins to read its topics: asked for once, and noted before the first batch; then its position counts.

A topic that begins at its first record is not noted: that is what the planner does by itself.

===============================================  ===================================================================
a crash after                                    leaves
===============================================  ===================================================================
1. the run has its number, and fences others     nothing of this: the next run begins where it is asked to
2. the offsets are noted                         them: the next run begins there, whatever it is asked
3. the first batch is planned                    the same, so that batch reads the same when it is repeated
4. the first batch is committed                  a position, of which the offsets are a part
===============================================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millstream.client.reader import Reader
from millstream.client.start_position import LogStart
from millstream.errors import ConfigError, UnknownTopicError
from millstream.kernels.decode.debezium_records import DebeziumFormat, TransactionFormat
from millstream.kernels.plan import JobPlan, SourcePlan
from millstream.views.position import FIRST_OFFSETS
from millstream.views.sink import RunStart
from millstream.views.state_store.reader import StateStoreReader
from millstream.views.state_store.store import StateStore

FirstOffsets = Mapping[str, tuple[int, ...]]
"""The offset that each partition begins at, by topic; of topics that do not begin at their first record."""


def wanted_starts(
    plan: JobPlan, declared: Mapping[str, LogStart], asked: LogStart | None
) -> dict[str, LogStart]:
    """Return where the topics of a plan begin that do not begin at their first record.

    ``asked``, of a run, is for streams: what is read as a table begins where it is declared to, unless an offset of it is
    named. If it is offsets alone, all topics of which none is named begin where they are declared to.

    Raises:
        ConfigError: a topic that is named is not read, or is a table of a database, which has all its records.
    """
    sources: dict[str, list[SourcePlan]] = {}
    for source in plan.sources:
        sources.setdefault(source.topic, []).append(source)
    if asked is not None:
        asked.check_topics(sources.keys(), "start")
    found = {}
    for topic, read in sources.items():
        is_table = any(one.table_key is not None or _is_captured(one) for one in read)
        start = declared.get(topic, LogStart())
        if asked is not None and (asked.named(topic) or not (is_table or asked.names_only)):
            start = asked
        if start.elsewhere == "earliest" and not start.named(topic):
            continue
        if any(map(_is_captured, read)):
            raise ConfigError(
                f"The topic {topic!r} is to begin at {start.text(topic)}, and is read as a table of a database: its rows "
                "are those of all its records. Leave the start out, or read the topic as a stream."
            )
        found[topic] = start
    return found


def _is_captured(source: SourcePlan) -> bool:
    return isinstance(source.values, DebeziumFormat | TransactionFormat)


def load_or_create_first_offsets(
    store: StateStore,
    start: RunStart,
    log: Reader,
    wanted: Mapping[str, LogStart],
    *,
    checkpoint: Path,
    next_batch_id: int,
    on_notice: Callable[[str], None],
) -> FirstOffsets:
    """Return where the app began, or begins with this run: then note it. Say where another start is ignored.

    Raises:
        ConfigError: a partition that is named does not exist.
        OffsetOutOfRangeError: an offset is not among those that its partition holds, and not its end.
        FencedError: a newer run has begun.
    """
    known = store.description(start.app, FIRST_OFFSETS) or {}
    if next_batch_id == 0 and not (checkpoint / "offsets" / "0").exists():
        # Of a topic that was created again, or is not there any more, nothing has been read.
        valid = {t: one for t, one in known.items() if _is_there(log, t, one["topic_id"])}
        left = {t: _noted(log, t, given) for t, given in wanted.items() if t not in valid}
        if left or len(valid) < len(known):
            store.put_run_description(start, FIRST_OFFSETS, valid | left)
        known = valid | left
    for topic, given in wanted.items():
        began = known.get(topic, {}).get("start", "earliest")
        if began != given.text(topic):
            on_notice(_ignored(store, start.app, topic, given, began))
    return _offsets_of(known)


def _is_there(log: Reader, topic: str, topic_id: str) -> bool:
    try:
        return log.topic_id(topic) == topic_id
    except UnknownTopicError:
        return False


def _noted(log: Reader, topic: str, start: LogStart) -> dict[str, Any]:
    offsets = start.offsets_in(log, topic, f"The start of topic {topic!r}")
    return {"start": start.text(topic), "topic_id": log.topic_id(topic), "offsets": offsets}


def _ignored(store: StateStore, app: str, topic: str, start: LogStart, began: str) -> str:
    position = store.position(app).get(topic, {})
    at = ", ".join(f"{number}: {offset}" for number, offset in sorted(position.items()))
    stands = f"stands at {at} (partition: offset)" if at else "has read nothing yet"
    return (
        f"The start {start.text(topic)} of topic {topic!r} is ignored: {app} began at {began} and {stands}. To begin "
        f"elsewhere: millstream reset {app}, or millstream deploy --from for what is rebuilt."
    )


def load_first_offsets(store: StateStoreReader, app: str) -> FirstOffsets:
    """Return where an app began to read its topics."""
    return _offsets_of(store.description(app, FIRST_OFFSETS) or {})


def load_first_starts(store: StateStoreReader, app: str) -> dict[str, str]:
    """Return, as it was said, where an app began to read its topics."""
    noted = store.description(app, FIRST_OFFSETS) or {}
    return {
        topic: f"{one['start']} (offset {', '.join(f'{n}: {at}' for n, at in enumerate(one['offsets']))})"
        for topic, one in noted.items()
    }


def _offsets_of(noted: Mapping[str, Any]) -> FirstOffsets:
    return {topic: tuple(one["offsets"]) for topic, one in noted.items()}
