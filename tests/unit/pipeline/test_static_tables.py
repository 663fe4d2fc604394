"""Tables whose rows are given with the program, and replaced by those of the next program."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pandas as pd
import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.state.keyhash import Buckets
from millstream.pipeline import upserts
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.reader import View
from millstream.views.sinks.dataset import Dataset
from millstream.views.state_store.sqlite_store import SqliteStateStore

USERS = [
    {"id": "1", "city": "x"},
    {"id": "2", "city": "y"},
    {"id": "3", "city": None},
    {"id": "1", "city": "z"},
]
CITIES = pl.DataFrame({"id": ["x", "y"], "country": ["X", "Y"]})


def app_of(cities: object, **options: object) -> ms.App:
    app = ms.App("static", log="unused")
    users = app.table("users", {"id": str, "city": str | None}, key="id", partitions=2)
    table = app.static_table(cities, key="id", **options)
    table.view("cities")
    users.join(table, {"city": "id"}, how="left").view("users")
    return app


def run_programs(folder, programs, buckets):
    """Run a program, then the next over what it left; return the view of users after each."""
    engine, batch_id, seen = None, 0, []
    for app, rows in programs:
        plan = app.plan(Buckets(buckets))
        if engine is None:
            engine = KernelEngine(plan, folder / "views.db", {"users": 2}, random.Random(0))
            engine.now_ms = 0
        engine.plan = plan
        with ExitStack() as opened:
            committer = engine._begin(opened)
            for ends in engine._ends({"users": items_of(app.topics["users"], rows, 2, 0)}, 1):
                engine._commit(committer, batch_id, engine._batch(ends))
                batch_id += 1
        with SqliteStateStore(folder / "views.db", readonly=True) as store:
            seen.append(
                (store.scan("users").sort("id").rows(), store.scan("cities").sort("id").rows())
            )
    return seen


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_a_topic_is_joined_with_rows_that_are_given(partitions: int) -> None:
    for seed in range(10):
        found = testing.run(
            app_of(CITIES), {"users": USERS}, batches=4, partitions=partitions, seed=seed, crash=2
        )
        assert found["users"].rows() == [("1", "z", None), ("2", "y", "Y"), ("3", None, None)]
        assert found["cities"].rows() == [("x", "X"), ("y", "Y")]


@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_the_rows_of_the_next_program_replace_them_at_once(tmp_path, buckets: int) -> None:
    later = pl.DataFrame({"id": ["y", "z"], "country": ["Y2", "Z"]})
    programs = [(app_of(CITIES), USERS[:2]), (app_of(later), USERS[2:]), (app_of(later), USERS[:1])]
    seen = run_programs(tmp_path, programs, buckets)
    assert seen == [
        ([("1", "x", "X"), ("2", "y", "Y")], [("x", "X"), ("y", "Y")]),
        ([("1", "z", "Z"), ("2", "y", "Y2"), ("3", None, None)], [("y", "Y2"), ("z", "Z")]),
        ([("1", "x", None), ("2", "y", "Y2"), ("3", None, None)], [("y", "Y2"), ("z", "Z")]),
    ]


def test_the_same_rows_in_another_order_change_nothing(tmp_path) -> None:
    programs = [(app_of(CITIES), USERS), (app_of(CITIES.reverse()), USERS[:1])]
    run_programs(tmp_path, programs, 2)
    with SqliteStateStore(tmp_path / "views.db", readonly=True) as store:
        assert store.changes("cities").height == 2


def test_rows_of_nested_columns_and_no_rows_are_tables_too(tmp_path) -> None:
    rows = pl.DataFrame({"id": ["x"], "tags": [["a", "b"]], "at": [{"lat": 1.5}]})
    programs = [
        (app_of(rows), USERS[:1]),
        (app_of(rows.with_columns(tags=pl.Series([["a"]]))), USERS[1:2]),
        (app_of(rows.clear()), USERS[1:2]),
    ]
    seen = run_programs(tmp_path, programs, 2)
    assert [cities for _, cities in seen][2] == []
    assert [len(users) for users, _ in seen] == [1, 2, 2]


def test_pandas_and_arrow_tables_are_taken() -> None:
    for given in (CITIES.to_arrow(), pd.DataFrame(CITIES.to_dict(as_series=False))):
        found = testing.run(app_of(given), {"users": USERS})
        assert found["cities"].rows() == [("x", "X"), ("y", "Y")]


def test_a_table_of_given_rows_holds_no_watermark() -> None:
    app = ms.App("static", log="unused")
    cities = app.static_table(CITIES, key="id")
    cities.join(app.static_table(CITIES, key="id"), "id", how="semi").view("twice")
    events = app.topic("events", {"city": str}, partitions=1).stream()
    events.window(ms.tumbling("1 minute"), by="city").emit("update").agg(n=ms.count()).view("n")
    found = testing.run(app, {"events": [{"city": "x"}]})
    assert found["twice"].height == 2
    assert found.watermark is not None


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            pl.DataFrame({"id": ["x", "x"]}),
            {},
            "'static table' has two rows with the key 'x'. Leave one out, or give more columns as key=.",
        ),
        (CITIES, {"key": ()}, "'static table' has no key."),
        (CITIES, {"key": "code"}, "names 'code'. The columns there are id, country."),
        ([1, 2], {}, "is a list; give a DataFrame of polars or pandas, or an Arrow table"),
        (
            CITIES.with_columns(pl.col("country").cast(pl.Categorical)),
            {},
            "The column 'country' is a Categorical",
        ),
        (
            CITIES.rename({"country": "__time"}),
            {},
            "'static table' makes the column '__time': names that begin with '__' are reserved",
        ),
    ],
)
def test_what_is_no_table_is_refused_where_it_is_declared(rows, options, message) -> None:
    with pytest.raises(ConfigError) as refused:
        ms.App("static", log="unused").static_table(rows, **{"key": "id", **options})
    assert message in str(refused.value)


def test_more_rows_than_travel_with_a_plan_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(upserts, "STATIC_BYTES_MAX", 1 << 20)
    rows = pl.DataFrame({"id": range(300_000)})
    with pytest.raises(ConfigError, match=r"has 2 MiB of rows. Up to 1 MiB travel with a plan"):
        ms.App("static", log="unused").static_table(rows, key="id")


def test_an_app_of_static_tables_alone_is_refused() -> None:
    app = ms.App("static", log="unused")
    app.static_table(CITIES, key="id").view("cities")
    with pytest.raises(ConfigError, match="The app 'static' reads no topic"):
        app.plan()


def countries_of(rows: object) -> list[tuple[object, ...]]:
    app = ms.App("reader", log="unused")
    users = app.table("users", {"id": str, "city": str | None}, key="id", partitions=2)
    users.join(app.static_table(rows, key="id"), {"city": "id"}, how="left").view("users")
    out = testing.run(app, {"users": [{"id": "1", "city": "x"}, {"id": "2", "city": "z"}]})
    return out["users"].sort("id").select("id", "country").rows()


def test_the_view_of_another_app_is_a_static_table(tmp_path):
    written = pl.DataFrame({"id": ["x", "y"], "country": ["X", "Y"]})
    other = ms.App("writer", log="unused")
    users = other.table("users", {"id": str, "city": str | None}, key="id", partitions=2)
    cities = other.static_table(written, key="id")
    cities.view("cities")
    users.view("users")
    run_programs(tmp_path, [(other, USERS)], 2)
    with SqliteStateStore(tmp_path / "views.db", readonly=True) as store:
        assert countries_of(View(store, "cities", "writer")) == [("1", "X"), ("2", None)]


def test_a_dataset_is_a_static_table_of_the_rows_that_were_not_taken_back(tmp_path):
    rows = pl.DataFrame(
        {"id": ["x", "x", "x", "z"], "country": ["old", "old", "X", "Z"], "_diff": [1, -1, 1, 1]},
        schema_overrides={"_diff": pl.Int8},
    )

    class Written(Dataset):
        def scan(self) -> pl.LazyFrame:
            return rows.lazy()

    assert countries_of(Written(tmp_path)) == [("1", "X"), ("2", "Z")]


def priced(prices: object) -> ms.App:
    app = ms.App("priced", log="unused")
    users = app.topic("users", {"id": str, "city": str | None}, key="id", partitions=1).stream()
    with_price = users.lookup(app.static_table(prices, key="id", name="prices"), {"city": "id"})
    with_price.view("priced", key="id")
    with_price.to("told", key="id")
    return app


@pytest.mark.parametrize("before", [0, 1], ids=["first batch", "later batch"])
def test_other_rows_are_not_taken_for_a_batch_that_a_topic_already_has(
    tmp_path, before: int
) -> None:
    """The topic would have the old prices and the view the new ones."""
    first, second = (priced(CITIES.with_columns(country=pl.lit(price))) for price in ("1", "2"))
    plan = first.plan(Buckets(2))
    engine = KernelEngine(plan, tmp_path / "views.db", {"users": 1}, random.Random(0))
    engine.now_ms = 0

    def run(app: ms.App, batch_id: int, *, crash: bool = False) -> None:
        engine.plan = app.plan(Buckets(2))
        engine.batch_id = batch_id
        with ExitStack() as opened:
            committer = engine._begin(opened)
            if crash:
                engine._crash(committer, batch_id, ends, "between the commits")
            else:
                engine._commit(committer, batch_id, engine._batch(ends))

    for batch_id in range(before):
        ends = next(engine._ends({"users": items_of(first.topics["users"], USERS[:1], 1, 0)}, 1))
        run(first, batch_id)
    ends = next(engine._ends({"users": items_of(first.topics["users"], USERS[1:2], 1, 0)}, 1))
    run(first, before, crash=True)
    with pytest.raises(ConfigError, match="the rows of 'prices'"):
        run(second, before)
    run(first, before)
    ends = next(engine._ends({"users": items_of(first.topics["users"], USERS[:1], 1, 0)}, 1))
    run(second, before + 1)
    with SqliteStateStore(tmp_path / "views.db", readonly=True) as store:
        rows = dict(store.scan("priced")["id", "country"].rows())
    assert rows == {"1": "2", "2": "1"}
