"""A view of another app as a topic: each change of the view, once and in order, in a topic of one partition.

The topic is compacted. A record's key has the view's key columns as JSON, its value all columns; a deleted row is a
record without a value. Numbers that may be infinite or no number, and decimals, are text, so that nothing of a row is
lost. The changes of a batch of the view are in one transaction of the log, unless there are very many.

Where the copying stands is a fence of the log: it is named after the app, the topic (by its id) and the view (by its
id), and at the last change of the view that is in the topic. It moves in the transaction that has the changes.

================================================  ==================================================================
the fence                                         what is copied
================================================  ==================================================================
at a change whose successors the view still has   these, a slice to a transaction
there is none: a new topic, or a view that was    all rows of the view, as one commit has them, and a deletion of
created again                                     each key that the topic has and the view has not
at a change whose successors the view has         the same
forgotten
================================================  ==================================================================

A crash within a transaction leaves nothing of it. A crash between two slices of all rows leaves some of them in the topic
and no fence, so all are written again: their values are as new, or newer. Only the last slice has the fence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Self

import polars as pl
import pyarrow as pa

from millstream.client import EventLog, connect
from millstream.client.producer import Producer
from millstream.errors import (
    ConfigError,
    FencePassedError,
    OffsetOutOfRangeError,
    RetriableError,
    TopicExistsError,
)
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.columns import constant
from millstream.views.query import Query, ViewReader, check_view_id
from millstream.views.reader import View
from millstream.views.schema import ViewSchema
from millstream.views.sinks.topic_records import to_json_types

POLL_S = 0.25
SLICE_ROWS = 50_000
"""The largest number of changes in one transaction."""


def is_text(dtype: pl.DataType) -> bool:
    """Return whether a column's values are text in the topic, because JSON would not keep them all."""
    return dtype.is_float() or dtype.is_decimal()


def fence_of(app: str, topic_id: str, view_id: str) -> str:
    """Return the name of the fence of an app's copy of a view."""
    return f"view/{app}/{topic_id}/{view_id}"


@dataclass(frozen=True)
class FollowedView:
    """The view that an app follows, and the topic of its log that has the changes. ``schema`` is as declared."""

    app: str
    topic: str
    view: View
    schema: ViewSchema

    @property
    def store(self) -> ViewReader:
        return self.view.source

    def copy(self, log: EventLog) -> int:
        """Write the changes that the topic does not have yet; return how many records that were.

        Raises:
            ConfigError: the view has other columns, or another key, than it had where it was declared.
            RetriableError: the log or the view's database is away; call again.
        """
        self._check_schema()
        topic_id = self._topic_id(log)
        view_id = self.store.view_id(self.view.name)
        writer = fence_of(self.app, topic_id, view_id)
        since = log.fence(writer)
        if since is not None and since == self.store.newest_changes().get(self.view.name):
            return 0
        with log.producer(transactional_id=f"view/{self.app}/{self.topic}") as producer:
            try:
                if since is not None:
                    return self._copy_changes(producer, writer, since, view_id)
            except OffsetOutOfRangeError:
                pass  # the view has forgotten some, or was created again: as if there were no fence
            return self._copy_rows(log, producer, topic_id)

    def _check_schema(self) -> None:
        now = self.view.schema
        if now != self.schema:
            raise ConfigError(
                f"The view {self.view.name!r} of the app {self.view.app!r} is no longer as it was when this program "
                f"declared its table: {self.schema.difference(now)}. Start the program again, and reset the app if "
                "what it has made of the view does not fit any more."
            )

    def _topic_id(self, log: EventLog) -> str:
        known = log.topics()
        if self.topic not in known:
            try:
                return log.create_topic(self.topic, partitions=1, cleanup="compact").topic_id
            except TopicExistsError:  # created by another process since
                known = log.topics()
        return known[self.topic].topic_id

    # ── changes ─────────────────────────────────────────────────────────────────────────────

    def _copy_changes(self, producer: Producer, writer: str, since: int, view_id: str) -> int:
        copied = 0
        while True:
            changes = self.store.changes(self.view.name, since=since, limit=SLICE_ROWS)
            check_view_id(self.store, self.view.name, since, view_id)
            if changes.is_empty():
                return copied
            since = int(changes["_seq"][-1])
            deleted = changes["_op"] == "delete"
            if not self._commit(producer, changes, deleted, (writer, since)):
                return copied  # another process of the app goes on from there
            copied += changes.height

    def _copy_rows(self, log: EventLog, producer: Producer, topic_id: str) -> int:
        """Write all rows, and delete from the topic what is none of them."""
        found = self.store.select(self.view.name, Query())
        if not found.view_id:
            return 0  # before the first run of its app
        rows = found.rows
        gone = self._keys_in(log) - set(self._keys(rows).to_pylist())
        fence = fence_of(self.app, topic_id, found.view_id), found.newest_change
        slices = list(rows.iter_slices(SLICE_ROWS)) or [rows]
        for number, part in enumerate(slices):
            last = number == len(slices) - 1
            deleted = constant(False, part.height, pl.Boolean)
            if not self._commit(producer, part, deleted, fence if last else None, gone):
                return 0
            gone = set()
        return rows.height

    def _keys_in(self, log: EventLog) -> set[bytes]:
        """Return the keys that have a value in the topic."""
        there: dict[bytes, bool] = {}
        for start, end in _slices(*log.offsets(self.topic)[0]):
            records = log.read(self.topic, 0, start, end, columns=("key", "value"))
            valid = records.column("value").is_valid().to_pylist()
            there.update(zip(records.column("key").to_pylist(), valid, strict=True))
        return {key for key, valid in there.items() if valid}

    def _commit(
        self,
        producer: Producer,
        rows: pl.DataFrame,
        deleted: pl.Series,
        fence: tuple[str, int] | None,
        gone: Collection[bytes] = (),
    ) -> bool:
        """Write rows and deletions in one transaction; False if its fence was passed already."""
        nothing = constant(None, rows.height, pl.Binary)
        values = self._values(rows).zip_with(~deleted, nothing)
        try:
            with producer.transaction() as transaction:
                if fence is not None:
                    transaction.fence(*fence)
                if gone:
                    keys = pa.array(sorted(gone), pa.large_binary())
                    none = pa.nulls(len(gone), pa.large_binary())
                    producer.send_many(self.topic, values=none, keys=keys)
                if rows.height:
                    producer.send_many(self.topic, values=_binary(values), keys=self._keys(rows))
        except FencePassedError:
            return False
        return True

    # ── records ─────────────────────────────────────────────────────────────────────────────

    def _keys(self, rows: pl.DataFrame) -> pa.Array:
        return _binary(_objects(rows, self.schema.key, one_zero=True))

    def _values(self, rows: pl.DataFrame) -> pl.Series:
        return _objects(rows, self.schema.names).cast(pl.Binary)


