"""Each query of Nexmark gives, batch by batch, what SQL gives over all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import pytest
from _nexmark_answers import COLUMNS, in_form
from _nexmark_events import MADE_BY, START_MS
from _nexmark_expected import difference
from _nexmark_queries import Queries

import millstream as ms
from millstream import testing

EVENTS = 200_000  # 20 s; a window that is compared ends 7 s before that
SAMPLE = 50  # one person, auction and bid in so many is kept; q5, q7, q8 and q11 need whole windows
KEYS = {"q5": ("window_end", "auction"), "q7": "window_start"}


@dataclass(frozen=True)
class Made:
    """The input: all kinds of events, and until when windows are closed."""

    kinds: dict[str, pl.DataFrame]

    @property
    def closed_ms(self) -> int:
        return START_MS + EVENTS // 10 - 7_000

    def rows(self, kind: str) -> pl.LazyFrame:
        return self.kinds[kind].lazy()


@pytest.fixture(scope="module")
def made() -> Made:
    """Make 15 s of events, thinned out: persons and auctions by number, so that bids find them."""
    every = {kind: make(EVENTS, 0) for kind, make in MADE_BY.items()}
    auctions = every["auctions"].filter(pl.col("id") % SAMPLE < 4)
    sellers = auctions["seller"].unique()
    persons = every["persons"].filter(
        pl.col("id").is_in(sellers.implode()) | (pl.col("id") % SAMPLE == 0)
    )
    bids = every["bids"].filter(pl.int_range(pl.len()) % SAMPLE == 0)
    return Made({"bids": bids, "auctions": auctions, "persons": persons})


@pytest.mark.parametrize("query", list(COLUMNS))
def test_a_query_gives_the_answer_of_the_batch(query: str, made: Made) -> None:
    app = ms.App("nexmark", log="unused")
    rows = getattr(Queries(app), query)()
    keyless = rows.shape.is_table and rows.primary_key is None
    if keyless or (not rows.shape.is_table and rows.shape.mode is None):
        rows.to("out")
    else:
        rows.view("out", key=KEYS.get(query))
    inputs = {kind: made.kinds[kind].to_dicts() for kind in MADE_BY if kind in app.topics}
    result = testing.run(app, inputs, batches=7, partitions=4, seed=1, crash=2)
    found = result.topic("out") if "out" not in result.views else result["out"]
    assert found.height
    texts = [n for n, t in rows.columns.items() if t.is_temporal() and found[n].dtype == pl.String]
    found = found.with_columns(pl.col(texts).str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ"))
    assert difference(query, in_form(query, found), made) is None
