"""What every view store promises, tried on each.

These are an app's own store in SQLite and in PostgreSQL, and views in PostgreSQL beside it.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
import pkgutil
import threading
from contextlib import ExitStack
from decimal import Decimal

import polars as pl
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import (
    ConfigError,
    FencedError,
    OffsetOutOfRangeError,
    UnknownViewError,
)
from millstream.kernels.frames import DIFF
from millstream.kernels.plan import JobPlan, SinkPlan, ViewSinkSpec
from millstream.kernels.state.keyhash import Buckets
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.query import Query
from millstream.views.store_location import open_state_store, parse_state_store


class Store:
    """A place for views, opened as a job does to write, and as a reader does to read."""

    def __init__(self, folder, url=None, state_store=None):
        self.folder, self.url = folder, url
        self.state_store = folder / "views.db" if state_store is None else state_store
        self._open = ExitStack()
        self._numbers = itertools.count(8)

    def reader(self):
        if self.url is None:
            return self._open.enter_context(open_state_store(self.state_store, readonly=True))
        from millstream.views.postgres.reader import PostgresViewReader

        return self._open.enter_context(PostgresViewReader(self.url))

    def view(self, name, columns, key):
        """Declare a view; ``columns`` are polars types by name."""
        key = (key,) if isinstance(key, str) else tuple(key)
        schema = tuple((n, pl.DataFrame(schema={n: t}).schema[n]) for n, t in columns.items())
        return SinkPlan(name, next(self._numbers), key, schema, ViewSinkSpec(self.url))

    def job(self, *views, app="app", job="main", checkpoint_id="one"):
        plan = JobPlan(app, (), (), (), views, Buckets(1))
        return Job(self._open, plan, self, job, checkpoint_id)

    def close(self):
        self._open.close()


class Job:
    """A run of a job that commits batch after batch."""

    def __init__(self, stack, plan, store, job, checkpoint_id):
        opened = open_committer(plan, store.state_store, store.folder / "log")
        self.committer = stack.enter_context(opened)
        self.batch_id = self.committer.begin_run(job, checkpoint_id)

    def commit(self, position=None, **rows):
        result = BatchResult(rows=rows, position=position or {})
        done = self.committer.commit(self.batch_id, result, {})
        self.batch_id += 1
        return done


@pytest.fixture(params=["sqlite", "postgresql", "state in postgresql"])
def store(request, tmp_path):
    url = None if request.param == "sqlite" else request.getfixturevalue("database")
    if request.param == "state in postgresql":
        opened = Store(tmp_path, state_store=parse_state_store(url, "app", what="The store"))
    else:
        opened = Store(tmp_path, url)
    yield opened
    opened.close()


COUNTS = {"word": pl.String, "n": pl.Int64}


def counts(**rows):
    return pl.DataFrame({"word": list(rows), "n": list(rows.values())}, schema=COUNTS)


def gone(frame):
    return frame.with_columns(pl.lit(-1, pl.Int8).alias(DIFF))


def given_rows(frame):
    return frame.with_columns(pl.lit(1, pl.Int8).alias(DIFF))


def test_a_commit_moves_rows_changes_and_position(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    assert job.commit(counts=counts(b=2, a=1), position={"t": {"0": 3}})
    assert job.commit(counts=counts(b=5), position={"t": {"1": 4}})
    read = store.reader()
    assert read.scan("counts").rows() == [("a", 1), ("b", 5)]
    assert read.changes("counts").rows() == [
        (1, 0, "upsert", "a", 1),
        (2, 0, "upsert", "b", 2),
        (3, 1, "upsert", "b", 5),
    ]
    assert read.get("counts", word="b") == {"word": "b", "n": 5}
    assert read.get("counts", word="z") is None
    assert read.count("counts") == 2
    assert read.position("counts") == read.position("app") == {"t": {"0": 3, "1": 4}}
    assert [view.name for view in read.views() if view.name != "dead_letters"] == ["counts"]


def test_a_batch_without_rows_moves_the_position(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=counts(a=1), position={"t": {"0": 1}})
    job.commit(position={"t": {"0": 9}})
    read = store.reader()
    assert read.position("counts") == {"t": {"0": 9}}
    assert read.wait_for("counts", batch_id=1, position={"t": {"0": 9}}, timeout_s=0)
    assert not read.wait_for("counts", batch_id=2, timeout_s=0)
    assert not read.wait_for("counts", position={"t": {"0": 10}}, timeout_s=0)


def test_waiting_ends_when_the_position_is_reached(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=counts(a=1))
    read, results = store.reader(), []
    waiter = threading.Thread(
        target=lambda: results.append(read.wait_for("counts", position={"t": [7]}, timeout_s=60))
    )
    waiter.start()
    job.commit(position={"t": [7]})
    waiter.join()
    assert results == [True]


def test_a_repeated_batch_does_nothing(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=counts(a=1))
    job.batch_id = 0
    assert job.commit(counts=counts(a=99)) is False
    read = store.reader()
    assert read.scan("counts").rows() == [("a", 1)]
    assert read.changes("counts").height == 1


def test_a_run_that_was_replaced_is_refused(store):
    view = store.view("counts", COUNTS, "word")
    old = store.job(view)
    old.commit(counts=counts(a=1))
    new = store.job(view)
    assert new.batch_id == 1
    with pytest.raises(FencedError, match=r"Run 1 .* was replaced"):
        old.commit(counts=counts(a=2))
    assert new.commit(counts=counts(a=3))
    assert store.reader().scan("counts").rows() == [("a", 3)]


def test_another_checkpoint_is_refused_once_batches_are_committed(store):
    view = store.view("counts", COUNTS, "word")
    store.job(view, checkpoint_id="one")
    job = store.job(view, checkpoint_id="two")
    job.commit(counts=counts(a=1))
    with pytest.raises(ConfigError, match="checkpoint"):
        store.job(view, checkpoint_id="three")


def test_rows_that_do_not_fit_undo_the_whole_batch(store):
    job = store.job(store.view("counts", COUNTS, "word"), store.view("other", COUNTS, "word"))
    wrong = pl.DataFrame({"word": ["b"], "n": ["two"]})
    with pytest.raises(ConfigError, match=r"'n'.*int.*String"):
        job.commit(counts=counts(a=1), other=wrong)
    read = store.reader()
    assert read.scan("counts").is_empty()
    assert read.changes("counts").is_empty()
    assert read.position("counts") == {}


def test_an_unchanged_row_is_not_a_change(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=counts(a=1, b=2))
    job.commit(counts=counts(a=1, b=3))
    job.commit(counts=counts(a=1, b=3))
    assert store.reader().changes("counts", since=2).rows() == [(3, 1, "upsert", "b", 3)]


def test_rows_taken_back_are_deleted_unless_their_key_is_given_again(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=given_rows(counts(a=1, b=2, c=3)))
    job.commit(counts=pl.concat([gone(counts(a=1, b=2, z=9)), given_rows(counts(b=20))]))
    read = store.reader()
    assert read.scan("counts").rows() == [("b", 20), ("c", 3)]
    assert read.changes("counts", since=3).rows() == [
        (4, 1, "delete", "a", None),
        (5, 1, "upsert", "b", 20),
    ]


def test_a_row_given_and_taken_back_in_one_batch_was_never_there(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=given_rows(counts(a=1)))
    rows = [given_rows(counts(a=2, b=5)), gone(counts(a=1)), gone(counts(b=5, a=2))]
    job.commit(counts=pl.concat(rows))
    assert store.reader().scan("counts").is_empty()


def test_the_last_row_of_a_key_counts(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    job.commit(counts=pl.DataFrame({"word": ["a", None, "a", None], "n": [1, 2, 3, 4]}))
    assert store.reader().scan("counts").rows() == [("a", 3), (None, 4)]


def test_null_keys_are_equal_and_differ_from_empty_ones(store):
    types = {"s": pl.String, "b": pl.Binary, "i": pl.Int64, "n": pl.Int64}
    job = store.job(store.view("v", types, tuple("sbi")))
    keys = list(itertools.product([None, ""], [None, b""], [None, 0]))
    for n in (0, 1):
        rows = [(*key, i + n) for i, key in enumerate(keys)]
        job.commit(v=pl.DataFrame(rows, schema=types, orient="row"))
    read = store.reader()
    frame = read.scan("v")
    assert frame.height == 8
    assert dict(zip(keys, range(1, 9), strict=True)) == {r[:3]: r[3] for r in frame.rows()}
    assert read.get("v", s=None, b=b"", i=None)["n"] == keys.index((None, b"", None)) + 1
    assert read.scan("v", where={"s": None}).height == 4
    some = pl.DataFrame([(None, None, None, 1), ("", b"", None, 7)], schema=types, orient="row")
    job.commit(v=gone(some))
    assert read.count("v") == 6
    assert read.changes("v")["_op"].to_list().count("delete") == 2
    job.commit(v=frame)
    assert read.changes("v").height == 8 + 8 + 2 + 2


EVERY_KIND = {
    "int": (pl.Int64, [0, 2**63 - 1, None, -(2**63)]),
    "float": (pl.Float64, [math.nan, math.inf, None, -math.inf]),
    "small": (pl.Float64, [5e-324, 1.7976931348623157e308, None, 0.1]),
    "str": (pl.String, ["", "a\0b ☃\uffff\\N\t\r\n\\.", None, "x" * 10_000]),
    "bool": (pl.Boolean, [True, False, None, True]),
    "datetime": (
        pl.Datetime("us", "UTC"),
        [
            dt.datetime(2019, 11, 24, 0, 0, 0, 1, dt.UTC),
            dt.datetime(1, 1, 1, tzinfo=dt.UTC),
            None,
            dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, dt.UTC),
        ],
    ),
    "date": (pl.Date, [dt.date(1969, 12, 31), dt.date(9999, 12, 31), None, dt.date(1, 1, 1)]),
    "duration": (
        pl.Duration("us"),
        [dt.timedelta(microseconds=-1), dt.timedelta(days=900_000), None, dt.timedelta(0)],
    ),
    "decimal": (pl.Decimal(20, 4), [Decimal("1.5000"), Decimal("-0.0001"), None, Decimal(0)]),
    "bytes": (pl.Binary, [b"", b"\0\xff\\", None, b"x"]),
}


def test_every_kind_comes_back_as_it_went_in(store):
    types = {"k": pl.Int64, **{name: dtype for name, (dtype, _) in EVERY_KIND.items()}}
    values = {"k": [1, 2, 3, 4], **{name: rows for name, (_, rows) in EVERY_KIND.items()}}
    frame = pl.DataFrame(values, schema=types)
    job = store.job(store.view("v", types, "k"))
    job.commit(v=frame)
    read = store.reader()
    assert read.scan("v").schema == frame.schema
    assert read.scan("v").equals(frame)
    assert read.changes("v").drop("_seq", "_batch_id", "_op").equals(frame)
    job.commit(v=frame)
    assert read.changes("v").height == 4
    for name, (_, rows) in EVERY_KIND.items():
        for number, value in enumerate(rows, 1):
            assert number in read.scan("v", where={name: value})["k"], (name, value)
    second = pl.when(pl.col("k") != 2)
    job.commit(v=frame.with_columns(second.then(pl.col("float")).alias("float")))
    assert read.changes("v", since=4)["k"].to_list() == [2]


@pytest.mark.parametrize("kind", list(EVERY_KIND))
def test_every_kind_can_be_a_key(store, kind):
    dtype, keys = EVERY_KIND[kind]
    if kind == "str":
        keys = ["", "a\0\uffff", None, "x" * 1000]  # PostgreSQL's indexes hold some 2,700 bytes
    types = {"k": dtype, "n": pl.Int64}
    job = store.job(store.view("v", types, "k"))
    keys = list(dict.fromkeys(keys))
    for n in (1, 2):
        job.commit(v=pl.DataFrame({"k": keys, "n": [n] * len(keys)}, schema=types))
    read = store.reader()
    found = read.scan("v")
    assert found["k"].sort().equals(pl.Series("k", keys, dtype).sort())
    assert found["n"].to_list() == [2] * len(keys)
    assert read.changes("v").height == 2 * len(keys)
    assert all(read.get("v", k=key)["n"] == 2 for key in keys)
    one = pl.DataFrame({"k": keys[:2], "n": [3, 2]}, schema=types)
    job.commit(v=one)
    assert read.changes("v", since=2 * len(keys))["n"].to_list() == [3]
    job.commit(v=gone(pl.DataFrame({"k": keys, "n": [0] * len(keys)}, schema=types)))
    assert read.count("v") == 0


def test_lists_and_structs_are_json(store):
    frame = pl.DataFrame({"k": [1, 2], "l": [[1, None], None], "s": [{"a": 1.5}, {"a": None}]})
    job = store.job(store.view("v", frame.schema, "k"))
    job.commit(v=frame)
    read = store.reader()
    assert read.get("v", k=1) == {"k": 1, "l": [1, None], "s": {"a": 1.5}}
    assert read.get("v", k=2) == {"k": 2, "l": None, "s": {"a": None}}
    assert read.scan("v")["l"].to_list() == ["[1,null]", None]


def test_a_view_without_a_key_has_one_row(store):
    job = store.job(store.view("total", {"n": pl.Int64}, ()))
    job.commit(total=pl.DataFrame({"n": [1]}))
    job.commit(total=pl.DataFrame({"n": [1, 2]}))
    job.commit(total=pl.DataFrame({"n": [2]}))
    read = store.reader()
    assert read.scan("total").rows() == [(2,)]
    assert read.get("total") == {"n": 2}
    assert read.changes("total")["n"].to_list() == [1, 2]


def test_a_view_may_be_nothing_but_its_key(store):
    job = store.job(store.view("seen", {"id": pl.String}, "id"))
    job.commit(seen=pl.DataFrame({"id": ["a", "b"]}))
    job.commit(seen=pl.DataFrame({"id": ["b", "c"]}))
    assert store.reader().changes("seen", since=2)["id"].to_list() == ["c"]


ODD = (
    "a", "A", 'say "hi"', "", "select", "a b; drop table x", "nul\0", "ä", "a#1", "^.*$", "100%",
    "%s", "%(p0)s", "ctid", "xmin", "i", "c0", "é" * 40, "é" * 40 + "x", "column", "t", "s",
)  # fmt: skip


def test_columns_may_have_any_name(store):
    key = ("a", "", "^.*$", "%s")
    job = store.job(store.view("order", dict.fromkeys(ODD, pl.Int64), key))
    frame = pl.DataFrame({name: [n] for n, name in enumerate(ODD)})
    job.commit(order=frame)
    read = store.reader()
    assert read.scan("order").equals(frame)
    assert read.changes("order").columns[3:] == list(ODD)
    assert read.scan("order", where={'say "hi"': 2, "%(p0)s": 12}, limit=1).height == 1
    job.commit(order=gone(frame))
    assert read.count("order") == 0
    gone_row = dict(zip(ODD, read.changes("order").rows()[1][3:], strict=True))
    assert {name for name, value in gone_row.items() if value is not None} == set(key)


def test_a_view_declared_differently_is_refused_and_told_how(store):
    store.job(store.view("counts", COUNTS, "word"))
    with pytest.raises(ConfigError, match="column 'n' is int, not float"):
        store.job(store.view("counts", {"word": pl.String, "n": pl.Float64}, "word"))
    with pytest.raises(ConfigError, match=r"its key is \(word\), not \(n\)"):
        store.job(store.view("counts", COUNTS, "n"))


def test_what_is_not_there_is_told_with_what_there_is(store):
    store.job(store.view("counts", COUNTS, "word"))
    read = store.reader()
    for ask in (read.scan, read.schema, read.count, read.changes):
        with pytest.raises(UnknownViewError, match=r"'other'.*counts"):
            ask("other")
    with pytest.raises(ConfigError, match=r"no column 'm'.*word, n"):
        read.scan("counts", where={"m": 1})
    with pytest.raises(ConfigError, match=r"key of the view 'counts' is \(word\)"):
        read.get("counts", n=1)
    with pytest.raises(OffsetOutOfRangeError, match="newest change is 0"):
        read.changes("counts", since=7)


def test_old_changes_are_forgotten_and_asking_for_them_says_so(store, monkeypatch):
    for module in (
        "state_store.sqlite_store.SqliteStateStore",
        "postgres.state_store.PostgresStateStore",
        "sinks.postgres.PostgresSink",
    ):
        path = f"millstream.views.{module}.__init__.__kwdefaults__"
        monkeypatch.setitem(pkgutil.resolve_name(path), "changes_kept", 5)
    job = store.job(store.view("counts", COUNTS, "word"))
    for n in range(6):
        job.commit(counts=counts(a=n, b=n))
    read = store.reader()
    assert read.changes("counts", since=6)["_seq"].to_list() == [7, 8, 9, 10, 11, 12]
    with pytest.raises(OffsetOutOfRangeError, match="changes 1 to 6 are gone") as caught:
        read.changes("counts")
    assert (caught.value.start, caught.value.end) == (7, 13)


def test_a_batch_larger_than_a_slice_is_one_batch(store, monkeypatch):
    module = "state_store.store" if store.url is None else "sinks.postgres"
    monkeypatch.setattr(f"millstream.views.{module}._SLICE_ROWS", 7)
    job = store.job(store.view("counts", COUNTS, "word"))
    words = [f"w{i:02}" for i in range(50)]
    job.commit(counts=counts(**dict.fromkeys(words, 1)))
    job.commit(counts=gone(counts(**dict.fromkeys(words[:20], 1))))
    read = store.reader()
    assert read.scan("counts")["word"].to_list() == words[20:]
    changes = read.changes("counts")
    assert changes["_seq"].to_list() == list(range(1, 71))
    assert changes["_batch_id"].to_list() == [0] * 50 + [1] * 20


def test_a_reader_sees_whole_batches_only(store):
    job = store.job(store.view("counts", COUNTS, "word"), store.view("again", COUNTS, "word"))
    job.commit(counts=counts(a=0), again=counts(a=0))
    read, seen, done = store.reader(), [], threading.Event()

    def look():
        while not done.is_set():
            seen.append((read.changes("counts"), read.scan("counts")))

    looker = threading.Thread(target=look)
    looker.start()
    for n in range(1, 30):
        job.commit(counts=counts(a=n, b=n), again=counts(a=n))
    done.set()
    looker.join()
    assert seen
    for changes, rows in seen:
        assert set(
            changes.filter(pl.col("_batch_id") > 0)["_batch_id"].value_counts()["count"]
        ) <= {2}
        assert rows["n"].n_unique() == 1


_KEYS = st.one_of(st.none(), st.sampled_from(["", "a", "b", "c"]))
_ROWS = st.lists(st.tuples(_KEYS, st.integers(0, 2), st.sampled_from([1, 1, -1])), max_size=8)


@settings(
    max_examples=some(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches=st.lists(_ROWS, max_size=5))
def test_rows_and_change_log_agree_with_a_dictionary(store, batches):
    """The naive model: of a batch's rows those that do not cancel; the last of a key counts."""
    view = store.view(f"v{next(store._numbers)}", COUNTS, "word")
    job = store.job(view, job=view.name)
    read = store.reader()
    model, replayed = {}, {}
    for rows in batches:
        before = dict(model)
        left = {}
        for at, (word, n, sign) in enumerate(rows):
            total, _ = left.get((word, n), (0, 0))
            left[word, n] = (total + sign, at)
        keys = {word for (word, _), (total, _) in left.items() if total < 0}
        for key in keys:
            model.pop(key, None)
        for (word, n), (total, _) in sorted(left.items(), key=lambda item: item[1][1]):
            if total > 0:
                model[word] = n
        since = read.changes(view.name)["_seq"].max() or 0
        frame = pl.DataFrame(rows, schema={**COUNTS, DIFF: pl.Int8}, orient="row")
        job.commit(**{view.name: frame})
        changes = read.changes(view.name, since=since).rows()
        for _, _, operation, key, n in changes:
            if operation == "delete":
                del replayed[key]
            else:
                replayed[key] = n
        differing = {k for k in {*before, *model} if before.get(k) != model.get(k)}
        assert {change[3] for change in changes} == differing
        assert len(changes) == len(differing)
    assert dict(read.scan(view.name).rows()) == model == replayed
    store.close()  # each example has connections of its own


