"""A first snapshot that stops and goes on, while rows with large values change that it has not read yet.

The server does not send a large value that an update leaves as it was. So an update of a row that the topic does not have
says too little of it, and whoever replays the topic must never be given one.
"""

import random
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from row_blocks import one_by_one

import millstream as ms
from millstream.capture.units import TableDefinition

LARGE = 3000  # characters, which PostgreSQL keeps outside of the row
KEYS = {
    "int": ("id int PRIMARY KEY", ("id",), lambda n: f"{n}"),
    "text": (
        'id text COLLATE "{collation}" PRIMARY KEY',
        ("id",),
        lambda n: f"'{'aBcéÄz'[n % 6]}{n}'",
    ),
    "two": (
        "id numeric, part date, PRIMARY KEY (part, id)",
        ("id", "part"),
        lambda n: f"{n}.5, '2026-01-0{n % 7 + 1}'",
    ),
}


class StrictReplica:
    """Replays units by the envelope's rules: a column that is left out must be known from the row before."""

    def __init__(self):
        self.progress, self.columns, self.rows = None, [], {}

    def store(self, unit):
        for content in one_by_one(unit.contents):
            if isinstance(content, TableDefinition):
                self.columns = [one["name"] for one in content.columns]
            elif content.op == "t":
                self.rows.clear()
            else:
                self._apply(content)
        self.progress = unit.progress

    def _apply(self, change):
        def at(row):
            return tuple(row[name] for name in change.key)

        before = None
        if change.op in "ud":
            before = self.rows.pop(at(change.before or change.after), None)
        if change.after is not None:
            row = {**(before or {}), **change.after} if change.op == "u" else change.after
            assert row.keys() == set(self.columns), f"{change} has no row before it that is known"
            self.rows[at(row)] = row

    def follow(self, source, *, limit=None):
        units = source.units(self.progress)
        for number, unit in enumerate(units):
            if number == limit:
                break
            self.store(unit)
            source.acknowledge(self.progress)
            if unit.kind == "progress":
                break
        units.close()
        source.close()


def next_source(shop):
    shop.wait_until_released()  # by the source before it
    return shop.source()


def made(shop, kind="int", rows=20):
    columns, _, value = KEYS[kind]
    # Upper case sorts among lower case, unlike in Python; not every release is built with it.
    icu = shop.run("SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'")
    columns = columns.format(collation="und-x-icu" if icu else "C")
    shop.run(
        f"CREATE TABLE t ({columns}, n int, big text, other text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL",
    )
    for number in range(rows):
        shop.run(f"INSERT INTO t VALUES ({value(10 * number)}, 0, {large(number)}, {large(1)})")


def large(number):
    return f"repeat('{number % 10}', {LARGE})"


def test_15_an_update_of_a_row_that_is_not_read_yet_waits_for_it(shop):
    made(shop)
    replica = StrictReplica()
    replica.follow(next_source(shop), limit=5)
    assert 0 < len(replica.rows) < 20
    shop.run("UPDATE t SET n = 1 WHERE id = 190", "UPDATE t SET n = 2 WHERE id = 0")
    replica.follow(next_source(shop))
    assert replica.rows == shop.rows("t", ["id"])


@pytest.mark.parametrize("then", ["", "n = 7", "big = 'small'", "id = 5", "id = 177"])
def test_15_a_row_that_moves_to_where_was_read_already_is_read_by_its_key(shop, then):
    made(shop)
    replica = StrictReplica()
    replica.follow(next_source(shop), limit=5)
    shop.run("UPDATE t SET id = 3 WHERE id = 190")
    if then:
        shop.run(f"UPDATE t SET {then} WHERE id = 3")
    replica.follow(next_source(shop), limit=1)
    replica.follow(next_source(shop))
    assert replica.rows == shop.rows("t", ["id"])


def test_15_many_rows_that_move_have_the_table_read_from_its_beginning(shop, monkeypatch):
    monkeypatch.setattr("millstream.capture.postgres.unread_rows.OWED_MAX", 3)
    made(shop)
    replica = StrictReplica()
    replica.follow(next_source(shop), limit=5)
    shop.run("UPDATE t SET id = -id WHERE id > 60")
    replica.follow(next_source(shop))
    assert replica.rows == shop.rows("t", ["id"])


def test_15_a_value_that_an_alteration_rewrote_is_read_where_its_row_moves_to(shop):
    """It is not sent, and the topic has the one from before the alteration."""
    made(shop)
    replica = StrictReplica()
    replica.follow(next_source(shop))
    shop.run("ALTER TABLE t ALTER big TYPE varchar USING big || 'new'", "UPDATE t SET n = 1")
    replica.follow(next_source(shop), limit=6)
    shop.run("UPDATE t SET id = -1 WHERE id = 190")
    replica.follow(next_source(shop))
    assert replica.rows == shop.rows("t", ["id"])


