"""The answers of a lookup as a table, and the checks of what the user's function gave.

Inside, the columns have numbers for names (``k0`` of the key, ``a0`` of the answer): the user's may be anything,
such as ``^a.*$``, which polars takes for a pattern. Two keys are one where they are equal as keys are
everywhere: NaN equals NaN, -0.0 equals 0.0. A key of which a part is null is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from millstream.kernels.column_types import of_one_zero
from millstream.kernels.enrichment.calls import refuse
from millstream.kernels.frames import decode_frame, encode_frame

STATUS = "__status"  # Int8: what became of a key
REASON = "__reason"  # String: why its rows are dead letters
_ONE = "__one"
ANSWERED, FAILED_TO_NULL, FAILED_TO_DEAD = 0, 1, 2

ColumnSchema = tuple[tuple[str, pl.DataType], ...]


@dataclass(frozen=True)
class LookupColumns:
    """The columns of a lookup with their types: those of the key, and those of the answer."""

    key: ColumnSchema
    answer: ColumnSchema

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(f"k{number}" for number in range(len(self.key)))

    @property
    def answer_names(self) -> tuple[str, ...]:
        return tuple(f"a{number}" for number in range(len(self.answer)))

    @property
    def names(self) -> tuple[str, ...]:
        return *self.key_names, *self.answer_names

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """The types by our own names."""
        types = (dtype for _, dtype in (*self.key, *self.answer))
        return dict(zip(self.names, types, strict=True))

    def keys_of(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the keys of rows, one for each row, under our own names."""
        named = zip(self.key_names, self.key, strict=True)
        return pl.DataFrame([of_one_zero(rows[column]).alias(name) for name, (column, _) in named])

    def distinct(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return each key of which no part is null once, in an order that depends on the keys alone."""
        return keys.drop_nulls().unique().sort(self.key_names)

    def left_join(self, keys: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
        """Return keys, in their order, each with its answer.

        A constant is compared, too: by one column of floats that are sorted (a single one is) polars joins
        in another way, which loses NaN.
        """
        one = pl.lit(1, pl.Int8).alias(_ONE)
        joined = keys.with_columns(one).join(
            answers.with_columns(one),
            on=[_ONE, *self.key_names],
            how="left",
            maintain_order="left",
        )
        return joined.drop(_ONE)

    def for_user(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return keys under the user's names."""
        named = zip(self.key_names, self.key, strict=True)
        return pl.DataFrame([keys[name].alias(column) for name, (column, _) in named])

    def answers(self, step: str, keys: pl.DataFrame, given: object) -> pl.DataFrame:
        """Return an answer for each key; one that the function gave none for has nulls.

        ``keys`` and ``given`` have the user's names, the result ours.

        Raises:
            UserCodeError: what was given is not as declared, or there are two answers for one key.
        """
        found = self._ours(step, given)
        asked = self.keys_of(keys)
        strange = found.join(asked, on=self.key_names, how="anti", nulls_equal=True)
        if strange.height:
            raise refuse(
                step,
                f"gave an answer for {self._text(strange)}, which it was not asked for. Give the keys "
                "back as they are",
            )
        twice = found.filter(found.select(self.key_names).is_duplicated())
        if twice.height:
            raise refuse(
                step,
                f"gave several answers for {self._text(twice)}. Give one row for each key, or none",
            )
        return self.left_join(asked, found)

    def _ours(self, step: str, given: object) -> pl.DataFrame:
        """Return what the function gave under our names, in our order, once its columns are checked."""
        declared = dict((*self.key, *self.answer))
        if not isinstance(given, pl.DataFrame):
            raise refuse(step, f"gave a {type(given).__name__}. Give a polars DataFrame")
        if set(given.columns) != set(declared):
            raise refuse(
                step,
                f"gave the columns {', '.join(given.columns) or '(none)'}. It must give those of the key "
                f"and those declared: {', '.join(declared)}",
            )
        columns = []
        for ours, (name, dtype) in zip(self.names, declared.items(), strict=True):
            column = given[name]
            if column.dtype == pl.Null:
                column = column.cast(dtype)
            if column.dtype != dtype:
                raise refuse(
                    step,
                    f"gave the column {name!r} as {column.dtype}. It is declared as {dtype}: cast it, or "
                    "declare another type",
                )
            columns.append((of_one_zero(column) if name in dict(self.key) else column).alias(ours))
        return pl.DataFrame(columns)

    def _text(self, keys: pl.DataFrame) -> str:
        values = self.for_user(keys[:1]).row(0, named=True)
        return ", ".join(f"{name}={value!r}" for name, value in values.items())

    def no_answers(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return nulls as the answer for each key; ``keys`` and the result have our names."""
        nulls = zip(self.answer_names, self.answer, strict=True)
        return keys.with_columns(pl.lit(None, dtype).alias(name) for name, (_, dtype) in nulls)


def with_status(
    answers: pl.DataFrame, status: int = ANSWERED, reason: str | None = None
) -> pl.DataFrame:
    """Add to answers what became of their keys."""
    return answers.with_columns(
        pl.lit(status, pl.Int8).alias(STATUS), pl.lit(reason, pl.String).alias(REASON)
    )


def encode_answers(answers: pl.DataFrame) -> bytes:
    """Encode answers with their status, for the journal."""
    return bytes(encode_frame(answers))


def decode_answers(entry: bytes) -> pl.DataFrame:
    """Decode what :func:`encode_answers` made."""
    return decode_frame(entry)
