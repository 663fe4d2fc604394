"""Lakes have whole transactions, whatever is interrupted; other tools read them, and their earlier versions."""

import itertools
import json
import random

import duckdb
import pyarrow as pa
import pytest
from applied_model import KEY, TABLES, ModelDatabase, write

import millstream as ms
from millstream.capture.apply import lake, parquet
from millstream.capture.apply.lake import LakeTarget
from millstream.capture.apply.parquet import ParquetTable, parquet_files, parquet_versions
from millstream.capture.apply.run import ApplySession
from millstream.capture.units import CaptureUnit, TableChange, TableDefinition
from millstream.client import connect
from millstream.errors import ConfigError, ConflictError, RetriableError

FORMATS = ("parquet", "delta", "iceberg")
NEEDS = {"delta": "deltalake", "iceberg": "pyiceberg"}


class Crash(Exception):
    """The process ended here."""


@pytest.fixture(params=FORMATS)
def kind(request):
    """Give each format whose library is installed."""
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


@pytest.fixture
def crash(monkeypatch):
    """Make the nth step that writes crash, before it or after it is done; set ``at``."""
    calls = itertools.count()

    class State:
        at = None

    def crashing(owner, name):
        plain = getattr(owner, name)

        def call(*arguments):
            number = next(calls)
            if number == State.at:
                raise Crash(name)
            plain(*arguments)
            if State.at is not None and number + 0.5 == State.at:
                raise Crash(name)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (lake, "_write"),
        (lake, "replace_file"),
        (LakeTarget, "_give"),
        (parquet, "_write"),
        (parquet, "replace_file"),
    ):
        crashing(owner, name)

    def soon(steps):
        State.at = None if steps is None else next(calls) + 1 + steps

    return soon


def files_of(kind, folder, table):
    """Return the Parquet files that are a table now, as the format says."""
    if kind != "iceberg" and not (folder / f"public.{table}").exists():
        return []
    if kind == "parquet":
        return parquet_files(folder / f"public.{table}")
    if kind == "delta":
        from deltalake import DeltaTable

        return DeltaTable(folder / f"public.{table}").file_uris()
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog(
        "millstream", uri=f"sqlite:///{folder}/catalog.db", warehouse=folder.as_uri()
    )
    if not catalog.namespace_exists("public") or not catalog.table_exists(("public", table)):
        return []
    found = catalog.load_table(("public", table)).scan().plan_files()
    return [task.file.file_path.removeprefix("file://") for task in found]


def read_back(kind, folder, table):
    """Return the rows of a table by DuckDB, which reads its files."""
    files = files_of(kind, folder, table)
    if not files:
        return {}
    found = duckdb.read_parquet(list(files), union_by_name=True)
    rows = [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]
    assert len({tuple(row[name] for name in KEY) for row in rows}) == len(rows)
    return {tuple(row[name] for name in KEY): row for row in rows}


def without_nulls(rows):
    return {key: {n: v for n, v in row.items() if v is not None} for key, row in rows.items()}


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_lake_is_the_source_after_some_transaction_at_every_step(tmp_path, crash, kind, seed):
    database, folder, dice = ModelDatabase(seed), tmp_path / "lake", random.Random(seed)
    url, log_folder, applied = f"{kind}:///{folder}", tmp_path / "log", 0
    with connect(log_folder) as log:
        for _ in range(2):
            write(log, [database.unit() for _ in range(6)], partitions=2)
            while applied < database.number:
                run = ms.apply("shop", url, log=log_folder)
                run.batch_changes = dice.choice([20, 60])
                crash(dice.randrange(14) + dice.choice([0, 0.5]))
                try:
                    with ApplySession(run) as session:
                        while session.step().state != "idle":
                            pass
                except Crash:
                    pass
                crash(None)
                with ApplySession(run) as session:  # what was committed is given to the tables
                    applied = session.state.transactions
                for table in TABLES:
                    expected = database.states[applied][table]
                    if applied:
                        found = read_back(kind, folder, table)
                        assert without_nulls(found) == without_nulls(expected)
    assert applied == database.number


