"""How the rows of a view differ in two versions of an app: by key, by column, by size, with a sample.

Rows are paired by the key of the view. Of a pair the columns that both versions have are compared; nulls are
equal to nulls, NaN to NaN, and -0.0 to 0.0. Values of types that cannot be compared, such as a text and a number, differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError
from millstream.kernels.columns import constant

RowDifference = Literal["changed", "added", "removed", "different"]
"""Rows that both versions have and that differ, that only the new one has, that only the old one has; any of them."""

_CONDITION = re.compile(r"\s*(\w+)\s*(>=|>)\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
_BEFORE, _AFTER = "before ", "after "


@dataclass(frozen=True)
class ColumnDifference:
    """A column that both versions have: in how many rows it differs, and by how much.

    ``largest`` and ``mean`` are of the absolute differences, where a column has any: numbers as they are,
    times and durations in seconds. Null beside a value is a difference without a size.
    """

    name: str
    changed: int
    largest: float | None = None
    mean: float | None = None


@dataclass(frozen=True)
class ViewDifference:
    """A view in two versions of an app, at one position.

    ``sample`` has a few rows that differ: their key, what differs, and ``before`` and ``after`` (None where a
    version has no such row). ``new_columns`` and ``old_columns`` are those that one version has.
    """

    view: str
    equal: int
    changed: int
    added: int
    removed: int
    columns: tuple[ColumnDifference, ...] = ()
    new_columns: tuple[str, ...] = ()
    old_columns: tuple[str, ...] = ()
    sample: tuple[Mapping[str, Any], ...] = ()

    @property
    def rows(self) -> int:
        """How many rows there are in any of the versions, by their keys."""
        return self.equal + self.changed + self.added + self.removed

    @property
    def different(self) -> int:
        """How many of them are not the same in both."""
        return self.rows - self.equal

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "rows": self.rows, "different": self.different}


def compare_rows(
    view: str,
    key: Sequence[str],
    before: pl.DataFrame,
    after: pl.DataFrame,
    *,
    sample_rows: int = 5,
) -> ViewDifference:
    """Compare the rows of a view in two versions. Both have the columns of the key.

    Raises:
        ConfigError: the view has another key in one of them, or one of other types.
    """
    if (why := why_unpaired(key, before, after)) is not None:
        raise ConfigError(
            f"The view {view!r} cannot be compared: {why}. Compare it under another name: deploy it as a view of its own."
        )
    common = [name for name in after.columns if name in before.columns and name not in key]
    paired = _paired(key, before, after, common)
    both = paired.filter(pl.col("in before") & pl.col("in after"))
    differs = {name: _differs(name, paired.schema) for name in common}
    changed = both.filter(pl.any_horizontal(differs.values())) if common else both.clear()
    only_after = paired.filter(pl.col("in before").is_null())
    only_before = paired.filter(pl.col("in after").is_null())
    shown = pl.concat([changed, only_after, only_before], how="vertical").head(sample_rows)
    return ViewDifference(
        view,
        both.height - changed.height,
        changed.height,
        only_after.height,
        only_before.height,
        tuple(_column_difference(name, changed) for name in common),
        tuple(name for name in after.columns if name not in before.columns),
        tuple(name for name in before.columns if name not in after.columns),
        tuple(_sampled(row, key, common) for row in shown.iter_rows(named=True)),
    )


def why_unpaired(key: Sequence[str], before: pl.DataFrame, after: pl.DataFrame) -> str | None:
    """Return why rows of two versions cannot be paired by a key, as a text; None if they can."""
    missing = [name for name in key if name not in before.columns]
    if missing:
        return f"its rows cannot be paired: the key {', '.join(key)} has {', '.join(missing)}, which the old version has not"
    other = [
        f"{name} as {after[name].dtype}, not {before[name].dtype}"
        for name in key
        if before[name].dtype != after[name].dtype
    ]
    if other:
        return f"its rows cannot be paired: the key has {', '.join(other)}"
    # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
    keys = pl.DataFrame({str(number): before[name] for number, name in enumerate(key)})
    if key and keys.is_duplicated().any():
        return f"its rows cannot be paired: the old version has several rows of one key {', '.join(key)}"
    return None


def _paired(
    key: Sequence[str], before: pl.DataFrame, after: pl.DataFrame, common: Sequence[str]
) -> pl.DataFrame:
    """Return one row for each key of either version, with the columns of both."""
    on = [f"key {name}" for name in key] or ["key "]

    def marked(rows: pl.DataFrame, prefix: str) -> pl.DataFrame:
        # Columns and not their names: polars takes a name such as "^a.*$" for a pattern.
        keys = [rows[name].alias(f"key {name}") for name in key]
        return pl.DataFrame(
            [
                *(keys or [constant(0, rows.height, pl.Int8, "key ")]),
                constant(True, rows.height, pl.Boolean, f"in {prefix.strip()}"),
                *(rows[name].alias(prefix + name) for name in common),
            ]
        )

    tables = [marked(before, _BEFORE), marked(after, _AFTER)]
    return tables[0].join(
        tables[1], on=on, how="full", coalesce=True, nulls_equal=True, maintain_order="left_right"
    )


def _differs(name: str, schema: Mapping[str, pl.DataType]) -> pl.Expr:
    before, after = pl.col(_BEFORE + name), pl.col(_AFTER + name)
    types = [schema[prefix + name] for prefix in (_BEFORE, _AFTER)]
    if types[0] == types[1] or all(one.is_numeric() for one in types):
        return before.ne_missing(after)
    return before.is_not_null() | after.is_not_null()


def _column_difference(name: str, changed: pl.DataFrame) -> ColumnDifference:
    rows = changed.filter(_differs(name, changed.schema)) if changed.height else changed
    types = [changed.schema[prefix + name] for prefix in (_BEFORE, _AFTER)]
    numbers = all(one.is_numeric() for one in types)
    if not rows.height or not (numbers or (types[0] == types[1] and types[0].is_temporal())):
        return ColumnDifference(name, rows.height)
    # Whole numbers in a wider type, in which their difference has a place.
    wider = pl.Int128 if all(one.is_integer() for one in types) else pl.Float64
    before, after = (
        pl.col(prefix + name).cast(wider) if numbers else pl.col(prefix + name)
        for prefix in (_BEFORE, _AFTER)
    )
    sizes = rows.select((after - before).alias("size"))["size"].drop_nulls()
    if sizes.dtype == pl.Duration:
        sizes = sizes.dt.total_microseconds() / 1e6
    sizes = sizes.cast(pl.Float64).abs().drop_nans()
    largest, mean = sizes.max(), sizes.mean()
    return ColumnDifference(name, rows.height, _as_float(largest), _as_float(mean))


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _sampled(row: Mapping[str, Any], key: Sequence[str], common: Sequence[str]) -> dict[str, Any]:
    there = {prefix: row[f"in {prefix}"] for prefix in ("before", "after")}
    differing = [
        name
        for name in common
        if not all(there.values()) or not _is_same(row[_BEFORE + name], row[_AFTER + name])
    ]
    return {
        "key": {name: row[f"key {name}"] for name in key},
        **{
            version: {name: row[f"{version} {name}"] for name in differing} if is_there else None
            for version, is_there in there.items()
        },
    }


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - NaN


# ── thresholds ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Threshold:
    """A condition on a comparison, such as ``changed > 1%``: of what, how many, and whether of a hundred rows."""

    text: str
    what: RowDifference
    inclusive: bool
    limit: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Return the condition that a text is.

        Raises:
            ConfigError: it is none; the message says which there are.
        """
        found = _CONDITION.fullmatch(text)
        words = get_args(RowDifference)
        if found is None or found[1] not in words:
            near = did_you_mean(found[1], words) if found is not None else ""
            raise ConfigError(
                f"{text!r} is no condition. Give {', '.join(words)}, then > or >=, then a number of rows or a share: "
                f"'changed > 1%', 'removed > 0'.{near}"
            )
        what: RowDifference = next(word for word in words if word == found[1])
        return cls(text.strip(), what, found[2] == ">=", float(found[3]), bool(found[4]))

    def holds(self, found: ViewDifference) -> bool:
        """Return whether the condition holds for a view; a share is of all rows of both versions."""
        number = float(getattr(found, self.what))
        if self.percent:
            number = 100 * number / found.rows if found.rows else 0.0
        return number >= self.limit if self.inclusive else number > self.limit
