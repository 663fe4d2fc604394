"""Sinks to DuckDB: the contract, and what a table of its takes, in real files."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sink_tables import modelled, reasons, send

import millstream as ms
from millstream.connectors.sinks.connector import RecordsToWrite, SinkOpening, SinkRecord
from millstream.errors import ConfigError
from millstream.testing.connectors import SinkContract

duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed here")

_KILLED = """
import sys
from dataclasses import replace
import millstream as ms
made = ms.to_duckdb(sys.argv[1], table="killed")
print("begun", flush=True)
ms.sink(replace(made, records_max=50), topic="t", log=sys.argv[2], name="out").run(until="caught-up")
"""
_HOLDS = """
import sys, duckdb
held = duckdb.connect(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
held.close()
"""


def _ask(path, *statements):
    with duckdb.connect(str(path)) as session:
        for statement in statements:
            found = session.execute(statement)
        return found.fetchall()


@contextmanager
def _program(code, *arguments):
    """Run a program, from its first line on; it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        yield process
        process.kill()


@dataclass
class Outside:
    path: Path
    keyed: bool

    def connector(self):
        made = ms.to_duckdb(self.path, table="out", key="k" if self.keyed else None)
        return replace(made, records_max=7)

    def rows(self):
        found = _ask(self.path, "SELECT n, text FROM out ORDER BY rowid")
        return [{"n": n, "text": text} for n, text in found]

    def bad_row(self):
        return {"n": "bad", "text": ""}

    @contextmanager
    def down(self):
        with _program(_HOLDS, self.path):
            yield


class TestDuckDbKeyed(SinkContract):
    keyed = True

    @contextmanager
    def outside(self, folder):
        path = folder / "warehouse.duckdb"
        key = "k VARCHAR PRIMARY KEY, " if self.keyed else ""
        _ask(path, f"CREATE TABLE out ({key}n VARCHAR NOT NULL CHECK (n <> 'bad'), text VARCHAR)")
        yield Outside(path, self.keyed)


@pytest.mark.thorough
class TestDuckDbAdded(TestDuckDbKeyed):
    keyed = False


def _run(path, log, table="u", **options):
    made = ms.to_duckdb(path, table=table, **options)
    return ms.sink(made, topic="t", log=log, name="out").run(until="caught-up")


TYPES = {
    "hu": ("HUGEINT", "170141183460469231731687303715884105727", "170141183460469231731687303715884105727"),
    "ui": ("UTINYINT", "255", "255"),
    "bo": ("BOOLEAN", "true", "true"),
    "de": ("DECIMAL(20,2)", "123456789012345678.99", "123456789012345678.99"),
    "db": ("DOUBLE", "0.1", "0.1"),
    "fl": ("FLOAT", "1.5", "1.5"),
    "da": ("DATE", '"2026-02-28"', "2026-02-28"),
    "ti": ("TIME", '"13:05:01.5"', "13:05:01.5"),
    "ts": ("TIMESTAMP", '"2026-01-02T03:04:05.678+02:00"', "2026-01-02 01:04:05.678"),
    "tn": ("TIMESTAMP_NS", '"2026-01-02T03:04:05.123456789Z"', "2026-01-02 03:04:05.123456789"),
    "tz": ("TIMESTAMPTZ", '"2026-10-25T00:30:00.000001Z"', "2026-10-25 00:30:00.000001+00"),
    "vc": ("VARCHAR", '"a\'\\\\ \\n😀 "', "a'\\ \n😀 "),
    "ob": ("VARCHAR", '{"a":[1.50,null]}', '{"a":[1.50,null]}'),
    "bl": ("BLOB", '"AP8="', "\\x00\\xFF"),
    "en": ("ENUM('a','it''s')", '"it\'s"', "it's"),
    "js": ("JSON", '"text"', '"text"'),
    "uu": ("UUID", '"123E4567-e89b-12d3-a456-426614174000"', "123e4567-e89b-12d3-a456-426614174000"),
}  # fmt: skip
REFUSED = {
    "hu": "1.5",
    "ui": "-1",
    "bo": "1",
    "de": "0.125",
    "ts": '"2026-01-02T03:04:05.1234567Z"',
    "tz": '"2026-01-02T03:04:05"',
    "en": '"b"',
    "li": "[1]",
    "ge": "1",
}


def test_a_column_of_every_type_has_the_value_of_the_record(tmp_path):
    path, log = tmp_path / "f.duckdb", tmp_path / "log"
    listed = ", ".join(f"{name} {type_}" for name, (type_, _, _) in TYPES.items())
    _ask(path, f"CREATE TABLE u (id INT PRIMARY KEY, {listed}, li INT[], ge INT GENERATED ALWAYS AS (id + 1))")  # fmt: skip
    row = ", ".join(f'"{name}": {value}' for name, (_, value, _) in TYPES.items())
    send(log, (b"0", f"{{{row}}}".encode()))
    send(log, *((b"1", f'{{"{name}": {value}}}'.encode()) for name, value in REFUSED.items()))
    status = _run(path, log, key="id")
    assert (status.records, status.dead) == (1, len(REFUSED)), reasons(log)
    asked = ", ".join(f"CAST({name} AS VARCHAR)" for name in TYPES)
    found = _ask(path, "SET TimeZone = 'UTC'", f"SELECT {asked} FROM u")[0]
    assert dict(zip(TYPES, found, strict=True)) == {name: text for name, (_, _, text) in TYPES.items()}  # fmt: skip


def test_a_row_replaces_the_sinks_columns_and_leaves_others(tmp_path):
    path, log = tmp_path / "f.duckdb", tmp_path / "log"
    _ask(
        path,
        "CREATE TABLE u (id INT PRIMARY KEY, a INT DEFAULT 7, b VARCHAR, mine VARCHAR)",
        "INSERT INTO u VALUES (1, 1, 'old', 'kept'), (3, 1, 'gone', '')",
    )
    send(log, (b"1", {"id": 1, "a": 2}), (b"2", {"b": "x"}), (b"3", None), (b"4", None))
    assert _run(path, log, key="id", columns="id,a,b").dead == 0
    assert _ask(path, "FROM u ORDER BY id") == [(1, 2, None, "kept"), (2, 7, "x", None)]


def test_rows_that_break_a_rule_are_dead_letters_with_the_reason(tmp_path):
    path, log = tmp_path / "f.duckdb", tmp_path / "log"
    _ask(
        path,
        "CREATE TABLE p (id INT PRIMARY KEY)",
        "CREATE TABLE u (id INT PRIMARY KEY, mail VARCHAR UNIQUE, p INT REFERENCES p (id))",
        "INSERT INTO u VALUES (9, 'nine', NULL)",
    )
    send(
        log,
        (b"1", {"id": 1, "mail": "one"}),
        (b"2", {"id": 2, "mail": "nine"}),
        (b"3", {"id": 3, "p": 5}),
        (b"4", {"id": 5}),
        (b"1", {"id": 1, "mail": "uno"}),
        (b"9", None),
        (b"7", {"id": 7, "mail": "nine"}),
    )
    assert _run(path, log, key="id").dead == 3
    found = reasons(log)
    assert sorted(found) == [1, 2, 3]
    for offset, words in {1: "nine", 2: "foreign key", 3: "key is 4"}.items():
        assert words in found[offset]
    assert _ask(path, "SELECT id, mail FROM u ORDER BY id") == [(1, "uno"), (7, "nine")]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.tuples(st.integers(0, 3), st.booleans())),
        max_size=40,
    ),
    st.integers(1, 3),
)
def test_batches_do_what_their_records_would_do_one_after_the_other(
    tmp_path_factory, changes, parts
):
    path = tmp_path_factory.mktemp("model") / "f.duckdb"
    _ask(path, "CREATE TABLE u (id INT PRIMARY KEY, n INT CHECK (n < 3), x BOOLEAN NOT NULL)")
    writer = ms.to_duckdb(path, table="u", key="id").open(SinkOpening("out", "t", "l", "x"))
    records = [
        SinkRecord(
            0, offset, 0, b"%d" % key, b"", None if row is None else {"n": row[0], "x": row[1]}
        )
        for offset, (key, row) in enumerate(changes)
    ]
    size = len(records) // parts + 1
    refused = set()
    for number in range(parts):
        batch = RecordsToWrite(
            "id", number, records[number * size :][:size], {0: (number + 1) * size}
        )
        found = writer.write(batch)
        assert writer.write(batch) == tuple(found)  # again, as after a crash
        refused |= {one.offset for one in found}
    wanted, wanted_refused = modelled(changes, lambda _, __, row: row[0] == 3)
    assert {id_: (n, x) for id_, n, x in _ask(path, "FROM u")} == wanted
    # A row that another one of its batch replaces is not tried, where all can be written.
    assert refused <= set(wanted_refused)