def test_earlier_versions_of_a_table_are_kept(tmp_path):
    for library in NEEDS.values():
        pytest.importorskip(library)
    database, folder = ModelDatabase(5), tmp_path / "lake"
    states = []
    with connect(tmp_path / "log") as log:
        for _ in range(3):
            write(log, [database.unit() for _ in range(5)])
            for kind in FORMATS:
                ms.apply("shop", f"{kind}:///{folder / kind}", log=tmp_path / "log").run(
                    until="caught-up"
                )
            states.append(database.states[-1]["users"])
    users = folder / "parquet" / "public.users"
    assert parquet_versions(users) == [0, 1, 2]
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog(
        "millstream", uri=f"sqlite:///{folder}/iceberg/catalog.db", warehouse=str(folder)
    )
    table = catalog.load_table(("public", "users"))
    ends = [
        snapshot.snapshot_id
        for snapshot in table.snapshots()
        if snapshot.summary.operation.value == "append"
    ]
    for number, state in enumerate(states):
        expected = sorted(state)
        delta = DeltaTable(folder / "delta" / "public.users", version=number)
        iceberg = table.scan(snapshot_id=ends[number])
        for rows in (delta.to_pyarrow_table(), iceberg.to_arrow()):
            assert sorted((row["id"], row["part"]) for row in rows.to_pylist()) == expected
        tasks = [task.file.file_path.removeprefix("file://") for task in iceberg.plan_files()]
        for files in (parquet_files(users, number), delta.file_uris(), tasks):
            found = duckdb.read_parquet(list(files), union_by_name=True)
            assert sorted(found.select("id", "part").fetchall()) == expected
    with pytest.raises(ConfigError, match="versions 0 to 2 are kept"):
        parquet_files(users, 9)


def test_old_versions_and_their_files_are_removed(tmp_path):
    database = ModelDatabase(6)
    with connect(tmp_path / "log") as log:
        for _ in range(6):
            write(log, [database.unit() for _ in range(5)])
            run = ms.apply("shop", f"parquet:///{tmp_path}/lake?keep=2", log=tmp_path / "log")
            run.run(until="caught-up")
    users = tmp_path / "lake" / "public.users"
    versions = parquet_versions(users)
    assert len(versions) == 2
    named = {path for version in versions for path in parquet_files(users, version)}
    assert named == {str(path) for path in users.glob("*.parquet")}


def test_a_growing_table_gets_more_buckets(tmp_path):
    made = {}

    def table_of(table):
        return made.setdefault(
            table.collection, ParquetTable(tmp_path / "lake" / table.collection, 100, 5)
        )

    database = ModelDatabase(7)
    with connect(tmp_path / "log") as log:
        for _ in range(8):
            write(log, [database.unit(12) for _ in range(10)])
            run = ms.apply("shop", f"parquet:///{tmp_path}/lake", log=tmp_path / "log")
            run.target = lambda: LakeTarget(tmp_path / "lake", table_of)
            run.run(until="caught-up")
            for table in TABLES:
                found = read_back("parquet", tmp_path / "lake", table)
                assert without_nulls(found) == without_nulls(database.states[-1][table])
    assert len(parquet_files(tmp_path / "lake" / "public.users")) >= 1


COLUMNS = {
    "id": ("int8", 1),
    "n": ("numeric", "12.30"),
    "free": ("numeric", "NaN"),
    "b": ("bytea", "AP8="),
    "d": ("date", "2026-02-28"),
    "ts": ("timestamptz", "2026-01-02T03:04:05.6Z"),
    "local": ("timestamp", "0001-01-01T00:00:00"),
    "f": ("float8", "NaN"),
    "r": ("float4", 1.1),
    "a": ("_int4", [1, None]),
    "t": ("_text", ['"', ""]),
    "j": ("jsonb", '{"a": 1e400}'),
    "u": ("uuid", "00000000-0000-0000-0000-000000000001"),
    "ok": ("bool", True),
    "day": ("date", "infinity"),
}


def typed_unit(row):
    columns = [
        {"name": name, "type": kind, **({"length": 10, "scale": 2} if name == "n" else {})}
        for name, (kind, _) in COLUMNS.items()
    ]
    contents = [
        TableDefinition("public", "typed", tuple(columns), ("id",)),
        TableChange("public", "typed", "c", ("id",), None, row),
    ]
    return CaptureUnit("transaction", "p1", 1000, iter(contents), {"at": 1}, {"db": "shop"})


