"""Checks that an app's topics are the ones that its state was made of, by their ids.

A topic that is deleted and created again has the old name, and offsets that start over. Read from the old
offsets on, it would give wrong results in a ledger that balances. So the state store keeps the ids of the
topics that the app reads and writes, and a run that finds another id, or no topic, does not begin.

The ids are stored when a run has begun, before its first batch:

1. A crash before that leaves the ids of the run before, or none and no batch: nothing has been read.
2. A crash after it leaves ids without a batch. They are ignored as long as no batch is committed.

During a run, its reader (:meth:`Reader.pinned`) and its sink refuse a topic that was created again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.client.address import is_kafka, shown
from millstream.client.reader import Reader
from millstream.errors import TopicRecreatedError, UnknownTopicError
from millstream.kernels.plan import JobPlan, TopicSinkSpec
from millstream.views.position import LOG_BROKERS, TOPIC_IDS
from millstream.views.runs.control_files import ResetTarget, reset_command
from millstream.views.schema import JOB
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import (
    StoreLocation,
    open_state_store,
    place_of,
    state_store_exists,
)


def check_same_topics(app: str, state_store: StoreLocation, plan: JobPlan, log: Reader) -> None:
    """Make sure that the topics of a plan are those that the app's state was made of.

    Raises:
        TopicRecreatedError: one was deleted; it may have been created again.
    """
    if not state_store_exists(state_store):
        return
    with open_state_store(state_store) as store:
        if store.last_batch_id(app, JOB) is None:
            return
        known: Mapping[str, str] = store.description(app, TOPIC_IDS) or {}
        position = store.position(app)
    for topic in _topics(plan):
        if topic in known and known[topic] != (found := _id_of(log, topic)):
            raise TopicRecreatedError(
                _refusal(topic, (known[topic], found), position.get(topic), place_of(state_store))
            )


def save_topic_ids(app: str, state_store: StateStore, plan: JobPlan, log: Reader) -> None:
    """Store the ids of the topics of a plan, for later runs; those of other topics stay."""
    known = state_store.description(app, TOPIC_IDS) or {}
    found = {name: topic_id for name in _topics(plan) if (topic_id := _id_of(log, name))}
    state_store.put_description(app, TOPIC_IDS, {**known, **found})


def save_log_brokers(app: str, state_store: StateStore, log: Path | str) -> None:
    """Store whether the log is behind brokers, for what looks at the app without its program."""
    state_store.put_description(app, LOG_BROKERS, {"address": shown(log)} if is_kafka(log) else {})


def _topics(plan: JobPlan) -> list[str]:
    read = {source.topic for source in plan.sources}
    written = {sink.spec.topic for sink in plan.sinks if isinstance(sink.spec, TopicSinkSpec)}
    return sorted(read | written)


def _id_of(log: Reader, topic: str) -> str | None:
    try:
        return log.topic_id(topic)
    except UnknownTopicError:
        return None


def _refusal(
    topic: str,
    ids: tuple[str, str | None],
    position: Mapping[str, Any] | None,
    place: Path | ResetTarget,
) -> str:
    known, found = ids
    again = "" if found is None else " and created again"
    now = "there is none now" if found is None else f"it is {found} now"
    if position is None:
        what = "What the app has written to the old one is gone with it"
    else:
        at = ", ".join(f"{number}: {offset}" for number, offset in sorted(position.items()))
        what = f"The app had read the old one up to offset, by partition, {at}, which means nothing now"
    return (
        f"topic {topic!r} was deleted{again}: its id was {known}, {now}. {what}. To start over, with "
        f"the records that the log holds today: {reset_command(place)}, which first lists what it removes."
    )
