"""A topic as a pipeline declares it, and how it is read: time, watermark, lateness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from millstream.choices import choose
from millstream.client import connect
from millstream.client.start_position import LogStart
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.decode import Field
from millstream.kernels.decode.archive_columns import ArchiveColumns
from millstream.kernels.decode.formats import JSON, ValueFormat
from millstream.kernels.errors.dead_letters import BadRecordPolicy
from millstream.kernels.tables.upserts import VersionOrder
from millstream.kernels.time.watermarks import WatermarkRule
from millstream.kernels.trigger import LatePolicy
from millstream.log.archive import RECORD_SCHEMA
from millstream.log.archiver import PartitionArchive
from millstream.notebook.cells import cell_run
from millstream.notebook.html import facts_html
from millstream.pipeline.checks import check_time
from millstream.pipeline.declaration import AppDeclaration
from millstream.pipeline.expressions import Column, as_expression, names_given
from millstream.pipeline.graph import SourceNode
from millstream.pipeline.schema import columns_of
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.stream import Stream
from millstream.pipeline.table import Table
from millstream.pipeline.watermarks import (
    IN_ORDER,
    ProcessingTime,
    check_topic_watermark,
    processing_rule,
)


@dataclass(frozen=True, repr=False)
class Topic:
    """A topic of the log as the pipeline declares it: see :meth:`millstream.App.topic`."""

    app: AppDeclaration
    name: str
    fields: tuple[Field, ...]
    key: str | None
    partitions: int
    values: ValueFormat = JSON
    bad: BadRecordPolicy = "dead-letter"
    start: LogStart = field(default_factory=LogStart)
    cell: int = field(default_factory=cell_run)

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} {dtype}" for name, dtype in columns_of(self.fields).items())
        return f"Topic {self.name!r}: {columns}"

    def _repr_html_(self) -> str:
        return facts_html(f"Topic {self.name}", columns_of(self.fields).items())

    def stream(
        self,
        *,
        time: Column | ProcessingTime | None = None,
        watermark: WatermarkRule = IN_ORDER,
        lateness: Duration = "0 seconds",
        late: LatePolicy = "drop",
        name: str | None = None,
    ) -> Stream:
        """Read the topic as a stream of events.

        Args:
            time: The event time: a datetime field, or an expression that gives a datetime. By
                default the time that the record carries in the log. ``ms.processing_time()``: the
                time of arrival.
            watermark: How the watermark follows the events; see :func:`millstream.watermark`.
            lateness: How long after the watermark has passed its end a window still takes events.
                What comes later is counted as late and left out.
            late: What happens to late events. ``"drop"``: beyond the lateness they are counted and
                left out. ``"side"``: they are also a side output, the ``late`` of the window's
                result. ``"correct"``: a window emits when the watermark reaches its end, and gives
                a row that replaces it for what comes within the lateness; beyond, as drop.
            name: The stream's name in ledger and errors; by default the topic's.
        """
        columns = columns_of(self.fields)
        if isinstance(time, ProcessingTime):
            watermark, time = processing_rule(time, watermark), None
        expression = None if time is None else as_expression(time, what="stream's time")
        if expression is not None:
            check_time(expression, columns, self.name)
        check_topic_watermark(watermark, columns, self.name)
        step = self.app.names.unique(name or self.name)
        node = SourceNode(
            step,
            self.name,
            self.fields,
            expression,
            watermark,
            self.values,
            self.bad,
            topic_cell=self.cell,
        )
        lateness_us = to_us(lateness, what="stream's lateness")
        _check_late(late, lateness_us)
        shape = StreamShape(
            columns, lateness_us=lateness_us, late_policy=late, names=self.app.names
        )
        return Stream(self.app, node, shape)

    def table(
        self,
        *,
        key: str | Sequence[str] | None = None,
        order: VersionOrder = "offset",
        deleted: Column | None = None,
        time: Column | None = None,
        watermark: WatermarkRule = IN_ORDER,
        ttl: Duration | None = None,
        name: str | None = None,
    ) -> Table:
        """Read the topic as a table: of each key its latest record is a row.

        A record without a value (a tombstone) deletes the row of its key, so the topic may be compacted. Compaction
        keeps the record with the greatest offset: see docs/joins.md for what a table by time loses with it, and
        for how long an app may be away.

        Args:
            key: The columns that identify a row; by default the topic's ``key``. With tombstones it is
                that column, which the record's key holds.
            order: Which of two records of a key is the later one. ``"offset"``: the one with the
                greater offset; all records of a key must be in one partition, as they are where
                the record's key is the table's. ``"time"``: the one with the later event time; the
                other order of arrival changes nothing. A key that was deleted stays in state then.
            deleted: A condition that is true of a record that deletes its key, besides tombstones.
            time: The event time; by default the time that the record carries in the log.
            watermark: How the watermark follows the records. Where a join waits for the table, give
                ``ms.watermark(idle="30 seconds")``: else a table that rests makes it wait.
            ttl: Delete a row that no record has replaced for so long, in event time, measured by the topic's own
                watermark: see :meth:`Stream.table`. It goes by the time of the record that counts, with
                both kinds of ``order``.
            name: The table's name in ledger and errors; by default the topic's.

        Raises:
            ConfigError: there is no key, or a column is not there.
        """
        columns = key if key is not None else self.key
        if columns is None:
            raise ConfigError(
                f"The table {self.name!r} has no key. Declare it: app.topic({self.name!r}, …, key=…), "
                "or say table(key=…)."
            )
        stream = self.stream(time=time, watermark=watermark, name=name)
        if names_given(columns, "table's key") == (self.key,) and isinstance(
            stream.node, SourceNode
        ):
            stream = replace(stream, node=replace(stream.node, table_key=self.key))
        return stream.table(key=columns, order=order, deleted=deleted, ttl=ttl)

    def archive(
        self, *, close_active: bool = False, on_progress: Callable[[int, int], None] | None = None
    ) -> list[PartitionArchive]:
        """Lay a columnar copy beside each closed segment of the topic that has none yet.

        The copies are Parquet files, one for each segment, with the fields of this declaration as
        columns: batch tools read them as they are, and jobs read them instead of decoding the
        records again. They may be deleted at any time. See docs/archive.md.

        Args:
            close_active: Close the segments that are still growing first, so that all that is committed now
                is archived.
            on_progress: Called with the bytes of segments archived so far, and in all.

        Returns:
            What is archived now, by partition.

        Raises:
            UnknownTopicError: the log has no such topic.
            DiskFullError: there is no room; finished archives are kept, and a second call continues.
            FolderOwnedError: the owner of the log's folder does not give it up.
        """
        columns = ArchiveColumns(self.values, self.fields, RECORD_SCHEMA.names)
        with connect(self.app.log) as log:
            return log.archive(self.name, columns, close_active=close_active, progress=on_progress)


def _check_late(late: LatePolicy, lateness_us: int) -> None:
    choose("stream's late", late, get_args(LatePolicy))
    if late == "correct" and not lateness_us:
        raise ConfigError(
            'stream has late="correct" and no lateness, so no late event would be taken in. Say how '
            'long corrections go on: lateness="1 hour".'
        )
