"""The outputs of a pipeline under test: written to one temporary folder, and read from there.

Views that the app keeps in a database go to the app's own store, topics to a log in the folder, datasets to
folders in it. Functions of ``foreach`` are called as they are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl

from millstream.client import connect
from millstream.errors import ConfigError
from millstream.kernels.plan import (
    DatasetSinkSpec,
    JobPlan,
    SinkPlan,
    SinkSpec,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.views.retractions import DIFF_COLUMN
from millstream.views.sinks.dataset import dataset
from millstream.views.sinks.topic_records import to_json_types

RECORD_COLUMNS = ("partition", "offset", "key", "timestamp")


def redirected(plan: JobPlan, folder: Path) -> JobPlan:
    """Return the plan with outputs that stay in the folder."""
    sinks = tuple(dataclasses.replace(sink, spec=_end(sink, folder)) for sink in plan.sinks)
    return dataclasses.replace(plan, sinks=sinks)


def _end(sink: SinkPlan, folder: Path) -> SinkSpec:
    if isinstance(sink.spec, ViewSinkSpec):
        return ViewSinkSpec()
    if isinstance(sink.spec, DatasetSinkSpec):
        return dataclasses.replace(sink.spec, path=str(dataset_folder(folder, sink.name)))
    return sink.spec


def dataset_folder(folder: Path, name: str) -> Path:
    """Return the path of a dataset in a test's folder."""
    return folder / "datasets" / name.replace("/", "_")


def records(plan: JobPlan, folder: Path, topic: str) -> pl.DataFrame:
    """Return the records of a topic that the plan writes to, by partition and offset.

    Columns: partition, offset, key, timestamp, and the fields of the JSON objects, or ``value``
    where a column is the value. A field with the name of one of these is called ``value.<name>``.
    """
    sinks = [s for s in plan.sinks if isinstance(s.spec, TopicSinkSpec) and s.spec.topic == topic]
    if not sinks:
        topics = {sink.spec.topic for sink in plan.sinks if isinstance(sink.spec, TopicSinkSpec)}
        known = ", ".join(sorted(topics)) or "none"
        raise ConfigError(f"The app does not write to a topic {topic!r}. It writes to {known}.")
    with connect(folder) as log:
        count = log.topics()[topic].partitions
        tables = [
            pl.DataFrame(log.read(topic, number)).select(
                pl.lit(number, pl.Int64).alias("partition"), "offset", "key", "timestamp", "value"
            )
            for number in range(count)
        ]
    table = pl.concat(tables).with_columns(pl.col("key").cast(pl.String, strict=False))
    if any(
        isinstance(sink.spec.value, str) for sink in sinks if isinstance(sink.spec, TopicSinkSpec)
    ):
        return table
    fields = _fields(sinks)
    parsed = table["value"].cast(pl.String).str.json_decode(pl.Struct(fields)).struct.unnest()
    if parsed[DIFF_COLUMN].is_null().all():
        parsed = parsed.drop(DIFF_COLUMN)
    names = {name: f"value.{name}" for name in RECORD_COLUMNS if name in parsed.columns}
    return table.drop("value").hstack(parsed.rename(names))


def _fields(sinks: list[SinkPlan]) -> dict[str, pl.DataType]:
    """Return the JSON fields of the records, in the types that JSON leaves them."""
    fields: dict[str, pl.DataType] = {}
    for sink in sinks:
        types = dict(sink.schema)
        assert isinstance(sink.spec, TopicSinkSpec)
        for name in sink.spec.value:
            fields[name] = to_json_types(pl.Series(name, [], types[name])).dtype
    return {**fields, DIFF_COLUMN: pl.Int8()}


def rows_of_dataset(plan: JobPlan, folder: Path, name: str) -> pl.DataFrame:
    """Return the rows of a dataset that the plan writes, named by its folder or its step."""
    known = [sink.name for sink in plan.sinks if isinstance(sink.spec, DatasetSinkSpec)]
    for step in (name, f"dataset({name})"):
        if step in known:
            return dataset(dataset_folder(folder, step)).scan().collect()
    raise ConfigError(
        f"The app does not write a dataset {name!r}. It writes {', '.join(known) or 'none'}."
    )
