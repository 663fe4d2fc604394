"""How the rows of a view differ in two versions of an app: by key, by column, by size, with a sample.

Rows are paired by the key of the view. Of a pair the columns that both versions have are compared; nulls are
equal to nulls, and NaN to NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import polars as pl

from millstream.choices import did_you_mean
from millstream.errors import ConfigError

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
        ConfigError: the view has another key in one of them.
    """
    missing = [name for name in key if name not in before.columns]
    if missing:
        raise ConfigError(
            f"The rows of {view!r} cannot be paired: the key {', '.join(key)} has {', '.join(missing)}, which the old "
            "version does not have. Compare it under another name: deploy it as a view of its own."
        )
    common = [name for name in after.columns if name in before.columns and name not in key]
    paired = _paired(key, before, after, common)
    both = paired.filter(pl.col("in before") & pl.col("in after"))
    differs = {name: _differs(name) for name in common}
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


def _paired(
    key: Sequence[str], before: pl.DataFrame, after: pl.DataFrame, common: Sequence[str]
) -> pl.DataFrame:
    """Return one row for each key of either version, with the columns of both."""
    keys = [pl.col(name).alias(f"key {name}") for name in key] or [pl.lit(0).alias("key ")]
    tables = [
        rows.select(
            *keys, pl.lit(value=True).alias(mark), *(_named(name, prefix) for name in common)
        )
        for rows, prefix, mark in ((before, _BEFORE, "in before"), (after, _AFTER, "in after"))
    ]
    on = [f"key {name}" for name in key] or ["key "]
    return tables[0].join(
        tables[1], on=on, how="full", coalesce=True, nulls_equal=True, maintain_order="left_right"
    )


def _named(name: str, prefix: str) -> pl.Expr:
    return pl.col(name).alias(prefix + name)


def _differs(name: str) -> pl.Expr:
    return pl.col(_BEFORE + name).ne_missing(pl.col(_AFTER + name))


def _column_difference(name: str, changed: pl.DataFrame) -> ColumnDifference:
    rows = changed.filter(_differs(name)) if changed.height else changed
    types = [changed.schema[prefix + name] for prefix in (_BEFORE, _AFTER)]
    if not rows.height or not all(one.is_numeric() or one.is_temporal() for one in types):
        return ColumnDifference(name, rows.height)
    size = (pl.col(_AFTER + name) - pl.col(_BEFORE + name)).alias("size")
    sizes = rows.select(size)["size"].drop_nulls()
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
        if not all(there.values()) or row[_BEFORE + name] != row[_AFTER + name]
    ]
    return {
        "key": {name: row[f"key {name}"] for name in key},
        **{
            version: {name: row[f"{version} {name}"] for name in differing} if is_there else None
            for version, is_there in there.items()
        },
    }


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
