"""A view that is copied into a topic: what the topic has of each key is what the view has, through crashes."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.client import connect
from millstream.errors import ConfigError, FencedError
from millstream.testing import Row
from millstream.views import followed_view
from millstream.views.followed_view import FollowedView, Followers
from millstream.views.reader import state_store_path, view
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.state_store.sqlite_store import SqliteStateStore

SCHEMA = ViewSchema("prices", (("k", "int"), ("sub", "str"), ("n", "int")), ("k", "sub"))


class Writer:
    """Writes the view, as the app does whose view it is. ``rows`` is what the view then has."""

    def __init__(self, folder, schema=SCHEMA):
        self.path, self.schema = state_store_path(folder, "shop"), schema
        self.changes_kept = 1000
        self.begin("first")

    def begin(self, checkpoint):
        """Begin a run; the first one with a checkpoint begins with an empty view."""
        self.path.unlink(missing_ok=True)
        self.rows = {}
        with SqliteStateStore(self.path) as store:
            store.declare(self.schema)
            self.run, self.batch = store.begin_run("shop", "main", checkpoint)

    def commit(self, upserts, deletes=()):
        """Commit one batch: rows by key, and keys that are deleted first."""
        for key in deletes:
            self.rows.pop(key, None)
        self.rows |= upserts
        frame = pl.DataFrame(
            [(*key, n) for key, n in upserts.items()],
            schema={"k": pl.Int64, "sub": pl.String, "n": pl.Int64},
            orient="row",
        )
        gone = pl.DataFrame(list(deletes), schema={"k": pl.Int64, "sub": pl.String}, orient="row")
        self.write(frame, gone if gone.height else None)

    def write(self, frame, gone=None):
        with SqliteStateStore(self.path, changes_kept=self.changes_kept) as store:
            fence = Fence("shop", "main", self.run, self.batch)
            changes = [ViewChange(self.schema.name, frame, gone)]
            store.commit(fence, changes, position={"t": [self.batch]}, status={})
        self.batch += 1


def followed(folder, app="mirror"):
    opened = view("prices", log=folder, app="shop")
    return FollowedView(app, f"{app}.view", opened, opened.schema)


def in_topic(log, topic="mirror.view"):
    """Return the rows of a topic by its key columns, as a reader of a compacted topic has them."""
    records = log.read(topic, 0)
    rows = {}
    for key, value in zip(
        records.column("key").to_pylist(), records.column("value").to_pylist(), strict=True
    ):
        rows.pop(key, None)
        if value is not None:
            rows[key] = json.loads(value)
    assert all(json.loads(key) == {"k": r["k"], "sub": r["sub"]} for key, r in rows.items())
    return {(row["k"], row["sub"]): row["n"] for row in rows.values()}


def changed(dice, writer):
    keys = [(k, sub) for k in range(4) for sub in ("a", None, "é")]
    upserts = {key: dice.randint(0, 9) for key in dice.sample(keys, dice.randint(0, 5))}
    deletes = dice.sample(keys, dice.randint(0, 3))
    writer.commit(upserts, deletes)


class KilledHereError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("seed", range(12))
def test_through_crashes_gaps_and_new_views_the_topic_has_what_the_view_has(
    tmp_path, monkeypatch, seed
):
    dice = random.Random(seed)
    monkeypatch.setattr(followed_view, "SLICE_ROWS", dice.choice([1, 2, 100]))
    writer = Writer(tmp_path)
    writer.changes_kept = 12
    commit = FollowedView._commit
    left = [0]

    def killed(self, *args):
        """Be killed before a transaction, or after it."""
        left[0] -= 1
        if left[0] == 0 and dice.random() < 0.5:
            raise KilledHereError
        done = commit(self, *args)
        if left[0] == 0:
            raise KilledHereError
        return done

    monkeypatch.setattr(FollowedView, "_commit", killed)
    with connect(tmp_path) as log:
        for number in range(12):
            if dice.random() < 0.15:
                writer.begin(f"checkpoint {number}")
            for _ in range(dice.randint(1, 3)):
                changed(dice, writer)
            left[0] = dice.choice([0, 0, 1, 2, 3])
            try:
                followed(tmp_path).copy(log)
            except KilledHereError:
                left[0] = 0
                if dice.random() < 0.5:
                    changed(dice, writer)
                followed(tmp_path).copy(log)
            assert in_topic(log) == writer.rows, f"seed {seed}, step {number}"


def test_each_change_is_written_once_and_the_changes_of_a_batch_together(tmp_path):
    writer = Writer(tmp_path)
    writer.commit({(1, "a"): 1, (2, "a"): 2})
    with connect(tmp_path) as log:
        copying = followed(tmp_path)
        assert copying.copy(log) == 2
        assert copying.copy(log) == 0
        writer.commit({(1, "a"): 5}, [(2, "a")])
        assert copying.copy(log) == 2
        assert copying.copy(log) == 0
        values = log.read("mirror.view", 0).column("value").to_pylist()
    assert [value and json.loads(value)["n"] for value in values] == [1, 2, None, 5]


def test_two_processes_of_an_app_write_no_change_twice(tmp_path):
    writer = Writer(tmp_path)
    writer.commit({(1, "a"): 1})
    with connect(tmp_path) as log:
        one, other = followed(tmp_path), followed(tmp_path)
        for n in range(5):
            writer.commit({(1, "a"): 10 + n})
            assert {one.copy(log), other.copy(log)} == {0, 1}
        assert log.read("mirror.view", 0).num_rows == 5


def test_a_topic_that_was_deleted_is_filled_again(tmp_path):
    writer = Writer(tmp_path)
    writer.commit({(1, "a"): 1})
    with connect(tmp_path) as log:
        copying = followed(tmp_path)
        copying.copy(log)
        log.delete_topic("mirror.view")
        copying.copy(log)
        assert in_topic(log) == {(1, "a"): 1}


def test_a_view_with_other_columns_is_refused(tmp_path):
    Writer(tmp_path).commit({(1, "a"): 1})
    copying = followed(tmp_path)
    other = ViewSchema("prices", (("k", "int"), ("sub", "str"), ("n", "str")), ("k", "sub"))
    Writer(tmp_path, other)
    with connect(tmp_path) as log, pytest.raises(ConfigError, match="no longer as it was"):
        FollowedView(
            "mirror", "mirror.view", view("prices", log=tmp_path, app="shop"), copying.schema
        ).copy(log)


def test_followers_copy_while_a_job_runs_and_stop_it_when_they_cannot(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    writer.commit({(1, "a"): 1})
    monkeypatch.setattr(followed_view, "POLL_S", 0.01)
    request = tmp_path / "stop-request"
    copies = []
    copy = FollowedView.copy

    def failing(self, log):
        copies.append(copy(self, log))
        if sum(copies) == 2:
            raise FencedError("another run")
        return copies[-1]

    monkeypatch.setattr(FollowedView, "copy", failing)
    following = Followers(tmp_path, (followed(tmp_path),), request)
    with pytest.raises(FencedError, match="another run"), following:
        assert copies == [1]
        writer.commit({(2, "a"): 1})
        while not request.exists():
            pass


# ── as a table ──────────────────────────────────────────────────────────────────────────────

NAN = float("nan")
EVERY_KIND = {
    "key": pl.Series([1, 2, 3]),
    "view_key": pl.Series([NAN, None, -0.0], dtype=pl.Float64),
    "f": pl.Series([float("inf"), 0.1 + 0.2, -1e-320]),
    "^p.*$": pl.Series(['a\n"é', None, ""]),
    "b": pl.Series([True, None, False]),
    "t": pl.Series([datetime(1, 1, 1, tzinfo=UTC), None, datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)]),
    "d": pl.Series([date(2026, 1, 31), None, date(1600, 2, 29)]),
    "i": pl.Series([timedelta(days=-3, microseconds=5), None, timedelta(days=400)], dtype=pl.Duration("us")),
    "m": pl.Series([Decimal("1.005"), None, Decimal("-99999999999999.999")], dtype=pl.Decimal(38, 3)),
    "y": pl.Series([b"\x00\xff", None, b""], dtype=pl.Binary),
    "l": pl.Series([[1, None], None, []], dtype=pl.List(pl.Int64)),
}  # fmt: skip


def test_a_table_of_a_view_has_its_rows_to_the_last_bit(tmp_path):
    frame = pl.DataFrame(EVERY_KIND)
    schema = ViewSchema.of("prices", frame, ("key", "view_key"))
    writer = Writer(tmp_path, schema)
    writer.write(frame)
    app = ms.App("mirror", log=tmp_path)
    table = app.view_table(view("prices", log=tmp_path, app="shop"))
    assert table.primary_key == ("key", "view_key")
    table.view("out")
    assert table.columns == dict(view("prices", log=tmp_path, app="shop").scan().schema)
    (copying,) = app.followed
    with connect(tmp_path) as log:
        copying.copy(log)
        gone = frame.filter(pl.col("key") == 2)
        writer.write(frame.clear(), gone.select("key", "view_key"))
        whole = view("prices", log=tmp_path, app="shop").scan()
        copying.copy(log)
        records = log.read(copying.topic, 0)
    rows = [
        Row(value, key=key)
        for key, value in zip(
            records.column("key").to_pylist(), records.column("value").to_pylist(), strict=True
        )
    ]
    for batches in (1, 4):
        out = testing.run(app, {copying.topic: rows}, batches=batches, crash=1)
        found = out["out"][whole.columns].sort("key")
        assert found.equals(whole.sort("key"), null_equal=True)
        assert str(found["view_key"].to_list()) == str(whole.sort("key")["view_key"].to_list())
        assert out.dead.is_empty()


def test_what_is_no_view_of_another_app_is_refused(tmp_path):
    Writer(tmp_path).commit({(1, "a"): 1})
    prices = view("prices", log=tmp_path, app="shop")
    with pytest.raises(ConfigError, match="of this app, which would read what it writes"):
        ms.App("shop", log=tmp_path).view_table(prices)
    app = ms.App("mirror", log=tmp_path)
    with pytest.raises(ConfigError, match="is given 'prices'"):
        app.view_table("prices")
    app.view_table(prices)
    with pytest.raises(ConfigError, match="is followed twice"):
        app.view_table(prices)