SORTED_KINDS = {
    "k": (pl.Int64, st.integers(0, 3) | st.none()),
    "b": (pl.Binary, st.sampled_from([b"", b"a", b"b", None])),
    "at": (
        pl.Datetime("us", "UTC"),
        st.integers(0, 3).map(lambda n: dt.datetime(2026, 1, 1, 0, n, tzinfo=dt.UTC)) | st.none(),
    ),
    "amount": (
        pl.Decimal(12, 2),
        st.sampled_from(["9.50", "10.00", "-3.25", "-30.00", "0.00"]).map(Decimal) | st.none(),
    ),
    "rate": (pl.Float64, st.sampled_from([0.5, 10.0, -1.0, math.inf, math.nan, None])),
    "name": (pl.String, st.sampled_from(["", "a", "Z", "é", None])),
}


def place(value):
    """Where a value stands in an order: null after all, NaN after all other numbers."""
    if value is None:
        return (2, 0)
    nan = isinstance(value, float) and math.isnan(value)
    return (1, 0) if nan else (0, value)


def chosen(rows, names, between, order, limit):
    """Answer a query on plain rows."""
    kept = [
        row
        for row in rows
        if all(
            row[names.index(name)] is not None
            and (start is None or place(row[names.index(name)]) >= place(start))
            and (end is None or place(row[names.index(name)]) < place(end))
            for name, (start, end) in between.items()
            if (start, end) != (None, None)  # a range open at both sides says nothing
        )
    ]
    for term in reversed([*order, "k", "b", "at", "amount"]):
        at = names.index(term.removeprefix("-"))
        kept.sort(key=lambda row, at=at: place(row[at]), reverse=term.startswith("-"))
    return kept if limit is None else kept[:limit]


