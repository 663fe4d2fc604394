"""The partial matches of an app: in the kit, of an app's committed state, and by a command."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from edited_app import EditedApp

from millstream import testing
from millstream.errors import ConfigError, CorruptionError
from millstream.ops.partial_matches import partial_matches
from millstream.views.state_store.reader import StateStoreReader

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("carts", log=LOG, buckets=2)
clicks = app.topic("clicks", {"ad": str, "kind": str, "n": int, "at": datetime})
stream = clicks.stream(time="at", watermark=ms.watermark("5 seconds"))
unpaid = ms.sequence("cart", pl.col("kind") == "cart").not_followed_by("pay", pl.col("kind") == "pay").within("1 minute")
stream.match(unpaid, by="ad", name="unpaid").view("unpaid", key=["ad", "match_start"])
rising = ms.row_pattern("A B+", define={"B": ms.variable("B").prev()["n"] < pl.col("n")}, within="1 hour")
rises = stream.match_recognize(rising, partition_by=["ad", "n"], measures={"rows": ms.variable().count()}, name="rising")
rises.view("rising", key=["ad", "n", "match_start"])
"""


def click(second, kind="show", ad="a0", n=1):
    return {"ad": ad, "kind": kind, "n": n, "at": START + timedelta(seconds=second)}


CLICKS = [
    click(0, "cart"),
    click(10, "cart", "a1"),
    click(20, "pay"),
    click(30, "cart", "a0"),
    click(60, "show", "a2"),
]


@pytest.fixture
def edited(tmp_path):
    found = EditedApp(tmp_path, 1, 2, SOURCE)
    found.create()
    return found


def carts(found):
    return sorted((one.key["ad"], one.since) for one in found if one.step == "unpaid")


OPEN = [("a0", START + timedelta(seconds=30)), ("a1", START + timedelta(seconds=10))]


def test_the_kit_shows_them_in_any_batches_and_after_crashes(edited):
    app = edited.write()
    for batches, crash in ((1, 0), (4, 2)):
        out = testing.run(app, {"clicks": CLICKS}, batches=batches, partitions=1, crash=crash)
        assert carts(out.partial_matches("unpaid")) == OPEN
        (one,) = out.partial_matches("unpaid", ad="a1")
        assert one.ends == START + timedelta(seconds=70)
        assert [(row.variable, row.time) for row in one.rows] == [("cart", one.since)]
        assert {one.step for one in out.partial_matches()} == {"unpaid", "rising"}
        assert {one.key["ad"] for one in out.partial_matches("rising", n=1)} == {"a0", "a1"}


def test_those_of_an_app_are_read_from_what_it_has_committed(edited):
    app = edited.write()
    with pytest.raises(ConfigError, match="Run the pipeline that fills it"):
        partial_matches(app)
    edited.append(CLICKS[:2])
    edited.run(app)
    assert carts(partial_matches(app).found) == [("a0", START)]
    edited.append(CLICKS[2:])
    edited.run(app)
    found = partial_matches(app)
    assert carts(found.found) == OPEN
    assert not found.more
    few = partial_matches(app, "unpaid", limit=1)
    assert (len(few.found), few.more) == (1, True)
    with pytest.raises(ConfigError, match="limit is 0"):
        partial_matches(app, limit=0)
    assert carts(partial_matches(app, key={"ad": "a1"}, step="unpaid").found) == OPEN[1:]


def test_the_status_counts_the_rows_of_all_buckets(edited):
    app = edited.write()
    carts_of = [click(0, "cart", f"a{n}") for n in range(12)]
    out = testing.run(app, {"clicks": [*carts_of, click(30)]}, batches=2, partitions=1)
    assert len(out.partial_matches("unpaid")) == 12
    assert out._store.status("carts")["gauges"]["unpaid"]["partial_match_rows"] == 12


def test_one_that_ends_after_all_times_of_python_is_shown(edited):
    last = datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC)
    rows = [{**click(0, "cart"), "at": last}, {**click(0), "at": last + timedelta(seconds=20)}]
    out = testing.run(edited.write(), {"clicks": rows}, partitions=1)
    ends = {one.step: one.ends for one in out.partial_matches()}
    assert ends == dict.fromkeys(("unpaid", "rising"), datetime.max.replace(tzinfo=UTC))


def test_a_run_that_was_replaced_meanwhile_is_looked_for_again(edited, monkeypatch):
    app = edited.write()
    edited.append(CLICKS)
    edited.run(app)
    made, read = StateStoreReader.state_manifests, []

    def state_manifests(store, *args):
        found = made(store, *args)
        read.append(found)
        if len(read) > 2:
            return found
        # As if the job had removed what these name, before it was read.
        return {at: manifest.replace(b'"1-', b'"0-') for at, manifest in found.items()}

    monkeypatch.setattr(StateStoreReader, "state_manifests", state_manifests)
    assert carts(partial_matches(app, "unpaid").found) == OPEN
    assert len(read) == 3
    read[:] = []
    monkeypatch.setattr("millstream.ops.partial_matches._TRIES", 2)
    with pytest.raises(CorruptionError, match="the state needs"):
        partial_matches(app, "unpaid")


def test_the_command_says_them(edited, call):
    app = edited.write()
    edited.append(CLICKS)
    edited.run(app)
    said = call("why", "match", str(edited.file), "ad=a1", "--step", "unpaid")
    assert said.code == 0, said.err
    assert "After batch 2: 1 partial match." in said.out
    assert (
        "unpaid, ad='a1': since 2026-01-01 12:00:10Z, within ends at 2026-01-01 12:01:10Z."
        in said.out
    )
    assert "It waits for: the end of within, without 'pay'." in said.out
    assert "cart: 2026-01-01 12:00:10Z (+0 seconds), ad='a1'" in said.out
    given = json.loads(call("why", "match", str(edited.file), "--json").out)
    assert given["batch_id"] == 2
    assert {one["step"] for one in given["partial_matches"]} == {"unpaid", "rising"}
    nothing = call("why", "match", str(edited.file), "ad=zz")
    assert "there is no such partial match" in nothing.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "unpayd"], "It has 'unpaid', 'rising'. Did you mean 'unpaid'?"),
        (["--step", "unpaid", "user=x"], "'user' is no column of the key of 'unpaid': ad"),
        (["--step", "rising", "n=many"], "n='many' is no Int64"),
        (["ad"], "'ad' is not COLUMN=VALUE"),
        (["--limit", "0"], "0 is not in the range x>=1"),
    ],
)
def test_what_is_not_there_is_said(edited, call, arguments, message):
    app = edited.write()
    edited.append(CLICKS)
    edited.run(app)
    said = call("why", "match", str(edited.file), *arguments)
    assert said.code != 0
    assert message in said.err


def test_an_app_that_is_declared_otherwise_is_refused(edited):
    edited.append(CLICKS)
    edited.run(edited.write())
    other = edited.write(('within("1 minute")', 'within("2 minutes")'))
    with pytest.raises(ConfigError, match="not declared as it runs"):
        partial_matches(other)
