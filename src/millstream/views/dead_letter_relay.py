"""Forwards dead letters from an app's view to its topic in the log, each exactly once.

The view ``dead_letters`` is the outbox: its rows are committed with the batch that found them. The relay
forwards those that are not yet in the topic ``<app>.dead``, in transactions of the log. Each transaction
has a fence named after step, topic (by its id) and partition; the fence is at the last offset forwarded.
Dead letters of a partition come in the order of their offsets, so those above the fence are new.

- An app whose folder was deleted, and which is built again from the log, forwards nothing twice.
- Of a topic that was deleted and created again, dead letters at the same offsets are forwarded, too.
- A reset removes the fences: the next program may fail on other records, at lower offsets.

What a crash leaves: `dead_letters.py`. The file ``relay-position`` beside the views only saves reading
them from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from millstream.client import EventLog, connect
from millstream.client.producer import Producer
from millstream.errors import OffsetOutOfRangeError, RecordTooLargeError
from millstream.kernels.errors.dead_letters import headers_from_text
from millstream.record import omitted_value_header
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.dead_letters import SLICE_ROWS, send_once
from millstream.views.position import TOPIC_IDS
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation, open_state_store
from millstream.views.store_note import store_location

DEAD_LETTER_HEADERS = ("topic", "partition", "offset", "step", "reason")
"""The headers of a record in the dead-letter topic, before those that it had."""

RelayHeaders: TypeAlias = list[tuple[str, bytes | str | None]]


def dead_letter_topic(app: str) -> str:
    """Return the name of an app's dead-letter topic."""
    return f"{app}.dead"


def relay_fence_prefix(app: str) -> str:
    """Return the prefix of the fences of an app's relay."""
    return f"dead-relay/{app}/"


def relay(
    log: Path | str,
    app: str,
    folder: Path | str | None = None,
    store: StoreLocation | None = None,
) -> int:
    """Forward the dead letters that are not in the app's topic yet; return their number.

    Args:
        folder: Where apps keep their views; the log, if not given.
        store: Where the app's state store is, if its folder does not say so.

    Raises:
        FolderOwnedError: the owner of the log's folder accepts no connections. The dead letters stay in the
            view; call again.
        ConfigError: the app has no views.
    """
    home = Path(log if folder is None else folder) / "apps" / app
    mark = home / "relay-position"
    with open_state_store(store or store_location(home), readonly=True) as opened_store:
        rows, seq = _not_forwarded(opened_store, _read_relayed_change(mark))
        topic_ids = opened_store.description(app, TOPIC_IDS) or {}
    if rows.is_empty():
        return 0
    with connect(log) as opened:
        count = sum(_forward(opened, app, rows, topic_ids))
    if home.is_dir():  # the machine of the app's runs
        mark.write_text(str(seq))
    return count


def _not_forwarded(store: StateStore, since: int) -> tuple[pl.DataFrame, int]:
    """Return the rows added after a change, and the number of the last change read."""
    try:
        changes = store.changes(DEAD_LETTERS_VIEW, since=since)
    except OffsetOutOfRangeError as gone:
        return store.scan(DEAD_LETTERS_VIEW), gone.end - 1
    if changes.is_empty():
        return changes, since
    last = changes["_seq"][-1]
    fresh = changes.filter(pl.col("_op") == "upsert", pl.col("replay").is_null())
    return fresh.drop("_seq", "_batch_id", "_op"), int(last)


def _read_relayed_change(path: Path) -> int:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _forward(
    log: EventLog, app: str, rows: pl.DataFrame, topic_ids: Mapping[str, str]
) -> Iterable[int]:
    """Forward rows, a transaction at a time; yield the number of rows of each."""
    topic = dead_letter_topic(app)
    if topic not in log.topics():
        log.create_topic(topic)
    # Rows that belong to no record of the log (the result of a window, say) stay in the view.
    of_records = rows.filter(pl.col("offset") >= 0).sort("offset")
    groups = of_records.partition_by("step", "topic", "partition", as_dict=True)
    with log.producer(transactional_id=f"dead-relay/{app}") as producer:
        for (step, source, partition), group in groups.items():
            writer = f"{relay_fence_prefix(app)}{step}/{topic_ids.get(source, source)}/{partition}"
            forwarded = log.fence(writer)
            fresh = group if forwarded is None else group.filter(pl.col("offset") > forwarded)
            for part in fresh.iter_slices(SLICE_ROWS):
                yield _forward_transaction(producer, topic, writer, part)


def _forward_transaction(
    producer: Producer, topic: str, writer: str, part: pl.DataFrame, *, whole: bool = True
) -> int:
    """Forward rows in a transaction; return their number, 0 if another thread has forwarded them.

    A dead letter that is too large for the topic goes without the record's key, value and headers, so that
    it does not block the others forever. Its value stays in the view.
    """

    def send(row: dict[str, Any]) -> None:
        key, value, headers = _dead_letter(row) if whole else _dead_letter_without_record(row)
        producer.send(topic, value, key=key, headers=headers)

    try:
        sent = send_once(producer, writer, part["offset"][-1], part, send)
    except RecordTooLargeError:
        if part.height > 1:
            ones = part.iter_slices(1)
            return sum(_forward_transaction(producer, topic, writer, one) for one in ones)
        if not whole:
            raise
        return _forward_transaction(producer, topic, writer, part, whole=False)
    return part.height if sent else 0


def _dead_letter(row: dict[str, Any]) -> tuple[bytes | None, bytes | None, RelayHeaders]:
    return row["key"], row["value"], _headers(row) + list(headers_from_text(row["headers"] or "[]"))


def _dead_letter_without_record(row: dict[str, Any]) -> tuple[None, None, RelayHeaders]:
    return None, None, [*_headers(row), omitted_value_header(row["value"])]


def _headers(row: dict[str, Any]) -> RelayHeaders:
    return [(name, str(row[name])) for name in DEAD_LETTER_HEADERS]
