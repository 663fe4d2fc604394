"""The comparison at the end of the demo, and its page."""

from __future__ import annotations

import io
import json
from urllib.request import urlopen

import polars as pl
import pytest
from rich.console import Console

import millstream as ms
from millstream.demo import ads_expected
from millstream.demo.ads_events import PARTITIONS, TOPIC
from millstream.demo.ads_input import AdsInput
from millstream.demo.ads_pipeline import APP
from millstream.demo.ads_run import compare, serve_page
from millstream.views.reader import state_store_path
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence, ViewChange, ViewSchema

GIVEN = AdsInput("generated", seed=1, rate=20, minutes=1)
KEYS = {
    "ad_ctr": ("window_start", "ad"),
    "spend_by_day": ("client", "budget_day"),
    "stopped_ads": ("ad",),
    "late_events": ("event_id",),
}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def expected(tmp_path):
    """A log with events, and what views and topics must hold; the topics do."""
    travel = GIVEN.disorder()
    records = travel.records(travel.order)
    with ms.connect(tmp_path) as log:
        log.create_topic(TOPIC, partitions=PARTITIONS)
        with log.producer() as producer:
            producer.send_many(
                TOPIC, keys=records["key"].to_arrow(), values=records["value"].to_arrow()
            ).result()
            found = ads_expected.expected_results(log, GIVEN.clients, GIVEN.stop_rule)
            for topic, rows in found.topics.items():
                log.create_topic(topic, partitions=2)
                for row in rows.to_dicts():
                    producer.send(topic, json.loads(json.dumps(row, default=_stamp)))
    return found


def _stamp(at):
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def store(folder, views):
    with SqliteStateStore(state_store_path(folder, APP)) as kept:
        for name, rows in views.items():
            kept.declare(ViewSchema.of(name, rows, KEYS[name]))
        run, batch_id = kept.begin_run(APP, "main", "c")
        changes = [ViewChange(name, rows) for name, rows in views.items()]
        kept.commit(Fence(APP, "main", run, batch_id), changes, position={}, status={})


def test_what_is_equal_is_told_with_its_number_of_rows(tmp_path, expected, console):
    store(tmp_path, expected.views)
    assert compare(tmp_path, GIVEN, console) is True
    said = console.file.getvalue().splitlines()
    assert said[1:] == [
        *(f"  view {name}: equal: {rows.height:,} rows" for name, rows in expected.views.items()),
        *(f"  topic {name}: equal: {rows.height:,} rows" for name, rows in expected.topics.items()),
    ]


def test_what_differs_is_shown_row_by_row(tmp_path, expected, console):
    rates = expected.views["ad_ctr"]
    wrong = rates.tail(-2).with_columns(
        clicked=pl.when(pl.row_index() == 0).then(9).otherwise("clicked")
    )
    store(tmp_path, {**expected.views, "ad_ctr": wrong})
    assert compare(tmp_path, GIVEN, console) is False
    said = console.file.getvalue()
    assert f"view ad_ctr: 4 rows differ from {rates.height:,} expected" in said
    assert said.count(" expected ") == 3
    assert "view spend_by_day: equal" in said


def test_the_page_takes_another_port_if_its_own_is_taken(tmp_path, console):
    with serve_page(tmp_path, "127.0.0.1:0", console) as first:
        taken = first.removeprefix("http://").rstrip("/")
        with serve_page(tmp_path, taken, console) as second:
            assert second != first
            with urlopen(f"{second}apps") as answer:
                assert answer.status == 200
    assert console.file.getvalue().splitlines() == [f"The page: {first}", f"The page: {second}"]


def test_without_a_page_nothing_is_served(tmp_path, console):
    with serve_page(tmp_path, "none", console) as url:
        assert url == ""
    assert console.file.getvalue() == ""