def _objects(rows: pl.DataFrame, names: tuple[str, ...], *, one_zero: bool = False) -> pl.Series:
    """Return JSON objects of columns; of a view without a key, ``{}`` for each row."""
    if not names:
        return constant("{}", rows.height, pl.String)
    columns = []
    for name in names:
        column = of_one_zero(rows[name]) if one_zero else rows[name]
        plain = column.cast(pl.String) if is_text(column.dtype) else to_json_types(column)
        columns.append(plain.alias(name))
    return pl.DataFrame(columns).to_struct("value").struct.json_encode()


def _binary(column: pl.Series) -> pa.Array:
    return column.cast(pl.Binary).to_arrow().cast(pa.large_binary())


def _slices(start: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, SLICE_ROWS):
        yield first, min(first + SLICE_ROWS, end)


class Followers:
    """Copies the changes of views into their topics, in a thread, while a job runs.

    When it is entered, what the views have by then is in the topics.

    Raises:
        ConfigError, MillstreamError: when it is entered, or left: copying failed. The job was asked to stop.
    """

    def __init__(
        self, log: Path | str, views: tuple[FollowedView, ...], stop_request: Path
    ) -> None:
        self._log, self._views, self._stop_request = log, views, stop_request
        self._ended = Event()
        self._failed: BaseException | None = None
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        if self._views:
            with connect(self._log) as log:
                for view in self._views:
                    view.copy(log)
            self._thread = Thread(target=self._run, name="followed views", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._failed is not None and kind is None:
            raise self._failed

    def _run(self) -> None:
        try:
            with connect(self._log) as log:
                while not self._ended.wait(POLL_S):
                    self._copy(log)
        except BaseException as error:  # noqa: BLE001 - raised where the run ends
            self._failed = error
        while self._failed is not None and not self._ended.wait(POLL_S):
            self._stop_request.touch()  # again, as a job that starts removes it

    def _copy(self, log: EventLog) -> None:
        for view in self._views:
            try:
                view.copy(log)
            except RetriableError:
                continue  # the next round tries again
