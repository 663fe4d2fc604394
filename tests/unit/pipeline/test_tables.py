"""Tables of topics and their joins, as they are declared and as they run."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.testing import Row

UUID_TEXT = "8a6e0804-2bd0-4672-b79d-d97027f9071a"
KEYS = [
    (str, "a", "a", "b"),
    (str, "", b"", "b"),
    (int, 5, "5", 6),
    (bytes, b"ab", b"ab", b"c"),
    (bool, True, "true", False),
    (Decimal, Decimal("1.50"), "1.50", Decimal(2)),
    (date, date(2026, 1, 1), "2026-01-01", date(2026, 1, 2)),
    (
        datetime,
        datetime(2026, 1, 1, tzinfo=UTC),
        "2026-01-01T00:00:00+00:00",
        datetime(2026, 1, 2, tzinfo=UTC),
    ),
    (UUID, UUID(UUID_TEXT), UUID_TEXT, UUID(int=1)),
    (float, 1.5, "1.5", 2.5),
    (timedelta, timedelta(seconds=5), "PT5S", timedelta(1)),
]


def refused(match):
    return pytest.raises(ConfigError, match=match)


def table_of(app, name="t", hint=int, **options):
    return app.table(name, {"id": hint, "v": int}, key="id", **options)


@pytest.mark.parametrize(("hint", "value", "key", "other"), KEYS)
def test_a_tombstone_deletes_the_row_of_its_key_of_every_type(hint, value, key, other):
    app = ms.App("tables", log="unused")
    table_of(app, hint=hint).view("v")
    rows = [{"id": value, "v": 1}, {"id": other, "v": 2}, Row(None, key=key)]
    out = testing.run(app, {"t": rows}, batches=2, partitions=3)
    assert (out["v"]["v"].to_list(), out.dead.height) == ([2], 0)


@pytest.mark.parametrize(
    ("hint", "key", "reason"),
    [
        (int, b"[" * 100_000, "the key of a deletion is no int"),
        (int, b"5.0", "not a whole number"),
        (int, b"99999999999999999999", "does not fit into 64 bits"),
        (str, b"\xff", "the key of a deletion is no str"),
        (bool, b"1", "not true or false"),
        (UUID, b"zz", "not a UUID"),
        (date, b"2026-02-30", "not a date"),
    ],
)
def test_a_tombstone_whose_key_cannot_be_read_is_a_dead_letter(hint, key, reason):
    app = ms.App("tables", log="unused")
    table_of(app, hint=hint).view("v")
    out = testing.run(app, {"t": [Row(None, key=key)]})
    assert out["v"].height == 0
    assert out.dead["reason"].str.contains(reason).to_list() == [True]


def test_the_records_own_key_may_be_the_tables():
    app = ms.App("tables", log="unused")
    app.table("t", key="key", format="bytes").view("v")
    rows = [Row(b"1", key="a"), Row(b"2", key="b"), Row(None, key="a")]
    assert testing.run(app, {"t": rows}, batches=2)["v"].rows() == [(b"2", b"b")]


def test_a_full_join_whose_rows_without_partner_may_look_alike_has_no_key():
    """Groups may be of null, which is equal to nothing: there may be one on each side."""
    app = ms.App("tables", log="unused")
    schema = {"id": int, "g": int | None}
    one, other = (app.table(n, schema, key="id").group_by("g") for n in ("a", "b"))
    counts = one.agg(n=ms.count()), other.agg(m=ms.count())
    assert counts[0].join(counts[1], "g", how="full").primary_key is None
    assert counts[0].join(counts[1], "g", how="full", nulls_equal=True).primary_key == ("g",)
    assert counts[0].join(counts[1], "g", how="left").primary_key == ("g",)
    with refused("Its rows have no key"):
        counts[0].join(counts[1], "g", how="full").view("v")


def test_a_full_join_with_a_condition_has_no_key():
    app = ms.App("tables", log="unused")
    one, other = table_of(app), table_of(app, "u")
    joined = one.join(other, on="id", how="full", where=pl.col("v") > pl.col("v_right"))
    assert joined.primary_key is None
    with refused("Its rows have no key"):
        joined.view("v")


def test_a_chain_of_joins_and_a_self_join_are_the_same_in_any_batches_and_after_crashes():
    app = ms.App("tables", log="unused", buckets=3)
    schema = {"id": int, "ref": int | None, "v": int}
    one, other = (app.table(n, schema, key="id") for n in ("a", "b"))
    chain = one.join(other, on={"ref": "id"}, how="left", suffix="_b")
    chain.join(one, on={"ref_b": "id"}, how="left", suffix="_a").view("chain")
    one.join(one.filter(pl.col("v") > 1), on={"ref": "id"}, suffix="_s").view("self")
    a = [{"id": n % 5, "ref": (n * 3) % 4 or None, "v": n % 3} for n in range(25)]
    b = [{"id": n % 4, "ref": (n * 2) % 5, "v": n} for n in range(20)]
    a.insert(12, Row(None, key="2"))
    b.insert(15, Row(None, key="1"))
    out = testing.replay(app, {"a": a, "b": b}, batchings=9)
    assert out["chain"].height == 5


def test_declarations_that_cannot_be_are_refused():
    app = ms.App("tables", log="unused")
    one, other = table_of(app), app.table("s", {"id": str, "v": int}, key="id")
    with refused("join is given 1. Give a table"):
        one.join(1, on="id")
    with refused("join compares 'id', a Int64, with 'id', a String"):
        one.join(other, on="id")
    with refused("join compares no columns"):
        one.join(other, on=[])
    with refused("join names 'x'|join's on names 'x'"):
        one.join(other, on="x")
    with refused("join takes tables of one app"):
        one.join(table_of(ms.App("other", log="unused")), on="id")
    with refused("The table 'k' has no key"):
        app.topic("k", {"id": int}).table()
    with refused("table's deleted is of type Int64"):
        app.topic("d", {"id": int}, key="id").table(deleted=pl.col("id"))


def test_a_table_whose_key_was_lost_has_no_key_that_is_never_null():
    app = ms.App("tables", log="unused")
    schema = {"id": str, "g": str | None, "p": int}
    left, right = (
        app.table(name, schema, key="id").select("g", "p").top(3, by="p", per="g", rank="place")
        for name in ("a", "c")
    )
    assert left.primary_key == ("g", "place")
    assert left.join(right, ["g", "place"], how="full").primary_key is None


def test_a_column_that_is_called_like_a_pattern_is_dropped_and_no_other():
    app = ms.App("tables", log="unused")
    table = app.table("t", {"id": str, "^k.*$": str, "k1": str}, key="id").drop("^k.*$")
    table.view("v")
    row = {"id": "1", "^k.*$": "a", "k1": "b"}
    assert testing.run(app, {"t": [row]})["v"].to_dicts() == [{"id": "1", "k1": "b"}]