@pytest.mark.parametrize("moved", ["other = 'x'", "id = 'a3'"])
def test_15_columns_whose_type_refuses_null_do_not_matter_where_keys_are_compared(shop, moved):
    made(shop, "text")
    shop.run(
        "CREATE DOMAIN filled AS int NOT NULL CHECK (VALUE IS NOT NULL)",
        "ALTER TABLE t ADD must filled DEFAULT 1",
    )
    replica = StrictReplica()
    replica.follow(next_source(shop), limit=5)
    assert 0 < len(replica.rows) < 20
    shop.run(f"UPDATE t SET {moved} WHERE id = (SELECT max(id) FROM t)")
    replica.follow(next_source(shop))
    assert replica.rows == shop.rows("t", ["id"])


def test_15_a_key_whose_column_is_renamed_meanwhile_loses_nothing(shop):
    made(shop)
    replica = StrictReplica()
    replica.follow(next_source(shop), limit=5)
    shop.run("UPDATE t SET id = 3 WHERE id = 190", "ALTER TABLE t RENAME id TO key")
    replica.follow(next_source(shop))
    assert replica.rows == shop.rows("t", ["key"])


def statement(dice, kind):
    value, names = KEYS[kind][2], ", ".join(KEYS[kind][1])
    old, new = (f"({value(dice.randrange(220))})" for _ in range(2))
    free = f"NOT EXISTS (SELECT 1 FROM t WHERE ({names}) = {new})"
    moved = f"UPDATE t SET ({names}) = ROW{new}"
    some = f"({names}) = (SELECT {names} FROM t ORDER BY n, ({names}) LIMIT 1 OFFSET {dice.randrange(20)})"
    return dice.choice(
        [
            f"UPDATE t SET n = {dice.randrange(99)} WHERE {some}",
            f"UPDATE t SET big = {large(dice.randrange(9))} WHERE {some}",
            f"UPDATE t SET n = n + 1, other = {large(dice.randrange(9))} WHERE ({names}) > {old}",
            f"{moved} WHERE {some} AND {free}",
            f"{moved}, n = n + 1 WHERE {some} AND {free}",
            f"{moved}, big = {large(dice.randrange(9))} WHERE {some} AND {free}",
            f"INSERT INTO t VALUES ({new[1:-1]}, 1, {large(3)}, {large(4)}) ON CONFLICT DO NOTHING",
            f"DELETE FROM t WHERE {some} AND n % 3 = 0",
        ]
    )


def disturb(shop, dice, kind):
    with shop.connect() as session:
        for _ in range(dice.randrange(8)):
            session.execute("BEGIN")
            for _ in range(dice.choice([1, 1, 4])):
                session.execute(statement(dice, kind))
            session.execute(dice.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    "seed",
    [
        1,
        *(pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 5)),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(5, 20)),
    ],
)
def test_7_15_a_snapshot_that_is_killed_again_and_again_is_the_table(shop, kind, seed):
    dice = random.Random(seed)
    made(shop, kind)
    replica = StrictReplica()
    for _ in range(5 if seed == 1 else 12):
        replica.follow(next_source(shop), limit=dice.randrange(1, 8))
        disturb(shop, dice, kind)
    replica.follow(next_source(shop))
    truth = shop.rows("t", KEYS[kind][1])
    if kind == "two":
        truth = {
            (f"{number:.1f}", day): {**row, "id": f"{number:.1f}"}
            for (number, day), row in truth.items()
        }
        found = {(row["id"], row["part"]): row for row in replica.rows.values()}
        assert found == truth
    else:
        assert replica.rows == truth


class _KilledError(Exception):
    pass


class Killed:
    """A source that dies before its unit of a number."""

    def __init__(self, source, limit):
        self._source, self._limit = source, limit

    def units(self, progress):
        for number, unit in enumerate(self._source.units(progress)):
            if number == self._limit:
                raise _KilledError
            yield unit

    def __getattr__(self, name):
        return getattr(self._source, name)


@pytest.mark.parametrize(
    "partitions",
    [pytest.param(1, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough), 7],
)
def test_7_15_a_copy_of_a_snapshot_that_was_killed_is_the_table(shop, tmp_path, partitions):
    dice = random.Random(partitions)
    made(shop)
    capture = ms.capture(
        shop.url, tables="t", to=tmp_path / "log", name="shop", partitions=partitions
    )
    name = capture.source.name
    copy = ms.apply("shop", f"sqlite:///{tmp_path}/copy.db", log=tmp_path / "log")
    for _ in range(4):
        source = shop.source("t")
        source.name = name
        with pytest.raises(_KilledError):
            replace(capture, source=Killed(source, dice.randrange(2, 7))).run()
        source.close()
        disturb(shop, dice, "int")
        copy.run(until="caught-up")
    source = shop.source("t")
    source.name = name
    replace(capture, source=source).run(until="caught-up")
    copy.run(until="caught-up")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as found:
        rows = found.execute("SELECT id, n, big, other FROM t ORDER BY id").fetchall()
    assert rows == shop.run("SELECT id, n, big, other FROM t ORDER BY id")
