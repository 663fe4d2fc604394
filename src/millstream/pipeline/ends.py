"""Where streams end: views, topics, datasets and functions, each checked where it is declared."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.column_types import check_key, view_kind
from millstream.kernels.plan import Cleanup, DatasetEnd, End, ForeachEnd, TopicEnd, ViewEnd
from millstream.log.topics import check_topic_name
from millstream.pipeline.graph import Output, SourceNode, nodes_above
from millstream.views.address import checked
from millstream.views.diffs import SHOWN
from millstream.views.foreach import ForeachContext
from millstream.views.postgres_tables import check_key_columns, check_view_name

if TYPE_CHECKING:
    from millstream.pipeline.streams import Stream

CLEANUPS = get_args(Cleanup)
_PARTITIONS = 4

ForeachFunction = Callable[[pl.DataFrame, ForeachContext], object]


def end_in_view(stream: Stream, name: str, key: tuple[str, ...], store: str | None) -> None:
    """End a stream in a view; see :meth:`Stream.view`."""
    address = checked(store or stream.app.views, what=f"The store of the view {name!r}")
    if address is not None:
        check_view_name(name)
    if any(output.name == name for output in stream.app.outputs):
        raise ConfigError(f"The view {name!r} is declared twice. Give one another name.")
    _check_kept(stream, name, key, postgres=address is not None)
    stream.app.unique_name(name)  # a later step of that name gets a number
    _add(stream, name, key, ViewEnd(address))


def _check_kept(stream: Stream, name: str, key: tuple[str, ...], *, postgres: bool) -> None:
    """Make sure that a view can keep the columns, and its store tell rows apart by the key."""
    for column, dtype in stream.columns.items():
        try:
            view_kind(dtype)
        except ConfigError as error:
            raise ConfigError(f"The view {name!r} has the column {column!r}. {error}") from error
    for column in key:
        check_key(column, stream.columns[column], f"the key of the view {name!r}")
    if postgres:
        check_key_columns(name, [view_kind(stream.columns[column]) for column in key])


def end_in_topic(
    stream: Stream,
    topic: str,
    *,
    key: str | None,
    value: str | Sequence[str] | None,
    partitions: int | None,
    cleanup: Cleanup,
) -> None:
    """End a stream in a topic; see :meth:`Stream.to`."""
    check_topic_name(topic)
    what = f"to({topic!r})"
    _check_shown(stream, what)
    choose(f"cleanup of {what}", cleanup, CLEANUPS)
    if "compact" in cleanup and key is None:
        raise ConfigError(f"{what} is compacted and has no key. Say key=, the column to keep by.")
    if partitions is not None and not 1 <= partitions <= 10_000:
        raise ConfigError(f"{what} has partitions={partitions}. Allowed are 1 to 10,000.")
    declared = stream.app.topics.get(topic)
    count = partitions or (declared.partitions if declared else _PARTITIONS)
    end = TopicEnd(topic, key, _value(stream, value, what), count, cleanup)
    names = {*([end.value] if isinstance(end.value, str) else end.value), *([key] if key else [])}
    _add(stream, stream.app.unique_name(f"to({topic})"), (), end, columns=names)


def _value(stream: Stream, value: str | Sequence[str] | None, what: str) -> str | tuple[str, ...]:
    if value is None:
        return tuple(stream.columns)
    names = [value] if isinstance(value, str) else list(value)
    for name in names:
        if name not in stream.columns:
            raise ConfigError(
                f"{what} has the value {name!r}. The columns there are {', '.join(stream.columns)}."
            )
    if not isinstance(value, str):
        return tuple(names)
    if stream.columns[value] not in (pl.String, pl.Binary):
        raise ConfigError(
            f"{what} has the value {value!r}, a column of {stream.columns[value]}. One column must "
            f"be text or bytes; for a JSON object give a list: value=[{value!r}]."
        )
    return value


def end_in_dataset(
    stream: Stream, path: str | os.PathLike[str], partition_by: tuple[str, ...]
) -> None:
    """End a stream in a dataset; see :meth:`Stream.dataset`."""
    what = f"dataset({os.fspath(path)!r})"
    _check_shown(stream, what)
    if not os.fspath(path) or "://" in os.fspath(path):
        raise ConfigError(f"{what} is not a folder. Give the path of a folder of this machine.")
    folder = os.path.normpath(Path(path).absolute())
    for output in stream.app.outputs:
        if isinstance(output.end, DatasetEnd) and output.end.path == folder:
            raise ConfigError(f"{what} is declared twice. Give each output a folder of its own.")
    end = DatasetEnd(folder, partition_by)
    _add(stream, stream.app.unique_name(f"dataset({Path(path).name})"), (), end)


def end_in_function(stream: Stream, function: ForeachFunction, name: str | None) -> None:
    """End a stream in a function; see :meth:`Stream.foreach`."""
    own = name or str(getattr(function, "__name__", ""))
    what = f"foreach({own})"
    _check_shown(stream, what)
    if not callable(function):
        raise ConfigError(f"foreach was given {function!r}. Give a function of (rows, context).")
    if not name and own in ("", "<lambda>"):
        raise ConfigError(
            "foreach was given a function without a name. Say name=: it is part of the key by "
            "which a repeated call is known."
        )
    if any(output.name == what for output in stream.app.outputs):
        raise ConfigError(f"{what} is declared twice. Give one of them another name=.")
    stream.app.unique_name(what)
    _add(stream, what, (), ForeachEnd(function))


def _check_shown(stream: Stream, what: str) -> None:
    if SHOWN in stream.columns:
        raise ConfigError(
            f"{what} has a column {SHOWN!r}, which tells rows given from rows taken back. Rename it."
        )


def _add(
    stream: Stream,
    name: str,
    key: tuple[str, ...],
    end: End,
    *,
    columns: set[str] | None = None,
) -> None:
    schema = tuple(
        (column, dtype)
        for column, dtype in stream.columns.items()
        if columns is None or column in columns
    )
    output = Output(name, stream.node, key, schema, end, stream.mode == "update")
    _refuse_loop([*stream.app.outputs, output])
    stream.app.outputs.append(output)


def _refuse_loop(outputs: Sequence[Output]) -> None:
    """Refuse to write to a topic that the same app reads.

    Even where it would be no circle: what a batch writes is read by a later one, so a run "until
    caught up" would end before its own records are read, and the answer would depend on where
    batches end.
    """
    read = {node.topic for node in nodes_above(outputs) if isinstance(node, SourceNode)}
    for output in outputs:
        if isinstance(output.end, TopicEnd) and output.end.topic in read:
            raise ConfigError(
                f"The app writes to the topic {output.end.topic!r} and reads it. Go on with the "
                "stream itself, or read the topic in another app."
            )
