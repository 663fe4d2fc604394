"""A frequent key is named where it holds other rows up, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

import millstream as ms
from millstream.kernels import routing
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit.committer import collect_results
from millstream.views.runs import skew
from millstream.views.runs.skew import SkewWatch

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    user: str | None
    at: datetime


def said(tmp_path, window, *, share, seed, by="user"):
    """Return what is said of 900 events in three batches, of which one user has a share."""
    app = ms.App("skewed", log="unused", buckets=4)
    events = app.topic("events", Event, key="user", partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("1 second", idle=None))
    stream.window(window, by=by).agg(n=ms.count()).to("out")
    dice = random.Random(seed)
    rows = [
        Event(
            None if dice.random() < share else f"u{number}", START + timedelta(seconds=number / 100)
        )
        for number in range(900)
    ]
    engine = KernelEngine(app.plan(), tmp_path / "views.db", {"events": 2}, random.Random(seed))
    notices = []
    watch = SkewWatch(notices.append)
    for given in engine._batches({"events": items_of(app.topics["events"], rows, 2, 0)}, 3):
        result = collect_results(app.plan(), given)
        watch.observe(result.hot_keys, result.sent)
    return notices


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(routing, "_HOT_ROWS_MIN", 10)
    monkeypatch.setattr(skew, "_ROWS_MIN", 100)


@pytest.mark.parametrize("seed", range(5))
def test_a_key_with_most_rows_of_a_step_that_needs_all_events_is_named_once(tmp_path, seed):
    (notice,) = said(tmp_path, ms.session("1 second"), share=0.8, seed=seed)
    assert "have one key, user=None." in notice
    assert "aggregate in two steps" in notice
    assert 70 <= int(notice.split("%")[0]) <= 90


@pytest.mark.parametrize("seed", range(5))
def test_where_rows_are_aggregated_before_the_shuffle_no_key_is_frequent(tmp_path, seed):
    assert not said(tmp_path, ms.tumbling("1 minute"), share=0.8, seed=seed)


def test_an_even_distribution_and_a_step_without_a_key_are_not_named(tmp_path):
    assert not said(tmp_path, ms.session("1 second"), share=0.3, seed=1)
    assert not said(tmp_path, ms.session("1 second"), share=0.8, seed=1, by=None)


def test_few_rows_are_not_worth_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(skew, "_ROWS_MIN", 1000)
    assert not said(tmp_path, ms.session("1 second"), share=0.8, seed=1)
