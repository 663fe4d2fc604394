"""Tables of every event of a stream: joined and kept for ever, if that is said."""

from __future__ import annotations

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

EVENTS = [{"k": n % 3, "v": n} for n in range(12)]


def streams():
    app = ms.App("all", log="unused")
    one = app.topic("one", {"k": int, "v": int}, partitions=3).stream()
    other = app.topic("other", {"k": int, "v": int}, partitions=3).stream()
    return app, one, other


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_every_pair_of_events_is_in_the_join(partitions: int) -> None:
    app, one, other = streams()
    tables = [stream.table(keep="all", unbounded=True) for stream in (one, other)]
    assert tables[0].primary_key is None
    pairs = tables[0].join(tables[1], "k", where=pl.col("v") < pl.col("v_right"))
    pairs.to("pairs")
    right = sorted(
        (a["k"], a["v"], b["v"])
        for a in EVENTS
        for b in EVENTS
        if a["k"] == b["k"] and a["v"] < b["v"]
    )
    for seed in range(5):
        found = testing.run(
            app,
            {"one": EVENTS, "other": EVENTS},
            batches=5,
            partitions=partitions,
            seed=seed,
            crash=2,
        ).topic("pairs")
        assert sorted(found.select("k", "v", "v_right").rows()) == right
        assert set(found["_diff"]) == {1}


def test_it_has_no_key_so_a_view_of_it_is_refused() -> None:
    _, one, _ = streams()
    with pytest.raises(ConfigError, match="keeps one row for each key"):
        one.table(keep="all", unbounded=True).view("rows", key="k")


def test_what_would_grow_without_end_has_to_be_meant() -> None:
    _, one, _ = streams()
    with pytest.raises(ConfigError, match="keeps every event of the stream, without end"):
        one.table(keep="all")
    with pytest.raises(ConfigError, match='has keep="all" and key=, deleted= or ttl='):
        one.table("k", keep="all", unbounded=True)
    with pytest.raises(ConfigError, match="table's keep is 'newest'"):
        one.table("k", keep="newest")


def test_only_what_can_be_taken_back_is_planned_for() -> None:
    _, one, other = streams()
    all_rows = [stream.table(keep="all", unbounded=True) for stream in (one, other)]
    latest = one.table("k")
    inner = all_rows[0].filter(pl.col("v") > 0).join(all_rows[1], "k")
    assert inner.shape.append_only
    assert not inner.shape.has_retractions
    for made in (
        all_rows[0].join(all_rows[1], "k", how="left"),
        all_rows[0].join(all_rows[1], "k", how="anti"),
        latest.join(all_rows[1], "k"),
        all_rows[0].join(latest, "k"),
        inner.group_by("k").agg(n=ms.count()),
        inner.top(1, by="v", per="k"),
        inner.distinct(),
    ):
        assert made.shape.has_retractions


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_the_best_pair_of_each_key_is_found_without_keeping_all_of_them(partitions: int) -> None:
    app, one, other = streams()
    tables = [stream.table(keep="all", unbounded=True) for stream in (one, other)]
    pairs = tables[0].join(tables[1], "k", where=pl.col("v") < pl.col("v_right"))
    pairs.top(1, by=[("v_right", "desc"), ("v", "asc")], per="k", rank="place").view("best")
    pairs.group_by("k").agg(n=ms.count(), most=ms.max("v")).group_by("n").agg(
        keys=ms.count(), most=ms.sum("most")
    ).view("sums")
    every = [(a, b) for a in EVENTS for b in EVENTS if a["k"] == b["k"] and a["v"] < b["v"]]
    best = {(k, min(a["v"] for a, b in every if a["k"] == k), 9 + k) for k in range(3)}
    for seed in range(5):
        result = testing.run(
            app,
            {"one": EVENTS, "other": EVENTS},
            batches=6,
            partitions=partitions,
            seed=seed,
            crash=2,
        )
        assert set(result["best"].select("k", "v", "v_right").rows()) == best
        assert result["sums"].select("n", "keys", "most").rows() == [(6, 3, 6 + 7 + 8)]
