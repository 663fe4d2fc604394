"""The data source by the name under which Spark knows it.

Spark starts several Python processes for a query, most of which only ask the source for its name or
schema. This module is all that those load: what plans and reads is imported where it is called.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader

SOURCE_NAME = "millstream"
FRAME_SCHEMA = "port int, bucket int, frame binary"


class LogSource(DataSource):
    """Reads a log as a stream of frames. Its option ``spec`` is a packed ``SourceSpec``."""

    @classmethod
    def name(cls) -> str:
        return SOURCE_NAME

    def schema(self) -> str:
        return FRAME_SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's
        from millstream.spark.source import LogPlanner, SourceSpec  # noqa: PLC0415 - see above

        return LogPlanner(SourceSpec.from_option(self.options["spec"]))
