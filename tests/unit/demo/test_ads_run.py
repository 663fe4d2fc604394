"""The comparison at the end of the demo, and a feed that fails."""

from __future__ import annotations

import io
import threading

import polars as pl
import pytest
from rich.console import Console

from millstream.demo import oracle
from millstream.demo.ads_pipeline import APP, RATES_BY_HOUR, TOTALS_BY_DAY
from millstream.demo.ads_run import _feeding, compare
from millstream.errors import JobFailedError
from millstream.views.reading import store_path
from millstream.views.store import Fence, ViewChange, ViewSchema, ViewStore

SEED = 1


def _store(folder, by_hour: pl.DataFrame) -> None:
    tables = {
        RATES_BY_HOUR: (by_hour, ("window_start", "campaign")),
        TOTALS_BY_DAY: (oracle.totals_by_day(SEED), ("window_start", "campaign", "policy")),
    }
    with ViewStore(store_path(folder, APP)) as store:
        for name, (table, key) in tables.items():
            store.declare(ViewSchema.of(name, table, key))
        run, batch_id = store.begin_run(APP, "main", "c")
        changes = [ViewChange(name, table) for name, (table, _) in tables.items()]
        store.commit(Fence(APP, "main", run, batch_id), changes, position={}, status={})


def test_equal_views_are_reported_with_their_number_of_rows(tmp_path):
    expected = oracle.rates_by_hour(SEED)
    _store(tmp_path, expected)
    console = Console(file=io.StringIO(), width=200)
    assert compare(tmp_path, SEED, console) is True
    assert console.file.getvalue().splitlines() == [
        f"ctr_by_hour: equal: {expected.height} rows",
        "totals_by_day: equal: 42 rows",
    ]


def test_a_view_that_differs_is_shown_row_by_row(tmp_path):
    _store(tmp_path, oracle.rates_by_hour(SEED).tail(-2))
    console = Console(file=io.StringIO(), width=200)
    assert compare(tmp_path, SEED, console) is False
    said = console.file.getvalue()
    assert "ctr_by_hour: 2 of 504 rows differ" in said
    assert "totals_by_day: equal: 42 rows" in said


def test_a_feed_that_fails_ends_the_run_with_its_last_words(tmp_path):
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")

    def run_until_interrupted() -> None:
        with _feeding(not_a_folder, SEED, 1.0):
            threading.Event().wait(60)

    with pytest.raises(JobFailedError, match=r"ended with code 1: .*is not a folder"):
        run_until_interrupted()
