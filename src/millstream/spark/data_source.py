"""The data source, in the form of Spark's data source API.

Spark starts several Python processes for a query, most of which only ask the source for its name or
schema. They load only this module: the planner and the reader are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.engine.source.planner import LogPlanner

SOURCE_NAME = "millstream"
FRAME_SCHEMA = "port int, bucket int, frame binary"


class LogSource(DataSource):
    """Reads a log as a stream of frames. Its option ``spec`` is a serialized ``SourceSpec``."""

    @classmethod
    def name(cls) -> str:
        return SOURCE_NAME

    def schema(self) -> str:
        return FRAME_SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's
        return LogSourceReader(self.options["spec"])


class LogSourceReader(_SimpleStreamReaderWrapper, SupportsTriggerAvailableNow):
    """Passes Spark's calls to a :class:`~millstream.engine.source.planner.LogPlanner`.

    The planner is created and imported at the first call, as one of the processes only forwards the reader.
    Spark takes the frames of small batches (``getCache``) only from its simple reader, a private class.
    """

    def __init__(self, spec: str) -> None:
        super().__init__(self)  # type: ignore[arg-type]  # of it only prepareFor… is called
        self._spec = spec

    @cached_property
    def _planner(self) -> LogPlanner:
        from millstream.engine.source.planner import LogPlanner  # noqa: PLC0415 - see above
        from millstream.spark.source_spec import from_option  # noqa: PLC0415 - see above

        return LogPlanner(from_option(self._spec))

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        return self._planner.initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        return ReadAllAvailable()  # we bound a batch ourselves, fairly between partitions

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        self._planner.pin_end_offsets()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002, N802
        # Spark asks again 10 ms after each answer, and an idle app spent 8 % of a core on asking.
        return self._planner.await_next_offset(start)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in self._planner.partitions(start, end)]

    def getCache(  # noqa: N802 - Spark's
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[pa.RecordBatch] | None:
        return self._planner.read_on_driver(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._planner.read(partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the position is committed with the views."""