def test_a_file_or_table_that_does_not_fit_is_one_error_at_the_start(tmp_path):
    path, log = tmp_path / "f.duckdb", tmp_path / "log"
    send(log, (b"1", {"id": 1, "euros": 2}))
    with pytest.raises(ConfigError, match=r"there is no file .*missing\.duckdb"):
        _run(tmp_path / "missing.duckdb", log)
    _ask(
        path,
        "CREATE TABLE orders (id INT PRIMARY KEY, cents INT NOT NULL)",
        "CREATE TABLE rough (id DOUBLE PRIMARY KEY)",
    )
    for table, options, words in [
        ("order", {}, "there is no .* Did you mean 'orders'"),
        ("orders", {"key": "cents"}, "primary key of .* is id"),
        ("orders", {"columns": "id"}, "NOT NULL and have no default: cents"),
        ("rough", {"key": "id"}, "of the type DOUBLE"),
        ("orders", {"key": "id"}, "no row of the first batch .* the field 'euros'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            made = ms.to_duckdb(path, table=table, **options)
            ms.sink(made, topic="t", log=log, name=f"out-{words[:3].strip()}-{table}").run()
    (tmp_path / "text.duckdb").write_text("no database" * 1000)
    with pytest.raises(ConfigError, match="is no file of DuckDB"):
        made = ms.to_duckdb(tmp_path / "text.duckdb", table="u")
        ms.sink(made, topic="t", log=log, name="other").run()


@pytest.mark.parametrize("name", ["k", "a (b"])
def test_a_key_by_whose_collation_two_keys_are_one_is_refused(tmp_path, name):
    """By NOCASE the row of "A" would replace that of "a", and its tombstone would delete it."""
    path = tmp_path / "f.duckdb"
    made = f'"{name}" VARCHAR COLLATE NOCASE PRIMARY KEY, v INT'
    _ask(path, f"CREATE TABLE u ({made})", "CREATE TABLE w (k VARCHAR PRIMARY KEY, v VARCHAR COLLATE NOCASE)")  # fmt: skip
    send(tmp_path / "log", (b"a", {"v": 1}), (b"A", {"v": 2}), (b"A", None))
    with pytest.raises(ConfigError, match="has the collation NOCASE"):
        _run(path, tmp_path / "log", key=name)
    _run(path, tmp_path / "log", table="w", key="k")
    assert _ask(path, "SELECT * FROM w") == [("a", "1")]


def test_the_file_is_free_between_batches(tmp_path):
    path, log = tmp_path / "f.duckdb", tmp_path / "log"
    _ask(path, "CREATE TABLE u (n INT)")
    send(log, (b"1", {"n": 1}))
    made = ms.to_duckdb(f"duckdb:///{path}", table="u")
    seen = []

    def look(status):
        seen.append(status.state)
        with _program("import sys, duckdb; print(duckdb.connect(sys.argv[1]).sql('FROM u'))", path) as other:  # fmt: skip
            assert other.wait(60) == 0

    ms.sink(made, topic="t", log=log).run(until="caught-up", on_status=look)
    assert seen == ["writing", "idle"]


def test_a_sink_that_is_killed_writes_each_row_once(tmp_path):
    path, log = tmp_path / "f.duckdb", tmp_path / "log"
    _ask(path, "CREATE TABLE killed (n INT)")
    send(log, *((b"k", {"n": n}) for n in range(2000)))
    for wait_s in (0.05, 0.2, 0.4):
        with _program(_KILLED, path, log):
            time.sleep(wait_s)
    made = replace(ms.to_duckdb(path, table="killed"), records_max=50)
    status = ms.sink(made, topic="t", log=log, name="out").run(until="caught-up")
    assert (status.records, status.dead) == (2000, 0)
    assert _ask(path, "SELECT n FROM killed ORDER BY rowid") == [(n,) for n in range(2000)]
