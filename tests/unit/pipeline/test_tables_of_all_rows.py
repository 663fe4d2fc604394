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
    for seed in range(10):
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
    with pytest.raises(ConfigError, match='has keep="all" and key= or deleted='):
        one.table("k", keep="all", unbounded=True)
    with pytest.raises(ConfigError, match="table's keep is 'newest'"):
        one.table("k", keep="newest")
