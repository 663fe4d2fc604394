"""The one commit: all tables move together, once, and only for the newest run."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import sqlite3
import threading
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    OffsetOutOfRangeError,
    UnknownViewError,
)
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence, ViewChange, ViewSchema

COUNTS = ViewSchema("counts", (("word", "str"), ("n", "int")), ("word",))


@pytest.fixture
def store(tmp_path):
    with SqliteStateStore(tmp_path / "views.db") as opened:
        yield opened


class Job:
    """A run of a job that commits batch after batch."""

    def __init__(self, store: SqliteStateStore, job: str = "main") -> None:
        self.store = store
        self.job = job
        self.run, self.batch_id = store.begin_run("app", job, "checkpoint-1")

    def commit(self, *changes: ViewChange, **kwargs) -> bool:
        fence = Fence("app", self.job, self.run, self.batch_id)
        kwargs = {"position": {"t": [self.batch_id]}, "status": {"batch": self.batch_id}, **kwargs}
        done = self.store.commit(fence, changes, **kwargs)
        self.batch_id += 1
        return done


def counts(**rows: int) -> ViewChange:
    frame = pl.DataFrame({"word": list(rows), "n": list(rows.values())}, schema=COUNTS.dtypes)
    return ViewChange("counts", frame)


def test_a_commit_moves_rows_changes_position_ledger_and_status(store):
    store.declare(COUNTS)
    job = Job(store)
    assert job.commit(counts(b=2, a=1), ledger=[{"read": 3}, {"read": 4}])
    assert job.commit(counts(b=5))
    assert store.scan("counts").rows() == [("a", 1), ("b", 5)]
    assert store.changes("counts").rows() == [
        (1, 0, "upsert", "a", 1),
        (2, 0, "upsert", "b", 2),
        (3, 1, "upsert", "b", 5),
    ]
    assert store.get("counts", word="b") == {"word": "b", "n": 5}
    assert store.get("counts", word="z") is None
    assert store.count("counts") == 2
    assert store.position("counts") == store.position("app") == {"t": [1]}
    assert store.status("app") == store.status("app", "main") == {"batch": 1}
    assert store.ledger("app") == [{"read": 3}, {"read": 4}]
    assert store.ledger("app", since=1) == []


def test_a_repeated_batch_does_nothing(store):
    store.declare(COUNTS)
    job = Job(store)
    job.commit(counts(a=1), ledger=[{"n": 1}])
    job.batch_id = 0
    assert job.commit(counts(a=99), ledger=[{"n": 1}], position={}, status={}) is False
    assert store.scan("counts").rows() == [("a", 1)]
    assert store.changes("counts").height == 1
    assert store.status("app") == {"batch": 0}


def test_a_run_that_was_replaced_is_refused_and_told_by_whom(store):
    store.declare(COUNTS)
    old = Job(store)
    old.commit(counts(a=1))
    new = Job(store)
    assert (new.run, new.batch_id) == (2, 1)
    with pytest.raises(FencedError, match=r"Run 1 .* replaced by run 2"):
        old.commit(counts(a=2))
    old.batch_id = 0
    with pytest.raises(FencedError, match=r"Run 1 .* replaced by run 2"):
        old.commit(counts(a=2))
    assert new.commit(counts(a=3))
    assert store.scan("counts").rows() == [("a", 3)]


def test_jobs_of_one_app_have_fences_of_their_own(store):
    store.declare(COUNTS)
    one, two = Job(store, "one"), Job(store, "two")
    one.commit(counts(a=1), position={"p": 1})
    two.commit(position={"p": 2}, status={"who": "two"})
    assert one.batch_id == two.batch_id == 1
    assert store.position("counts") == {"p": 1}
    assert store.position("app") == {"p": 2}
    assert store.status("app") == {"who": "two"}
    assert store.status("app", "one") == {"batch": 0}


def test_a_batch_may_name_only_the_partitions_that_it_moved(store):
    job = Job(store)
    job.commit(position={"t": {"0": 5, "1": 2}})
    job.commit(position={"t": {"1": 3}, "u": {"0": 1}})
    assert store.position("app") == {"t": {"0": 5, "1": 3}, "u": {"0": 1}}


def test_a_gap_in_the_batches_is_refused(store):
    job = Job(store)
    job.commit()
    job.batch_id = 2
    with pytest.raises(CorruptionError, match="batch 1 is expected"):
        job.commit()


def test_another_checkpoint_is_refused_once_batches_are_committed(store):
    assert store.begin_run("app", "main", "one") == (1, 0)
    assert store.begin_run("app", "main", "two") == (2, 0)
    store.commit(Fence("app", "main", 2, 0), [], position={}, status={})
    with pytest.raises(ConfigError, match=r"still hold 1 batches(.|\n)*restore .* or start over"):
        store.begin_run("app", "main", "three")
    assert store.begin_run("app", "main", "two") == (3, 1)


def test_a_run_that_the_store_never_gave_out_is_refused(store):
    with pytest.raises(FencedError, match="not known"):
        store.commit(Fence("app", "main", 1, 0), [], position={}, status={})


@pytest.mark.parametrize("instead", [None, "new file"])
def test_a_store_deleted_under_a_running_job_is_noticed(tmp_path, instead):
    path = tmp_path / "views.db"
    with SqliteStateStore(path) as store:
        job = Job(store)
        path.rename(tmp_path / "elsewhere.db")
        if instead:
            path.write_bytes(b"")
        with pytest.raises(FencedError, match="deleted or replaced"):
            job.commit()


def test_rows_that_do_not_fit_undo_the_whole_batch(store):
    store.declare(COUNTS)
    job = Job(store)
    wrong = ViewChange("counts", pl.DataFrame({"word": ["b"], "n": ["two"]}))
    with pytest.raises(ConfigError, match=r"'n'.*int.*String"):
        job.commit(counts(a=1), wrong, ledger=[{"n": 1}])
    assert store.scan("counts").is_empty()
    assert store.changes("counts").is_empty()
    assert store.status("app") == {}
    assert store.ledger("app") == []
    with pytest.raises(ConfigError, match=r"lack \['n'\] and have besides \['m'\]"):
        Job(store).commit(ViewChange("counts", pl.DataFrame({"word": ["a"], "m": [1]})))


def test_an_unchanged_row_is_not_a_change(store):
    store.declare(COUNTS)
    job = Job(store)
    job.commit(counts(a=1, b=2))
    job.commit(counts(a=1, b=3))
    job.commit(counts(a=1, b=3))
    assert store.changes("counts", since=2).rows() == [(3, 1, "upsert", "b", 3)]
    assert store.status("app") == {"batch": 2}


def test_deletes_come_before_upserts_and_only_what_was_there_is_logged(store):
    store.declare(COUNTS)
    job = Job(store)
    job.commit(counts(a=1, b=2, c=3))
    deletes = pl.DataFrame({"word": ["a", "b", "z"]})
    job.commit(ViewChange("counts", counts(b=20).upserts, deletes))
    assert store.scan("counts").rows() == [("b", 20), ("c", 3)]
    assert store.changes("counts", since=3).rows() == [
        (4, 1, "delete", "a", None),
        (5, 1, "upsert", "b", 20),
    ]


def test_the_last_row_of_a_key_counts(store):
    store.declare(COUNTS)
    Job(store).commit(
        ViewChange("counts", pl.DataFrame({"word": ["a", None, "a", None], "n": [1, 2, 3, 4]}))
    )
    assert store.scan("counts").rows() == [("a", 3), (None, 4)]


def test_null_keys_are_equal_and_differ_from_empty_ones(store):
    schema = ViewSchema(
        "v", (("s", "str"), ("b", "bytes"), ("i", "int"), ("n", "int")), tuple("sbi")
    )
    store.declare(schema)
    job = Job(store)
    keys = list(itertools.product([None, ""], [None, b""], [None, 0]))
    for n in (0, 1):
        rows = [(*key, i + n) for i, key in enumerate(keys)]
        job.commit(ViewChange("v", pl.DataFrame(rows, schema=schema.dtypes, orient="row")))
    frame = store.scan("v")
    assert frame.height == 8
    assert dict(zip(keys, range(1, 9), strict=True)) == {r[:3]: r[3] for r in frame.rows()}
    assert store.get("v", s=None, b=b"", i=None)["n"] == keys.index((None, b"", None)) + 1
    assert store.scan("v", where={"s": None}).height == 4
    gone = pl.DataFrame([(None, None, None)], schema=list("sbi"), orient="row")
    empty = pl.DataFrame(schema=schema.dtypes)
    job.commit(ViewChange("v", empty, gone))
    assert store.count("v") == 7
    assert store.changes("v")["_op"].to_list().count("delete") == 1


def test_every_kind_comes_back_as_it_went_in(store):
    utc = dt.UTC
    rows = {
        "int": [0, 2**63 - 1, None, -(2**63)],
        "float": [math.nan, math.inf, None, -math.inf],
        "str": ["", "a\0b ☃", None, "x" * 10_000],
        "bool": [True, False, None, True],
        "datetime": [
            dt.datetime(2019, 11, 24, 0, 0, 0, 1, utc),
            dt.datetime(1, 1, 1, tzinfo=utc),
            None,
            dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, utc),
        ],
        "date": [dt.date(1969, 12, 31), dt.date(9999, 12, 31), None, dt.date(1, 1, 1)],
        "duration": [dt.timedelta(microseconds=-1), dt.timedelta(days=9), None, dt.timedelta(0)],
        "decimal(20,4)": [Decimal("1.5000"), Decimal("-0.0001"), None, Decimal(0)],
        "bytes": [b"", b"\0\xff", None, b"x"],
    }
    schema = ViewSchema("v", (("k", "int"), *((f"c {k}", k) for k in rows)), ("k",))
    frame = pl.DataFrame(
        {"k": [1, 2, 3, 4], **{f"c {k}": v for k, v in rows.items()}}, schema=schema.dtypes
    )
    store.declare(schema)
    job = Job(store)
    job.commit(ViewChange("v", frame))
    assert store.scan("v").schema == frame.schema
    assert store.scan("v").equals(frame)
    assert store.changes("v").drop("_seq", "_batch_id", "_op").equals(frame)
    job.commit(ViewChange("v", frame))
    assert store.changes("v").height == 4
    assert store.get("v", k=2)["c datetime"] == rows["datetime"][1]


def test_every_kind_can_be_a_key(store):
    values = {
        "int": [1, None], "float": [math.nan, None, 0.5], "str": ["a", None],
        "bool": [True, False, None], "datetime": [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None],
        "date": [dt.date(2020, 1, 1), None], "duration": [dt.timedelta(1), None],
        "decimal": [Decimal("1.5"), None], "bytes": [b"\0", b"", None], "json": ["[1]", None],
    }  # fmt: skip
    job = Job(store)
    for kind, keys in values.items():
        schema = ViewSchema(f"by_{kind}", (("k", kind), ("n", "int")), ("k",))
        store.declare(schema)
        for n in (1, 2):
            frame = pl.DataFrame({"k": keys, "n": [n] * len(keys)}, schema=schema.dtypes)
            job.commit(ViewChange(schema.name, frame))
        found = store.scan(schema.name)
        assert found["k"].sort().equals(pl.Series("k", keys, schema.dtypes["k"]).sort())
        assert found["n"].to_list() == [2] * len(keys)
        assert store.get(schema.name, k=keys[0])["n"] == 2


def test_lists_and_structs_are_json(store):
    frame = pl.DataFrame({"k": [1, 2], "l": [[1, None], None], "s": [{"a": 1.5}, {"a": None}]})
    schema = ViewSchema.of("v", frame, ("k",))
    assert schema.columns == (("k", "int"), ("l", "json"), ("s", "json"))
    store.declare(schema)
    Job(store).commit(ViewChange("v", frame))
    assert store.get("v", k=1) == {"k": 1, "l": [1, None], "s": {"a": 1.5}}
    assert store.get("v", k=2) == {"k": 2, "l": None, "s": {"a": None}}
    assert store.scan("v")["l"].to_list() == ["[1,null]", None]
    with pytest.raises(ConfigError, match="not JSON"):
        Job(store).commit(ViewChange("v", pl.DataFrame({"k": [1], "l": ["[1"], "s": ["{}"]})))


def test_naive_and_zoned_times_are_kept_in_utc(store):
    store.declare(ViewSchema("v", (("k", "int"), ("at", "datetime")), ("k",)))
    noon = pl.Series("at", [dt.datetime(2020, 6, 1, 12)])  # noqa: DTZ001
    job = Job(store)
    job.commit(ViewChange("v", pl.DataFrame({"k": [1], "at": noon})))
    job.commit(
        ViewChange("v", pl.DataFrame({"k": [2], "at": noon.dt.replace_time_zone("Europe/Berlin")}))
    )
    job.commit(ViewChange("v", pl.DataFrame({"k": [3], "at": noon.dt.cast_time_unit("ns")})))
    assert [at.hour for at in store.scan("v")["at"]] == [12, 10, 12]


def test_a_view_without_a_key_has_one_row(store):
    store.declare(ViewSchema("total", (("n", "int"),), ()))
    job = Job(store)
    job.commit(ViewChange("total", pl.DataFrame({"n": [1]})))
    job.commit(ViewChange("total", pl.DataFrame({"n": [1, 2]})))
    assert store.scan("total").rows() == [(2,)]
    assert store.get("total") == {"n": 2}


def test_a_view_may_be_nothing_but_its_key(store):
    store.declare(ViewSchema("seen", (("id", "str"),), ("id",)))
    job = Job(store)
    job.commit(ViewChange("seen", pl.DataFrame({"id": ["a", "b"]})))
    job.commit(ViewChange("seen", pl.DataFrame({"id": ["b", "c"]})))
    assert store.changes("seen", since=2)["id"].to_list() == ["c"]


def test_columns_may_have_any_name(store):
    names = ("a", "A", 'say "hi"', "", "select", "a b; drop table x", "nul\0", "ä", "a#1", "^.*$")
    schema = ViewSchema("order", tuple((name, "int") for name in names), ("a", "", "^.*$"))
    store.declare(schema)
    frame = pl.DataFrame({name: [n] for n, name in enumerate(names)})
    job = Job(store)
    job.commit(ViewChange("order", frame))
    assert store.scan("order").equals(frame)
    assert store.changes("order").columns[3:] == list(names)
    empty = frame.clear()
    job.commit(ViewChange("order", empty, pl.DataFrame({k: frame[k] for k in schema.key})))
    assert store.count("order") == 0
    assert store.changes("order").rows()[1][3:] == (0, None, None, 3, *[None] * 5, 9)
    job.commit(ViewChange("order", frame))
    assert store.scan("order", where={'say "hi"': 2}).height == 1


@pytest.mark.parametrize("name", ["", "1a", "_views", "sqlite_x", "a/b", "a" * 129, "a\n", 'x"'])
def test_a_bad_view_name_is_refused(name):
    with pytest.raises(ConfigError, match="no name for a view"):
        ViewSchema(name, (("a", "int"),), ())


def test_bad_columns_are_refused():
    with pytest.raises(ConfigError, match="kind 'text'"):
        ViewSchema("v", (("a", "text"),), ())
    with pytest.raises(ConfigError, match="twice"):
        ViewSchema("v", (("a", "int"), ("a", "str")), ())
    with pytest.raises(ConfigError, match="'_seq'"):
        ViewSchema("v", (("_seq", "int"),), ())
    with pytest.raises(ConfigError, match="names 'b'"):
        ViewSchema("v", (("a", "int"),), ("b",))


def test_a_view_declared_differently_is_refused_and_told_how(store):
    store.declare(COUNTS)
    store.declare(COUNTS)
    with pytest.raises(ConfigError, match="column 'n' is int, not float"):
        store.declare(ViewSchema("counts", (("word", "str"), ("n", "float")), ("word",)))
    with pytest.raises(ConfigError, match=r"its key is \(word\), not \(\)"):
        store.declare(ViewSchema("counts", COUNTS.columns, ()))
    with pytest.raises(ConfigError, match="its name is 'counts'"):
        store.declare(ViewSchema("Counts", COUNTS.columns, COUNTS.key))
    assert store.views() == [COUNTS]


def test_old_changes_are_forgotten_and_asking_for_them_says_so(tmp_path):
    with SqliteStateStore(tmp_path / "views.db", changes_kept=5) as store:
        store.declare(COUNTS)
        job = Job(store)
        for n in range(10):
            job.commit(counts(a=n, b=n))
        kept = store.changes("counts", since=14)
        assert kept["_seq"].to_list() == [15, 16, 17, 18, 19, 20]
        with pytest.raises(OffsetOutOfRangeError, match="changes 1 to 14 are gone") as caught:
            store.changes("counts", since=0)
        assert (caught.value.start, caught.value.end) == (15, 21)
        assert store.changes("counts", since=20).is_empty()
        with pytest.raises(OffsetOutOfRangeError, match="newest change is 20"):
            store.changes("counts", since=21)


def test_asking_for_what_is_not_there_lists_what_is(store):
    store.declare(COUNTS)
    with pytest.raises(UnknownViewError, match=r"'count' in .*; there are: counts"):
        store.scan("count")
    with pytest.raises(ConfigError, match=r"\(word\), and \(w\) was given"):
        store.get("counts", w=1)
    with pytest.raises(ConfigError, match="no column 'w'"):
        store.scan("counts", where={"w": 1})


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "views.db"
    with pytest.raises(ConfigError, match="no view store"):
        SqliteStateStore(path, readonly=True)
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(CorruptionError, match="damaged or is no view store"):
        SqliteStateStore(path)
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (a)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(CorruptionError, match="but no view store"):
        SqliteStateStore(path, readonly=True)
    with pytest.raises(CorruptionError, match="but no view store"):
        SqliteStateStore(path)
    assert b"_views" not in path.read_bytes()
    assert path.read_bytes()[100:] == before[100:]


def test_a_store_whose_tables_are_not_made_yet_is_none_for_readers(tmp_path):
    path = tmp_path / "views.db"
    made = sqlite3.connect(path)
    made.execute("PRAGMA journal_mode = WAL")  # as far as a first run that died, or has just begun
    made.close()
    assert path.stat().st_size > 0
    with pytest.raises(ConfigError, match="There is no view store"):
        SqliteStateStore(path, readonly=True)
    SqliteStateStore(path).close()
    with SqliteStateStore(path, readonly=True) as store:
        assert store.views() == []


def test_a_reader_cannot_write(tmp_path):
    with SqliteStateStore(tmp_path / "views.db") as writer:
        writer.declare(COUNTS)
        with (
            SqliteStateStore(tmp_path / "views.db", readonly=True) as reader,
            pytest.raises(ConfigError, match="opened for reading"),
        ):
            reader.declare(COUNTS)


def test_readers_see_whole_batches_while_the_writer_commits(store, tmp_path):
    store.declare(COUNTS)
    store.declare(ViewSchema("twin", COUNTS.columns, COUNTS.key))
    job = Job(store)
    stop = threading.Event()
    seen: list[tuple[set[int], int]] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            with SqliteStateStore(tmp_path / "views.db", readonly=True) as reader:
                while not stop.is_set():
                    frame = reader.scan("counts")
                    seen.append((set(frame["n"]), frame.height))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    words = [f"w{i}" for i in range(300)]
    for n in range(40):
        job.commit(counts(**dict.fromkeys(words, n)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert seen
    assert all(len(values) <= 1 and height in (0, 300) for values, height in seen)


def test_waiting_ends_when_the_batch_or_position_is_there(store, tmp_path):
    store.declare(COUNTS)
    job = Job(store)
    reader = SqliteStateStore(tmp_path / "views.db", readonly=True)
    assert reader.wait_for("counts", batch_id=0, timeout_s=0) is False
    results: list[bool] = []
    waiter = threading.Thread(
        target=lambda: results.append(
            reader.wait_for("counts", batch_id=1, position={"t": [7, 3]}, timeout_s=60)
        )
    )
    waiter.start()
    job.commit(counts(a=1), position={"t": [9, 9]})
    job.commit(counts(a=2), position={"t": [9, 2]})
    assert reader.wait_for("counts", position={"t": [9, 2]}, timeout_s=60)
    assert not reader.wait_for("counts", position={"t": [9, 3]}, timeout_s=0)
    assert not reader.wait_for("app", position={"u": [1]}, timeout_s=0)
    job.commit(counts(a=3), position={"t": [9, 3], "u": {"0": 1}})
    waiter.join()
    assert results == [True]
    assert reader.wait_for("app", position={"u": {"0": 1}}, timeout_s=0)
    reader.close()


def test_a_batch_larger_than_a_slice_is_one_batch(store, monkeypatch):
    monkeypatch.setattr("millstream.views.state_store.store._SLICE_ROWS", 7)
    store.declare(COUNTS)
    job = Job(store)
    words = [f"w{i:02}" for i in range(50)]
    job.commit(counts(**dict.fromkeys(words, 1)))
    job.commit(ViewChange("counts", counts().upserts, pl.DataFrame({"word": words[:20]})))
    assert store.scan("counts")["word"].to_list() == words[20:]
    changes = store.changes("counts")
    assert changes["_seq"].to_list() == list(range(1, 71))
    assert changes["_batch_id"].to_list() == [0] * 50 + [1] * 20


_KEYS = st.one_of(st.none(), st.sampled_from(["", "a", "b", "c"]))
_BATCH = st.tuples(
    st.lists(st.tuples(_KEYS, st.integers(0, 3)), max_size=6), st.lists(_KEYS, max_size=4)
)


@settings(max_examples=some(40), deadline=None)
@given(batches=st.lists(_BATCH, max_size=6))
def test_rows_and_change_log_agree_with_a_dictionary(tmp_path_factory, batches):
    model: dict[str | None, int] = {}
    replayed: dict[str | None, int] = {}
    path: Path = tmp_path_factory.mktemp("store") / "views.db"
    with SqliteStateStore(path) as store:
        store.declare(COUNTS)
        job = Job(store)
        for upserts, deletes in batches:
            before = dict(model)
            for key in deletes:
                model.pop(key, None)
            model.update(upserts)
            since = store.changes("counts")["_seq"].max() or 0
            job.commit(
                ViewChange(
                    "counts",
                    pl.DataFrame(upserts, schema=COUNTS.dtypes, orient="row"),
                    pl.DataFrame({"word": deletes}, schema={"word": pl.String}),
                )
            )
            changes = store.changes("counts", since=since).rows()
            for _, _, operation, key, n in changes:
                if operation == "delete":
                    del replayed[key]
                else:
                    replayed[key] = n
            differing = {k for k in {*before, *model} if before.get(k) != model.get(k)}
            assert {change[3] for change in changes} == differing
            assert len(changes) == len(differing)
        assert dict(store.scan("counts").rows()) == model == replayed