def alike(one, other):
    return [tuple(map(repr, row)) for row in one] == [tuple(map(repr, row)) for row in other]


@settings(
    max_examples=some(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_ranges_and_orders_are_those_of_plain_rows(sorted_store, data):
    read, frame = sorted_store
    names = frame.columns
    between = data.draw(
        st.dictionaries(st.sampled_from(names), st.just(None), max_size=2).flatmap(
            lambda columns: st.fixed_dictionaries(
                {n: st.tuples(SORTED_KINDS[n][1], SORTED_KINDS[n][1]) for n in columns}
            )
        )
    )
    order = data.draw(
        st.lists(st.sampled_from(names), max_size=3, unique=True).flatmap(
            lambda ns: st.tuples(*(st.sampled_from([n, f"-{n}"]) for n in ns))
        )
    )
    limit = data.draw(st.none() | st.integers(0, 30))
    found = read.select("v", Query(between=between, order=order, limit=limit))
    assert alike(found.rows.rows(), chosen(frame.rows(), names, between, order, limit))
    assert (found.newest_change, found.batch_id, found.position) == (frame.height, 0, {"t": [3]})


def test_decimals_are_ordered_as_numbers(store):
    types = {"k": pl.Decimal(12, 2), "v": pl.Decimal(12, 2)}
    numbers = [Decimal(text) for text in ("-30.00", "-3.25", "0.00", "9.50", "10.00", "100.00")]
    job = store.job(store.view("v", types, "k"))
    job.commit(v=pl.DataFrame({"k": numbers, "v": numbers[::-1]}, schema=types))
    read = store.reader()
    assert read.scan("v")["k"].to_list() == numbers
    assert read.select("v", Query(order=["v"])).rows["v"].to_list() == numbers
    assert read.select("v", Query(order=["-k"])).rows["k"].to_list() == numbers[::-1]
    found = read.select("v", Query(between={"v": (Decimal(-5), Decimal("9.75"))}, order=["v"]))
    assert found.rows["v"].to_list() == numbers[1:4]


@pytest.fixture(params=["sqlite", "postgresql"], scope="module")
def sorted_store(request, tmp_path_factory):
    """A store with rows of every kind that has an order, some of them in the key."""
    url = None
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_server").url("sorted")
    opened = Store(tmp_path_factory.mktemp("sorted"), url)
    types = {name: dtype for name, (dtype, _) in SORTED_KINDS.items()}
    values = {
        "k": [None, 0, 1, 2],
        "b": [None, b"", b"a", b"b"],
        "at": [None, *(dt.datetime(2026, 1, 1, 0, n, tzinfo=dt.UTC) for n in range(2))],
        "amount": [None, *map(Decimal, ["9.50", "10.00", "-3.25", "-30.00", "0.00"])],
        "rate": [0.5, math.nan, None, 10.0, -1.0, math.inf, 0.5],
        "name": ["", None, "a", "Z", "é"],
    }
    keys = list(itertools.product(*(values[name] for name in ("k", "b", "at", "amount"))))[::5]
    rows = [(*key, values["rate"][n % 7], values["name"][n % 5]) for n, key in enumerate(keys)]
    frame = pl.DataFrame(rows, schema=types, orient="row")
    job = opened.job(opened.view("v", types, ("k", "b", "at", "amount")))
    job.commit(v=frame, position={"t": [3]})
    yield opened.reader(), frame
    opened.close()


def test_a_query_that_makes_no_sense_is_refused(store):
    job = store.job(store.view("v", {"k": pl.Int64, "l": pl.List(pl.Int64)}, "k"))
    job.commit(v=pl.DataFrame({"k": [1], "l": [[2]]}))
    read = store.reader()
    for query in (Query(order=["-m"]), Query(between={"m": (1, None)}), Query(where={"m": 1})):
        with pytest.raises(ConfigError, match=r"no column '-?m'.*k, l"):
            read.select("v", query)
    with pytest.raises(ConfigError, match="have no order"):
        read.select("v", Query(order=["l"]))
    with pytest.raises(ConfigError, match="'k'"):
        read.select("v", Query(between={"k": ("a", None)}))


def test_changes_can_be_read_a_few_at_a_time(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    for n in range(4):
        job.commit(counts=counts(a=n, b=n, c=n))
    read, since, seen = store.reader(), 0, []
    while (part := read.changes("counts", since=since, limit=5)).height:
        assert part.height <= 5
        since = part["_seq"][-1]
        seen += part.rows()
    assert seen == read.changes("counts").rows()


def test_the_version_of_a_store_is_another_after_every_commit_and_run(store):
    job = store.job(store.view("counts", COUNTS, "word"))
    read = store.reader()
    versions = [read.version()]
    job.commit(counts=counts(a=1))
    versions.append(read.version())
    assert read.version() == versions[-1]
    job.commit(position={"t": {"0": 9}})
    versions.append(read.version())
    store.job(store.view("counts", COUNTS, "word"))
    versions.append(read.version())
    assert len(set(versions)) == len(versions)
