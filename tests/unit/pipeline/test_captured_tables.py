"""Tables of a capture: a database of SQLite that another connection writes to, captured, and read as tables."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from captured_log import inputs_of
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.capture.sqlite.source import SqliteSource
from millstream.errors import BadRecordError, ConfigError
from millstream.testing import Watermark

ACCOUNT = {"id": int, "owner": int | None, "cents": int}
PERSON = {"id": int, "name": str}
TOPICS = ("shop.main.accounts", "shop.main.people", "shop.transaction")
TOTAL = 10_000


class Shop:
    """A database of accounts and people; nothing that is done to it but `begin` changes the sum of all accounts."""

    def __init__(self, folder, seed, partitions=1):
        self.dice = random.Random(seed)
        self.path, self.log = folder / "shop.db", folder / "log"
        self.partitions = partitions
        with self.connect() as db:
            db.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
            db.execute(
                "CREATE TABLE accounts (id INTEGER PRIMARY KEY, owner INTEGER, cents INTEGER NOT NULL)"
            )
            db.execute("INSERT INTO people VALUES (1, 'Ann'), (2, 'Bob'), (3, 'Cem')")
            db.execute(
                f"INSERT INTO accounts VALUES (10, 1, {TOTAL}), (11, 2, 0), (12, NULL, 0), (13, 9, 0)"
            )

    def connect(self):
        return closing(sqlite3.connect(self.path, isolation_level=None))

    def capture(self, **options):
        return ms.capture(
            f"sqlite:///{self.path}", to=self.log, partitions=self.partitions, **options
        )

    def caught_up(self):
        source = SqliteSource(self.path, ["*"], heartbeat_s=0.001, poll_s=0.001)
        replace(self.capture(name="shop"), source=source).run(until="caught-up")

    def transact(self):
        """Move money between two accounts, perhaps new ones, and change who owns what, in one transaction."""
        dice = self.dice
        with self.connect() as db:
            db.execute("BEGIN IMMEDIATE")
            ids = [row[0] for row in db.execute("SELECT id FROM accounts")]
            one, other, new = dice.choice(ids), dice.choice(ids), dice.randrange(20, 30)
            cents = dice.randrange(500)
            db.execute("UPDATE accounts SET cents = cents - ? WHERE id = ?", (cents, one))
            db.execute("UPDATE accounts SET cents = cents + ? WHERE id = ?", (cents, other))
            if new not in ids and dice.random() < 0.5:
                db.execute("UPDATE accounts SET id = ? WHERE id = ?", (new, one))  # another key
            elif new not in ids:
                db.execute("INSERT INTO accounts VALUES (?, ?, 0)", (new, dice.randrange(1, 6)))
            db.execute("DELETE FROM accounts WHERE cents = 0 AND id > 15 AND id % 2")
            person = dice.randrange(1, 6)
            if dice.random() < 0.3:
                db.execute("DELETE FROM people WHERE id = ?", (person,))
            else:
                db.execute(
                    "INSERT OR REPLACE INTO people VALUES (?, ?)", (person, f"p{dice.random()}")
                )
            db.execute("ROLLBACK" if dice.random() < 0.2 else "COMMIT")

    def rows(self, statement):
        with self.connect() as db:
            return sorted(db.execute(statement).fetchall(), key=repr)

    def inputs(self, *topics):
        with ms.connect(self.log) as log:
            return inputs_of(log, *(topics or TOPICS))


def app_of(shop, **options):
    app = ms.App("bank", log=shop.log)
    accounts = app.table(
        "accounts", ACCOUNT, key="id", capture=shop.capture(name="shop"), **options
    )
    people = app.table(
        "main.people", PERSON, key="id", capture=shop.capture(name="shop"), **options
    )
    return app, accounts, people


@settings(max_examples=some(4), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    batches=st.integers(1, 9),
    partitions=st.sampled_from([1, 4, 7]),
)
def test_captured_tables_and_their_join_are_those_of_the_database(
    tmp_path_factory, seed, batches, partitions
):
    shop = Shop(tmp_path_factory.mktemp("shop"), seed, partitions)
    shop.caught_up()
    for _ in range(6):
        shop.transact()
        if shop.dice.random() < 0.6:
            shop.caught_up()
    shop.caught_up()
    app, accounts, people = app_of(shop)
    accounts.view("accounts")
    people.view("people")
    accounts.join(people.rename({"id": "person"}), {"owner": "person"}, how="left").view("owned")
    accounts.with_columns(all=pl.lit(1)).group_by("all").agg(cents=ms.sum("cents")).view("total")
    out = testing.run(
        app, shop.inputs(), batches=batches, partitions=partitions, seed=seed, crash=1
    )
    assert sorted(out["accounts"].rows(), key=repr) == shop.rows("SELECT * FROM accounts")
    assert sorted(out["people"].rows(), key=repr) == shop.rows("SELECT * FROM people")
    owned = out["owned"].select("id", "owner", "cents", "name").rows()
    assert sorted(owned, key=repr) == shop.rows(
        "SELECT a.id, a.owner, a.cents, p.name FROM accounts a LEFT JOIN people p ON p.id = a.owner"
    )
    assert out.dead.height == 0
    # No part of a transaction was ever visible, nor a part of the snapshot, which is one, too.
    assert {row["cents"] for row in out.changes("total").to_dicts() if row["_op"] != "delete"} == {
        TOTAL
    }


def test_a_captured_table_is_looked_up_and_joined_as_of_a_time(tmp_path):
    shop = Shop(tmp_path, 1)
    for _ in range(8):
        shop.caught_up()
        shop.transact()
    shop.caught_up()
    inputs = shop.inputs()
    changes = [(json.loads(row.values), row.at) for row in inputs["shop.main.people"] if row.values]
    times = sorted({at for _, at in changes})
    events = [
        {"n": n, "person": 1 + n % 5, "at": (at + timedelta(microseconds=500)).isoformat()}
        for n, at in enumerate(at for at in times for _ in range(5))
    ]
    far = datetime(2100, 1, 1, tzinfo=UTC)
    app, _, people = app_of(shop)
    stream = app.topic(
        "events", {"n": int, "person": int, "at": datetime}, key="person", partitions=1
    ).stream(time="at")
    people = people.rename({"id": "person"})
    stream.join_asof(people, on="person").view("asof", key="n")
    stream.lookup(people, on="person").view("latest", key="n")
    inputs = {topic: rows for topic, rows in inputs.items() if topic != "shop.main.accounts"}
    inputs["events"] = [*events, Watermark("events", at=far)]
    inputs["shop.main.people"] = [
        *inputs["shop.main.people"],
        Watermark("shop.main.people", at=far),
    ]
    out = testing.run(app, inputs, batches=4, partitions=1, seed=2)

    def name_at(person, time):
        found = None
        for value, at in changes:
            row = value["after"] or value["before"]
            if at <= time and row["id"] == person:
                found = value["after"] and value["after"]["name"]
        return found

    for row in out["asof"].to_dicts():
        assert row["name"] == name_at(row["person"], row["at"]), row
    assert out["asof"].height == out["latest"].height == len(events)


def test_a_column_that_is_gone_stops_the_app_before_that_change(tmp_path):
    shop = Shop(tmp_path, 1)
    shop.caught_up()
    with shop.connect() as db:
        db.execute("ALTER TABLE people RENAME COLUMN name TO called")
        db.execute("INSERT INTO people VALUES (4, 'Dia')")
    shop.caught_up()
    app, _, people = app_of(shop)
    people.view("people")
    inputs = shop.inputs("shop.main.people", "shop.transaction")
    with pytest.raises(BadRecordError, match=r"'name'.*Nothing of this batch was committed"):
        testing.run(app, inputs, partitions=1)
    # The way that docs/capture.md shows: a new app, which takes both names.
    later = ms.App("later", log=shop.log)
    both = {"id": int, "name": str | None, "called": str | None}
    later.table("people", both, key="id", capture=shop.capture(name="shop")).view("people")
    out = testing.run(later, inputs, partitions=1, batches=3)
    assert [row[::2] for row in out["people"].rows()] == shop.rows("SELECT * FROM people")


def test_a_column_that_is_added_is_followed(tmp_path):
    shop = Shop(tmp_path, 1)
    shop.caught_up()
    with shop.connect() as db:
        db.execute("ALTER TABLE people ADD COLUMN age INTEGER NOT NULL DEFAULT 7")
        db.execute("INSERT INTO people VALUES (4, 'Dia', 8)")
    shop.caught_up()
    app = ms.App("bank", log=shop.log)
    schema = {**PERSON, "age": int | None}
    app.table("people", schema, key="id", capture=shop.capture(name="shop")).view("people")
    out = testing.run(
        app, shop.inputs("shop.main.people", "shop.transaction"), batches=2, partitions=1
    )
    assert out["people"].rows() == shop.rows("SELECT * FROM people")
    assert out["people"]["age"].to_list() == [7, 7, 7, 8]


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_a_table_that_is_emptied_is_so_once_though_each_partition_says_it(tmp_path, partitions):
    shop = Shop(tmp_path, 1, partitions)
    shop.caught_up()
    shop.transact()
    shop.capture(name="shop").reread("accounts", "people")
    shop.caught_up()
    shop.transact()
    shop.caught_up()
    app, accounts, people = app_of(shop)
    accounts.view("accounts")
    people.view("people")
    inputs = shop.inputs()
    emptied = [
        row.partition
        for row in inputs["shop.main.people"]
        if row.values and b'"op":"t"' in row.values
    ]
    assert emptied == list(range(partitions))
    for batches in (1, 5, 9):
        out = testing.run(app, inputs, partitions=partitions, batches=batches, seed=batches)
        assert sorted(out["accounts"].rows(), key=repr) == shop.rows("SELECT * FROM accounts")
        assert sorted(out["people"].rows(), key=repr) == shop.rows("SELECT * FROM people")
        assert out.dead.height == 0


def keyed_twice(tmp_path):
    """A table whose rows only both columns of its key tell apart."""
    shop = Shop(tmp_path, 1)
    with shop.connect() as db:
        db.execute("CREATE TABLE lines (part TEXT, id INTEGER, n REAL, PRIMARY KEY (part, id))")
        db.execute("INSERT INTO lines VALUES ('a,\"id\":', 1, 1), ('b', 1, 2), ('b', 2, 3)")
    return shop


def test_a_key_that_is_not_the_databases_is_refused_when_it_is_declared(tmp_path):
    shop = keyed_twice(tmp_path)
    shop.caught_up()
    app = ms.App("bank", log=shop.log)
    schema = {"part": str, "id": int}
    with pytest.raises(ConfigError, match="the key id, and its database has the key part, id"):
        app.table("lines", schema, key="id", capture=shop.capture(name="shop"))
    app.table("lines", schema, key=["id", "part"], capture=shop.capture(name="shop"))


def test_a_key_that_is_not_the_databases_stops_an_app_that_was_there_before(tmp_path):
    shop = keyed_twice(tmp_path)
    app = ms.App("bank", log=shop.log)
    schema = {"part": str, "id": int}
    app.table("main.lines", schema, key="id", capture="shop").view("lines")
    shop.caught_up()
    with pytest.raises(BadRecordError, match=r"is part, id, and it is declared with the key id"):
        testing.run(app, shop.inputs("shop.main.lines", "shop.transaction"), partitions=1)


def test_key_and_columns_are_those_of_the_database_where_none_are_given(tmp_path):
    shop = keyed_twice(tmp_path)
    with pytest.raises(ConfigError, match=r"has no key, and .* has no definition of it"):
        ms.App("bank", log=shop.log).table("main.lines", capture="shop")
    with pytest.raises(ConfigError, match="Only a table of a capture has one by itself"):
        ms.App("bank", log=shop.log).table("lines", schema={"id": int}, envelope="debezium")
    with pytest.raises(ConfigError, match=r"'lines' is None\. Give one column"):
        ms.App("bank", log=shop.log).table("lines", schema={"id": int})
    shop.caught_up()
    app = ms.App("bank", log=shop.log)
    app.table("main.lines", capture="shop").view("lines")
    shop.transact()
    with shop.connect() as db:
        db.execute("UPDATE lines SET id = 7 WHERE part = 'b' AND id = 1")
        db.execute("DELETE FROM lines WHERE id = 2")
    shop.caught_up()
    inputs = shop.inputs("shop.main.lines", "shop.transaction")
    out = testing.run(app, inputs, batches=2, partitions=1)
    assert out["lines"].schema == {"part": pl.String, "id": pl.Int64, "n": pl.Float64}
    assert sorted(out["lines"].rows(), key=repr) == shop.rows("SELECT * FROM lines")


def test_a_table_whose_key_becomes_another_stops_the_app(tmp_path):
    shop = keyed_twice(tmp_path)
    shop.caught_up()
    app = ms.App("bank", log=shop.log)
    app.table("main.lines", capture="shop").view("lines")
    with shop.connect() as db:
        db.execute("DROP TABLE lines")
        db.execute("CREATE TABLE lines (part TEXT, id INTEGER PRIMARY KEY, n REAL)")
        db.execute("INSERT INTO lines VALUES ('a', 5, 1)")
    shop.caught_up()
    with pytest.raises(BadRecordError, match="is id, and it is declared with the key part, id"):
        testing.run(app, shop.inputs("shop.main.lines", "shop.transaction"), partitions=1)


def test_what_is_no_capture_of_the_apps_log_is_refused(tmp_path):
    app = ms.App("bank", log=tmp_path)
    url = f"sqlite:///{tmp_path}/shop.db"
    options = {"key": "id", "schema": PERSON}
    with pytest.raises(ConfigError, match=r"is 7\. Give what ms\.capture"):
        app.table("people", capture=7, **options)
    with pytest.raises(ConfigError, match="has no schema"):
        app.table("people", capture="shop", **options)
    with pytest.raises(ConfigError, match="the app reads"):
        app.table("people", capture=ms.capture(url, to=tmp_path / "other"), **options)
    with pytest.raises(ConfigError, match="compaction removes"):
        app.table("people", capture=ms.capture(url, to=tmp_path, cleanup="compact"), **options)
    with pytest.raises(ConfigError, match="and an envelope"):
        app.table("people", capture="shop", envelope="debezium", **options)
    with pytest.raises(ConfigError, match="a capture, and order="):
        app.table("people", capture="shop", order="time", **options)
    app.table("main.people", capture="shop", **options)
    assert set(app.topics) == {"shop.main.people", "shop.transaction"}
    other = ms.App("other", log=tmp_path)
    other.table("people", capture=url, **options)
    assert set(other.topics) == {"shop.main.people", "shop.transaction"}