def test_values_have_the_types_of_the_documents_table_and_come_back(tmp_path, kind):
    row = {name: value for name, (_, value) in COLUMNS.items()}
    with connect(tmp_path / "log") as log:
        write(log, [typed_unit(row)])
    run = ms.apply("shop", f"{kind}:///{tmp_path}/lake", log=tmp_path / "log")
    with pytest.raises(
        ConfigError, match=r"public\.typed\.day has a value that date32.*\?text=public\.typed\.day"
    ):
        run.run(until="caught-up")
    url = f"{kind}:///{tmp_path}/other?text=public.typed.day"
    run = ms.apply("shop", url, log=tmp_path / "log")
    run.run(until="caught-up")
    with ApplySession(run) as session:
        (table,) = session.stream.versions.current()
        assert list(session.target.scan(table)) == [row]
        assert list(session.target.rows(table, [{"id": 1}, {"id": 2}])) == [row]
        schema = session.target._table_of(table).schema()
    assert schema.field("n").type == pa.decimal128(10, 2)
    assert pa.types.is_date(schema.field("d").type)
    assert schema.field("ts").type.tz == "UTC"
    found = duckdb.read_parquet(list(files_of(kind, tmp_path / "other", "typed")))
    (back,) = [dict(zip(found.columns, one, strict=True)) for one in found.fetchall()]
    assert (str(back["n"]), back["free"], back["b"], back["day"]) == (
        "12.30",
        "NaN",
        b"\x00\xff",
        "infinity",
    )
    assert (str(back["d"]), back["ts"].isoformat()[:21], back["a"]) == (
        "2026-02-28",
        "2026-01-02T03:04:05.6",
        [1, None],
    )


def test_a_lake_has_one_writer_and_one_capture(tmp_path):
    database = ModelDatabase(1)
    with connect(tmp_path / "log") as log:
        write(log, [database.unit()])
    run = ms.apply("shop", f"parquet:///{tmp_path}/lake", log=tmp_path / "log")
    run.run(until="caught-up")
    with ApplySession(run), pytest.raises(RetriableError, match="another `millstream apply`"):
        run.target()
    with pytest.raises(ConfigError, match="has the tables of the capture 'shop'"):
        run.target().acquire("other", "token", again=False)
    state = json.loads((tmp_path / "lake" / "_millstream" / "shop.json").read_text())
    assert state["marker"] == 0


def test_tables_whose_state_is_gone_are_not_applied_to_from_the_beginning(tmp_path, kind):
    """They have the marks of later batches, by which a crash would pass over batches of the new state."""
    database = ModelDatabase(3)
    with connect(tmp_path / "log") as log:
        write(log, [database.unit() for _ in range(4)])
    run = ms.apply("shop", f"{kind}:///{tmp_path}/lake", log=tmp_path / "log")
    run.run(until="caught-up")
    (tmp_path / "lake" / "_millstream" / "shop.json").unlink()
    before = [read_back(kind, tmp_path / "lake", table) for table in TABLES]
    again = ms.apply("shop", f"{kind}:///{tmp_path}/lake", log=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"shop\.json does not know: its state is gone"):
        again.run(until="caught-up")
    assert [read_back(kind, tmp_path / "lake", table) for table in TABLES] == before


def test_a_state_that_was_set_back_is_refused(tmp_path, kind):
    database = ModelDatabase(3, unavailable=False)
    state = tmp_path / "lake" / "_millstream" / "shop.json"
    run = ms.apply("shop", f"{kind}:///{tmp_path}/lake", log=tmp_path / "log")
    with connect(tmp_path / "log") as log:
        write(log, [database.unit(), database.unit()])
        run.run(until="caught-up")
        older = state.read_bytes()
        write(log, [database.unit() for _ in range(9)])
        run.run(until="caught-up")
        state.write_bytes(older)
    before = [read_back(kind, tmp_path / "lake", table) for table in TABLES]
    with pytest.raises(ConflictError, match="was set back to an older copy"):
        run.run(until="caught-up")
    assert [read_back(kind, tmp_path / "lake", table) for table in TABLES] == before


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("parquet:///lake?evry=5", r"'evry'.*every"),
        ("delta:///lake?every=0", "every is '0'"),
        ("iceberg://host/lake", r"iceberg://…/lake has no path"),
    ],
)
def test_an_address_of_a_lake_that_cannot_be_is_refused(url, words):
    with pytest.raises(ConfigError, match=words):
        ms.apply("shop", url)
