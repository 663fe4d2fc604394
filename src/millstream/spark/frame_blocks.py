"""Large frames stay in Spark's blocks, where executors do not share the driver's disk.

``frame_files.py`` passes large frames on as files of a folder that all processes share. On a cluster whose machines
share none, Spark carries them: an executor keeps what its tasks made as blocks in its memory and on its own
disk, and the next stage's tasks fetch what they need, from executor to executor, through a shuffle. The
driver gets an index of them, with each frame's name (its place in the blocks, its size and its checksum) and
the small frames themselves. So routing, order and counts are those of the way by files.

1. What the sources, or the tasks of a stage, make is persisted, and its index collected.
2. The tasks of the next stage get their work (manifests, small frames, names) from the driver, and the frames
   of these names from the blocks. Both are rows with the number of the task, which the shuffle divides.
3. The blocks are released when the batch is committed.

If an executor is lost, Spark makes its blocks again from the ranges of the log, or from the blocks of the
stage before. What is made again has to be what the index says: a frame with another checksum fails the
batch, and the next run repeats it. The tasks of a stage that run again put runs of state that no manifest names;
the next run's sweep removes them.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from millstream.engine.source.planner import record_batches
from millstream.errors import RetriableError
from millstream.kernels.frames import PORT_LEDGER, PORT_TIME, Frame, FrameRow
from millstream.spark.data_source import FRAME_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PORT_RESULT = -1  # what a task returns besides frames, which always goes to the driver
_MESSAGE_PORTS = (PORT_TIME, PORT_LEDGER, PORT_RESULT)
_NAMED_BYTES_MIN = 16 << 10  # a smaller frame goes through the driver
_FETCHED_BYTES_MAX = 8 << 20  # a batch with no more than this goes through it whole
_COLLECTED_BYTES_MAX = 256 << 20  # more is fetched in parts
_PREFIX = b"\0block "  # a frame begins with 0xFF, a message with "{"
_PART, _TABLE, _NUMBER = "part", "table", "number"
_WORK_SCHEMA = f"{_PART} int, {_TABLE} int, {_NUMBER} long, frame binary"
_WORK = -1  # the table of a row that is the work of a task

RunTask = Callable[[list[Any]], Iterable[FrameRow]]


class NumberedFrame(NamedTuple):
    """A frame, and its place in the order of the batch."""

    number: int
    row: FrameRow


FrameFunction = Callable[[Iterator[NumberedFrame]], Iterable[FrameRow]]


class _BlockName(NamedTuple):
    """Where a frame is: the table of its batch, its number there; and what it must be."""

    table: int
    number: int
    size_bytes: int
    checksum: int

    @classmethod
    def of(cls, frame: Frame) -> _BlockName | None:
        """Return the name that a row has in place of its frame; None if it has the frame."""
        if bytes(frame[: len(_PREFIX)]) != _PREFIX:
            return None
        return cls(*map(int, bytes(frame[len(_PREFIX) :]).split()))

    def to_frame(self) -> bytes:
        return _PREFIX + " ".join(map(str, self)).encode()

    def check(self, frame: Frame) -> Frame:
        """Return the frame.

        Raises:
            RetriableError: it is another one.
        """
        if len(frame) != self.size_bytes or zlib.crc32(frame) != self.checksum:
            raise RetriableError(
                "Rows that were made again, after an executor was lost, are not those that had been counted before. "
                "Nothing of this batch was committed; run the app again, and it is repeated whole. Functions "
                "of yours must give the same rows for the same events."
            )
        return frame


@dataclass
class FrameBlocks:
    """The frames of the batch in hand. Not thread-safe: batches run one at a time.

    ``sources_repeat``: what makes the rows of a batch from its sources may run twice, as it has no state of Spark's own.
    ``session`` is that of the batch.
    """

    sources_repeat: bool = False
    session: SparkSession | None = None
    _tables: list[DataFrame] = field(default_factory=list)
    _was_small: bool = False  # the last batch had no large frame when it was read

    def read(self, frames: DataFrame) -> list[FrameRow]:
        """Return the rows of a batch from its sources, as :meth:`collect` does.

        After a batch without large frames Spark doesn't keep the rows of the next one, which takes it as long as reading a
        thousand. If that one has large frames, it is read again.
        """
        if self._was_small and self.sources_repeat:
            unkept = frames.withColumn(_NUMBER, F.lit(0).cast("long"))
            rows = self._index(unkept, table=0)
            if not any(True for _ in _names(rows)):
                return rows
        rows = self._kept(frames)
        self._was_small = not any(True for _ in _names(rows))
        return self._small_whole(rows)

    def collect(self, frames: DataFrame) -> list[FrameRow]:
        """Have Spark make the rows of frames and keep them; return those rows, with the large ones by name."""
        return self._small_whole(self._kept(frames))

    def _kept(self, frames: DataFrame) -> list[FrameRow]:
        table = len(self._tables)
        kept = frames.withColumn(_NUMBER, F.monotonically_increasing_id())
        self._tables.append(kept.persist(StorageLevel.MEMORY_AND_DISK))
        return self._index(kept, table)

    def _small_whole(self, rows: list[FrameRow]) -> list[FrameRow]:
        """Return rows with their frames, if these are not much together."""
        small = sum(self.size_bytes(row.frame) for row in rows) <= _FETCHED_BYTES_MAX
        return self.get(rows) if small else rows

    def _index(self, kept: DataFrame, table: int) -> list[FrameRow]:
        """Return the rows of a table, with the large frames by name."""
        index: list[Any] = kept.select(*self._index_columns).collect()
        return [
            FrameRow(
                port,
                bucket,
                bytes(whole)
                if whole is not None
                else _BlockName(table, number, size, checksum).to_frame(),
            )
            for port, bucket, number, size, checksum, whole in index
        ]

    @cached_property
    def _index_columns(self) -> tuple[Column, ...]:
        """The columns of the index. Made once: to make them is a dozen calls to the JVM, for each batch."""
        named, frame = _is_named(), F.col("frame")
        return (
            F.col("port"),
            F.col("bucket"),
            F.col(_NUMBER),
            F.length(frame),
            F.when(named, F.crc32(frame)),
            F.when(~named, frame),
        )

    def size_bytes(self, frame: Frame) -> int:
        """Return the size of the frame that this is, or names."""
        name = _BlockName.of(frame)
        return len(frame) if name is None else name.size_bytes

    def get(self, rows: Sequence[FrameRow]) -> list[FrameRow]:
        """Return the rows with their frames, on the driver."""
        names = [_BlockName.of(row.frame) for row in rows]
        fetched: dict[tuple[int, int], bytes] = {}
        for table in sorted({name.table for name in names if name is not None}):
            here = [
                (row.port, name)
                for row, name in zip(rows, names, strict=True)
                if name is not None and name.table == table
            ]
            for part in _parts(here):
                fetched |= self._fetch(table, part)
        return [
            row
            if name is None
            else row._replace(frame=name.check(fetched[name.table, name.number]))
            for row, name in zip(rows, names, strict=True)
        ]

    def map(self, function: FrameFunction, rows: Sequence[FrameRow]) -> list[FrameRow]:
        """Call a function with the frames of rows, in tasks where they are; return what it gives, as :meth:`collect`.

        With the small frames, which are here, it is called here.
        """
        here: list[NumberedFrame] = []
        places: dict[tuple[int, int], tuple[int, _BlockName]] = {}
        for number, row in enumerate(rows):
            name = _BlockName.of(row.frame)
            if name is None:
                here.append(NumberedFrame(number, row))
            else:
                places[name.table, name.number] = number, name
        made = function(iter(here)) if here else ()
        out = [row._replace(frame=bytes(row.frame)) for row in made]
        if places:
            ports = sorted({row.port for row in rows})
            parts = [
                self._tables[table]
                .where(_is_named() & F.col("port").isin(*ports))
                .select("port", F.lit(table).alias(_TABLE), _NUMBER, "frame", "bucket")
                for table in sorted({table for table, _ in places})
            ]
            wanted = reduce(lambda one, other: one.unionByName(other), parts)
            out += self.collect(wanted.mapInArrow(_map_task(function, places), FRAME_SCHEMA))
        return out

    def run_tasks(
        self, run: RunTask, parts: Sequence[Sequence[Any]], ports: Iterable[int]
    ) -> list[FrameRow]:
        """Run the parts of a stage's work as tasks, and return the rows that they give, as :meth:`collect` does.

        ``run`` is called with the work of a part: a list of named tuples with ``bucket`` and ``rows``, the rows with
        their frames. ``ports`` are those of the stage: no other stage reads their frames.
        """
        part_of = {work.bucket: number for number, part in enumerate(parts) for work in part}
        tables = {name.table for part in parts for work in part for name in _names(work.rows)}
        assert self.session is not None, "a batch has begun"
        packed = [pickle.dumps(list(part)) for part in parts]
        numbers = range(len(parts))
        work = pa.table(
            {
                _PART: pa.array(numbers, pa.int32()),
                _TABLE: pa.array([_WORK] * len(parts), pa.int32()),
                _NUMBER: pa.array(numbers, pa.int64()),
                "frame": pa.array(packed, pa.binary()),
            }
        )
        rows = self.session.createDataFrame(work, _WORK_SCHEMA)
        # One call to the JVM, however many buckets there are.
        places = ",".join(str(part_of.get(bucket, 0)) for bucket in range(max(part_of) + 1))
        part = F.expr(f"get(array({places}), bucket)").alias(_PART)
        for table in sorted(tables):
            wanted = self._tables[table].where(_is_named() & F.col("port").isin(*ports))
            rows = rows.unionByName(
                wanted.select(part, F.lit(table).alias(_TABLE), _NUMBER, "frame")
            )
        divided = rows.repartitionById(len(parts), F.col(_PART))
        return self.collect(divided.mapInArrow(_task(run), FRAME_SCHEMA))

    def remove_batch(self) -> None:
        """Release the blocks of a committed batch; no other batch is running."""
        for table in self._tables:
            table.unpersist()
        self._tables.clear()

    def _fetch(
        self, table: int, wanted: Sequence[tuple[int, _BlockName]]
    ) -> dict[tuple[int, int], bytes]:
        ports = sorted({port for port, _ in wanted})
        numbers = [name.number for _, name in wanted]
        here = _is_named() & F.col("port").isin(*ports)
        rows = self._tables[table].where(here & F.col(_NUMBER).isin(*numbers))
        found = rows.select(_NUMBER, "frame").collect()
        return {(table, number): bytes(frame) for number, frame in found}


def _parts(
    wanted: Sequence[tuple[int, _BlockName]],
) -> Iterator[Sequence[tuple[int, _BlockName]]]:
    """Yield what is wanted in parts that are collected one by one: Spark has a limit for each result."""
    part: list[tuple[int, _BlockName]] = []
    size_bytes = 0
    for port, name in wanted:
        if part and size_bytes + name.size_bytes > _COLLECTED_BYTES_MAX:
            yield part
            part, size_bytes = [], 0
        part.append((port, name))
        size_bytes += name.size_bytes
    if part:
        yield part


def _is_named() -> Column:
    """Return the condition of rows whose frames stay in blocks."""
    message = F.col("port").isin(*_MESSAGE_PORTS)
    return (F.length("frame") >= _NAMED_BYTES_MIN) & ~message


def _names(rows: Iterable[FrameRow]) -> Iterator[_BlockName]:
    for row in rows:
        name = _BlockName.of(row.frame)
        if name is not None:
            yield name


def _task(run: RunTask) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that runs one part of a stage in a worker."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts: list[list[Any]] = []
        frames: dict[tuple[int, int], Frame] = {}
        for batch in batches:
            tables, numbers = (batch.column(at).to_pylist() for at in (1, 2))
            for table, number, frame in zip(tables, numbers, batch.column(3), strict=True):
                if table == _WORK:
                    parts.append(pickle.loads(frame.as_py()))  # noqa: S301 - made by run_tasks
                else:
                    frames[table, number] = memoryview(frame.as_buffer())
        for part in parts:
            yield from record_batches(iter(run([_with_frames(work, frames) for work in part])))

    return task


def _map_task(
    function: FrameFunction, places: dict[tuple[int, int], tuple[int, _BlockName]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that calls ``function`` with the frames of one Spark partition."""

    def frames(batches: Iterator[pa.RecordBatch]) -> Iterator[NumberedFrame]:
        for batch in batches:
            ports, tables, numbers, buckets = (batch.column(at).to_pylist() for at in (0, 1, 2, 4))
            for at, place in enumerate(zip(tables, numbers, strict=True)):
                if place in places:
                    number, name = places[place]
                    frame = name.check(memoryview(batch.column(3)[at].as_buffer()))
                    yield NumberedFrame(number, FrameRow(ports[at], buckets[at], frame))

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from record_batches(iter(function(frames(batches))))

    return task


def _with_frames(work: Any, frames: dict[tuple[int, int], Frame]) -> Any:
    """Put the frames into the rows of a bucket's work."""

    def whole(frame: Frame) -> Frame:
        name = _BlockName.of(frame)
        return frame if name is None else name.check(frames.get((name.table, name.number), b""))

    return work._replace(rows=[row._replace(frame=whole(row.frame)) for row in work.rows])
