"""Sinks: views, topics, datasets and functions, each checked where it is declared."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import polars as pl

from millstream.choices import choose
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.column_types import check_key, view_kind
from millstream.kernels.frames import ANSWER
from millstream.kernels.plan import (
    Cleanup,
    DatasetSinkSpec,
    ForeachSinkSpec,
    QuestionPlan,
    SinkSpec,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.log.topics import check_topic_name
from millstream.notebook.cells import declared_by
from millstream.object_store.address import check_is_folder, is_url, parse_url
from millstream.pipeline.checks import require_text
from millstream.pipeline.declaration import AppDeclaration
from millstream.pipeline.expressions import names_given
from millstream.pipeline.graph import GraphNode, Output
from millstream.pipeline.shape import StreamShape
from millstream.views.address import parse_store
from millstream.views.postgres.view_table import check_key_columns, check_view_name
from millstream.views.questions.deadline import deadline_us
from millstream.views.retractions import DIFF_COLUMN
from millstream.views.sinks.foreach import ForeachContext
from millstream.views.store_location import is_database

CLEANUPS = get_args(Cleanup)
_PARTITIONS = 4

ForeachFunction = Callable[[pl.DataFrame, ForeachContext], object]


@dataclass(frozen=True)
class SinkBuilder:
    """Makes the outputs of a node whose rows have the given shape."""

    app: AppDeclaration
    node: GraphNode
    shape: StreamShape

    def view(
        self, name: str, *, key: str | Sequence[str] | None = None, store: str | None = None
    ) -> Output:
        """Make a view; see :meth:`Stream.view`."""
        require_text(name, "A view's name", "per_minute")
        columns = self.view_key(name, key)
        address = parse_store(store or self.app.views, what=f"The store of the view {name!r}")
        postgres = address is not None or is_database(self.app.store)
        if postgres:
            check_view_name(name)
        for output in self.app.outputs:
            if output.name == name:
                raise ConfigError(
                    f"The view {name!r} is declared twice{declared_by(output.cell)}. Give one another name."
                )
        self._check_storable(name, columns, postgres=postgres)
        output = self._output(name, ViewSinkSpec(address), key=columns)
        output = replace(
            output, step=self.app.names.unique(name), row_keys=self._whole_row_keys(columns)
        )
        return replace(output, replaces=False) if self._must_delete(columns) else output

    def _whole_row_keys(self, key: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return what identifies the rows of a view that holds each row that holds, and no other; () of another view.

        Where rows replace one another without a retraction, a longer key would keep those that were replaced.
        """
        shape = self.shape
        row_keys = shape.row_keys
        if shape.is_table and shape.primary_key is not None:
            row_keys = (shape.primary_key,)
        if shape.mode == "update":
            if shape.may_fail and not self._must_delete(key):
                return ()  # the row that one on which a step fails was to replace is still there
            return tuple(one for one in row_keys if set(one) == set(key))
        return tuple(one for one in row_keys if set(one) <= set(key))

    def _must_delete(self, key: Sequence[str]) -> bool:
        """Return whether a view takes rows that replace one another as changes.

        A step may fail on a row; the row that it was to replace is no longer there, either. That row is known by
        its key, so it can be deleted, if the window above says which it was.
        """
        shape = self.shape
        if shape.mode != "update" or not shape.may_fail:
            return False
        return any(set(one) <= set(key) for one in shape.row_keys)

    def view_key(self, name: str, key: str | Sequence[str] | None) -> tuple[str, ...]:
        """Return the key of a view: the given one, or the columns that distinguish windows and keys."""
        shape = self.shape
        if shape.is_table:
            return self._table_key(f"The view {name!r}", key)
        columns = shape.key if key is None else shape.key_columns(key, "view's key")
        if shape.mode is not None and key is None:
            columns = (*shape.window_key, *columns)
        if shape.mode == "discard" and key is None:
            if "pane_index" not in shape.columns:
                raise ConfigError(
                    f'The view {name!r} would keep of each key the last row of emit("discard"), '
                    'which is a part of the answer. Emit "update", or keep all parts: '
                    'emit("discard", panes=True).'
                )
            columns = (*columns, "pane_index")
        missing = [column for column in columns if column not in shape.columns]
        if missing and key is None and shape.row_keys:
            columns, missing = shape.row_keys[0], []
        if not columns or missing:
            raise ConfigError(
                f"The view {name!r} has no key"
                + (f": its column {missing[0]!r} was left out by a select" if missing else "")
                + '. Say which columns identify a row: view(name, key="…").'
            )
        self._check_key_of_changes(f"The view {name!r}", columns)
        return columns

    def _check_key_of_changes(self, what: str, key: Sequence[str]) -> None:
        """Make sure that a row which is taken back does not delete another one of its key.

        A key has at most one row, or each row that is taken back is replaced by one of its key.

        Raises:
            ConfigError: it may have several.
        """
        shape, of_key = self.shape, set(key)
        self._check_equal_rows(what, key)
        if (shape.mode != "retract" and not shape.takes_back) or any(
            set(one) <= of_key for one in shape.row_keys
        ):
            return
        if of_key <= set(shape.stable):
            return
        identity = (
            f"They are identified by {', '.join(shape.row_keys[0])}, which the key {', '.join(key)} does "
            "not have. Give that key"
            if shape.row_keys
            else "What identifies them is not known: a step (explode, map_frames, union, select) may have made "
            "rows of one key, or changed it. Keep the window and its by columns up to here, with rename or "
            "with_columns"
        )
        raise ConfigError(
            f"{what} keeps one row for each key, of rows of which some are taken back: one of two rows of a key "
            f"would delete the other. {identity}, add the rows up by the key in a window, or write all changes "
            "to a topic or dataset."
        )

    def _check_equal_rows(self, what: str, key: Sequence[str]) -> None:
        """Make sure that no row is taken back while an equal one stays, which it would delete.

        Where rows replace one another, a row that is taken back says that there is none any more.

        Raises:
            ConfigError: one may be.
        """
        shape, of_key = self.shape, set(key)
        signed = shape.mode == "retract" or self._must_delete(key)
        known = [one for one in shape.row_keys if set(one) <= of_key]
        if shape.equal_rows != "apart" or not signed or not known:
            return
        keys = ", ".join(map(repr, known[0]))
        raise ConfigError(
            f"{what} keeps one row for each key, of rows of a sliding window over rows that may be taken back. "
            "Rows of one time are equal there, and one that is taken back would delete the others. Number them: "
            'ms.sliding(…, rank="place"), or make a table of them: table(key=[' + keys + "])."
        )

    def _table_key(self, what: str, key: str | Sequence[str] | None) -> tuple[str, ...]:
        """Return the key of a sink that keeps the rows of a table by a key.

        Raises:
            ConfigError: two rows of the table may have one key, so that one of them would be lost.
        """
        primary = self.shape.primary_key
        columns = primary if key is None else self.shape.key_columns(key, f"the key of {what}")
        if primary is None or columns is None or not set(primary) <= set(columns):
            identity = (
                "Its rows have no key: a step left it out or made it anew, or a full join has a where="
                if primary is None
                else f"Its rows are identified by {', '.join(primary)}, which the key does not have"
            )
            raise ConfigError(
                f"{what} keeps one row for each key. {identity}. Keep the key in the table, or make rows "
                "differ: distinct(), or group_by(…).agg(…)."
            )
        return columns

    def _check_storable(self, name: str, key: tuple[str, ...], *, postgres: bool) -> None:
        """Make sure that a view can store the columns, and that its store can compare the key."""
        types = self.shape.columns
        for column, dtype in types.items():
            try:
                view_kind(dtype)
            except ConfigError as error:
                raise ConfigError(
                    f"The view {name!r} has the column {column!r}. {error}"
                ) from error
        for column in key:
            check_key(column, types[column], f"the key of the view {name!r}")
        if postgres:
            check_key_columns(name, [view_kind(types[column]) for column in key])

    def topic(
        self,
        topic: str,
        *,
        key: str | None,
        value: str | Sequence[str] | None,
        partitions: int | None,
        cleanup: Cleanup,
    ) -> Output:
        """Make a topic's output; see :meth:`Stream.to`."""
        require_text(topic, "The topic of to()", "per_minute")
        if key is not None:
            self.shape.key_columns([key], f"the key of to({topic!r})")
        check_topic_name(topic)
        what = f"to({topic!r})"
        self._check_diff_is_free(what)
        choose(f"cleanup of {what}", cleanup, CLEANUPS)
        if "compact" in cleanup and key is None:
            raise ConfigError(
                f"{what} is compacted and has no key. Say key=, the column to keep by."
            )
        if "compact" in cleanup and key is not None:
            if self.shape.is_table:
                self._table_key(what, key)
            else:
                self._check_key_of_changes(what, [key])
        if partitions is not None and not 1 <= partitions <= 10_000:
            raise ConfigError(f"{what} has partitions={partitions}. Allowed are 1 to 10,000.")
        count = partitions or self.app.partitions.get(topic, _PARTITIONS)
        spec = TopicSinkSpec(topic, key, self._value(value, what), count, cleanup)
        values = (spec.value,) if isinstance(spec.value, str) else spec.value
        columns = {*values, *([key] if key else [])}
        return self._output(self.app.names.unique(f"to({topic})"), spec, columns=columns)

    def answers(
        self, question: str, *, request: str, to: str, deadline: Duration, partitions: int | None
    ) -> Output:
        """Make a topic of answers; see :meth:`Stream.answer`."""
        what = f"answer({question!r})"
        require_text(question, "The question of answer()", "reach")
        require_text(request, f"The id of {what}", "id")
        if not self.shape.rows_stay:
            raise ConfigError(
                f"{what} takes requests, and some of these rows may be taken back or replaced. Give it rows that "
                "stay: those of a topic, or of windows that emit once."
            )
        output = self.topic(to, key=request, value=None, partitions=partitions, cleanup="delete")
        if self.shape.columns[request].is_float():
            raise ConfigError(
                f"{what} has the id {request!r}, a column of {self.shape.columns[request]}, of which two that look alike may differ. "
                "Cast it to a whole number or to text."
            )
        longest_us = deadline_us(deadline, f"The deadline of {what}")
        if not longest_us:
            raise ConfigError(
                f"The deadline of {what} is {deadline}, in which nothing is answered. Give a longer one."
            )
        assert isinstance(output.spec, TopicSinkSpec)
        plan = QuestionPlan(
            question,
            request,
            longest_us,
            self.app.questions,
            stops=self.app.on_error == "stop",
        )
        return replace(
            output,
            name=self.app.names.unique(f"answer({question})"),
            spec=replace(output.spec, value=ANSWER),
            question=plan,
        )

    def _value(self, value: str | Sequence[str] | None, what: str) -> str | tuple[str, ...]:
        columns = self.shape.columns
        if value is None:
            return tuple(columns)
        names = names_given(value, f"the value of {what}")
        for name in names:
            if name not in columns:
                raise ConfigError(
                    f"{what} has the value {name!r}. The columns there are {', '.join(columns)}."
                )
        if not isinstance(value, str):
            return names
        if columns[value] not in (pl.String, pl.Binary):
            raise ConfigError(
                f"{what} has the value {value!r}, a column of {columns[value]}. One column must "
                f"be text or bytes; for a JSON object give a list: value=[{value!r}]."
            )
        return value

    def dataset(self, path: str | os.PathLike[str], partition_by: str | Sequence[str]) -> Output:
        """Make a dataset's output; see :meth:`Stream.dataset`."""
        columns = self.shape.key_columns(partition_by, "dataset's partition_by")
        address = _dataset_address(path)  # first: it may be refused, and not be shown
        what = f"dataset({os.fspath(path)!r})"
        self._check_diff_is_free(what)
        for output in self.app.outputs:
            if isinstance(output.spec, DatasetSinkSpec) and output.spec.path == address:
                raise ConfigError(
                    f"{what} is declared twice. Give each output a folder of its own."
                )
        name = self.app.names.unique(f"dataset({Path(path).name})")
        return self._output(name, DatasetSinkSpec(address, columns))

    def foreach(self, function: ForeachFunction, name: str | None) -> Output:
        """Make a function's output; see :meth:`Stream.foreach`."""
        own = name or str(getattr(function, "__name__", ""))
        what = f"foreach({own})"
        self._check_diff_is_free(what)
        if not callable(function):
            raise ConfigError(
                f"foreach was given {function!r}. Give a function of (rows, context)."
            )
        if not name and own in ("", "<lambda>"):
            raise ConfigError(
                "foreach was given a function without a name. Say name=: it is part of the key by "
                "which a repeated call is known."
            )
        if any(output.name == what for output in self.app.outputs):
            raise ConfigError(f"{what} is declared twice. Give one of them another name=.")
        self.app.names.unique(what)
        return self._output(what, ForeachSinkSpec(function))

    def _check_diff_is_free(self, what: str) -> None:
        if DIFF_COLUMN in self.shape.columns:
            raise ConfigError(
                f"{what} has a column {DIFF_COLUMN!r}, which distinguishes added and retracted rows. "
                "Rename it."
            )

    def _output(
        self,
        name: str,
        spec: SinkSpec,
        *,
        key: tuple[str, ...] = (),
        columns: set[str] | None = None,
    ) -> Output:
        schema = tuple(
            (column, dtype)
            for column, dtype in self.shape.columns.items()
            if columns is None or column in columns
        )
        return Output(name, self.node, key, schema, spec, self.shape.mode == "update")


def _dataset_address(path: str | os.PathLike[str]) -> str:
    """Return the folder's path, or the URL, that names the same place in every process."""
    text = os.fspath(path)
    if not text:
        raise ConfigError(
            "dataset('') has no path. Give that of a folder, or a URL such as s3://bucket/prefix."
        )
    if not is_url(text):
        check_is_folder(text, "The path of a dataset")
        return os.path.normpath(Path(text).absolute())
    url = parse_url(text, "The dataset's URL")
    return url.text if url.folder is None else os.path.normpath(url.folder)
