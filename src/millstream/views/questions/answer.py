"""The answer to a question, and its form as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl

from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.column_types import view_kind
from millstream.kernels.errors.user_code import FAILURES, error_reason
from millstream.views.schema import ViewSchema
from millstream.views.server.json_rows import objects
from millstream.views.state_store.sqlite_values import in_kinds


@dataclass(frozen=True)
class Answer:
    """The answer to a question about an app's state.

    Attributes:
        name: What was asked: a step, a view, or a question of the app's.
        value: The rows of the keys, as a polars DataFrame; or what the question's function has returned. From another
            machine, what JSON has of it.
        position: The position of the log that the answer is as of: topic → partition → offset of the next record.
        batch_id: The last batch that it reflects.
        running: Whether the app runs; None if that cannot be seen from here. The state can be asked in any case.
    """

    name: str
    value: Any
    position: Mapping[str, Any]
    batch_id: int
    running: bool | None

    @property
    def rows(self) -> pl.DataFrame:
        """The value, if it is rows.

        Raises:
            ConfigError: it is something else.
        """
        if isinstance(self.value, pl.DataFrame):
            return self.value
        raise ConfigError(
            f"The answer to {self.name!r} is of type {type(self.value).__name__}, and no frame of rows. Read its value."
        )

    def to_json(self) -> str:
        """Return the answer as a JSON object.

        Raises:
            UserCodeError: the question's function has returned what JSON cannot say.
        """
        head = {
            "name": self.name,
            "position": self.position,
            "batch_id": self.batch_id,
            "running": self.running,
        }
        text = json.dumps(head, ensure_ascii=False)
        return f'{text[:-1]}, "answer": {json_of(self.value, self.name)}}}'


def json_of(value: Any, question: str) -> str:
    """Return a value as JSON text: rows as objects, in the forms of docs/views.md.

    Raises:
        UserCodeError: JSON cannot say it.
    """
    if isinstance(value, pl.DataFrame):
        return f"[{', '.join(row_texts(value, question))}]"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
        text.encode()  # half of a surrogate pair is no text that can be sent
    except FAILURES as error:
        raise _unsayable(value, question, error) from error
    return text


def row_texts(rows: pl.DataFrame, question: str) -> list[str]:
    """Return each row as the text of a JSON object, in the forms of docs/views.md.

    Raises:
        UserCodeError: JSON cannot say a value.
    """
    columns = tuple((name, view_kind(dtype)) for name, dtype in rows.schema.items())
    schema = ViewSchema(question, columns, ())
    try:
        return objects(in_kinds(rows, schema), schema)
    except FAILURES as error:
        raise _unsayable(rows, question, error) from error


def _unsayable(value: Any, question: str, error: BaseException) -> UserCodeError:
    return UserCodeError(
        f"The answer to {question!r} is of type {type(value).__name__}, which cannot be said in JSON ({error_reason(error)}). "
        "Return numbers, texts, lists, dicts of these, or a polars DataFrame.",
        step=question,
    )


_PLAIN: Mapping[type | tuple[type, ...], Callable[[Any], Any]] = {
    pl.Series: pl.Series.to_list,
    pl.DataFrame: pl.DataFrame.to_dicts,
    (datetime, date): lambda value: value.isoformat(),
    timedelta: timedelta.total_seconds,
    Decimal: str,
    bytes: bytes.hex,
    (set, frozenset): sorted,
    np.generic: lambda value: value.item(),
}


def _plain(value: Any) -> Any:
    """Return a value inside an answer as JSON has it."""
    for kind, convert in _PLAIN.items():
        if isinstance(value, kind):
            return convert(value)
    raise TypeError(f"it has a {type(value).__name__}")
