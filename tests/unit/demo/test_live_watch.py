"""What the demo's live part sees of its pipeline, and what it tells at the end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from millstream.demo.ads_events import PARTITIONS, TOPIC
from millstream.demo.ads_pipeline import APP
from millstream.demo.ads_run import DemoComparison
from millstream.demo.live_events import START_US, LiveInput
from millstream.demo.live_story import LiveStory
from millstream.demo.live_watch import LiveWatch
from millstream.views.reader import state_store_path
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence, ViewChange, ViewSchema

START = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=START_US)
EQUAL = DemoComparison(outputs=8, rows=1_234, too_many=0, missing=0)


def alarms(*minutes):
    return pl.DataFrame(
        {
            "window_start": [START + timedelta(minutes=minute) for minute in minutes],
            "client": ["cinema" for _ in minutes],
            "shown": [50 for _ in minutes],
            "clicked": [20 for _ in minutes],
        },
        schema={
            "window_start": pl.Datetime("us", "UTC"),
            "client": pl.String,
            "shown": pl.Int64,
            "clicked": pl.Int64,
        },
    )


class Pipeline:
    """Commits what a test says, as the pipeline's process does."""

    def __init__(self, folder) -> None:
        self._store = SqliteStateStore(state_store_path(folder, APP))
        self._store.declare(ViewSchema.of("click_alarms", alarms(), ("window_start", "client")))
        self._run, self._next = self._store.begin_run(APP, "main", "c")

    def commit(self, *position, found=None):
        changes = [] if found is None else [ViewChange("click_alarms", found)]
        self._store.commit(
            Fence(APP, "main", self._run, self._next),
            changes,
            position={TOPIC: {str(number): end for number, end in enumerate(position)}},
            status={},
        )
        self._next += 1


@pytest.fixture
def watched(tmp_path):
    (tmp_path / "apps" / APP).mkdir(parents=True)
    now = [0.0]
    watch = LiveWatch(tmp_path, LiveInput(minutes=60), clock=lambda: now[0])
    pipeline = Pipeline(tmp_path)
    yield watch, pipeline, now
    watch.close()


def appended(*counts, minute=0):
    partitions = [number for number, count in enumerate(counts) for _ in range(count)]
    at_us = START_US + minute * 60_000_000 + 1
    return pl.DataFrame({"partition": partitions, "arrival_us": [at_us] * len(partitions)})


def test_an_append_is_fresh_when_every_partition_has_been_read_to_its_end(watched):
    watch, pipeline, now = watched
    watch.begin()
    watch.note_append(appended(2, 1, 0, 0))
    now[0] = 1.0
    watch.note_append(appended(0, 0, 0, 1))
    pipeline.commit(2, 0, 0, 1)
    assert list(watch.look()) == []
    assert watch.has_committed
    assert not watch.is_caught_up
    now[0] = 4.0
    pipeline.commit(2, 1, 0, 1)
    assert list(watch.look()) == []
    assert watch.is_caught_up
    story = watch.story(10.0, EQUAL, interrupted=False)
    assert sorted(story.ages) == [(3.0, 1), (4.0, 3)]
    assert (story.records, story.batches) == (4, 2)


def test_what_was_appended_before_the_first_commit_counts_for_no_freshness(watched):
    watch, pipeline, _ = watched
    watch.note_append(appended(1, 0, 0, 0))
    pipeline.commit(1, 0, 0, 0)
    list(watch.look())
    watch.begin()
    assert watch.story(1.0, EQUAL, interrupted=False).ages == ()


def test_a_bot_and_its_first_alarm_are_told_once(watched):
    watch, pipeline, now = watched
    watch.begin()
    watch.note_append(appended(1, 0, 0, 0, minute=17))
    pipeline.commit(1, 0, 0, 0)
    assert list(watch.look()) == []
    now[0] = 5.0
    watch.note_append(appended(1, 0, 0, 0, minute=18))
    assert list(watch.look()) == ["a bot begins to click the ads of cinema"]
    now[0] = 5.5
    pipeline.commit(2, 0, 0, 0, found=alarms(18))
    (told,) = watch.look()
    assert told == (
        "alarm: cinema, 20 clicks on 50 impressions in the minute of 06:18; the bot came 0.5 s ago"
    )
    pipeline.commit(2, 0, 0, 0, found=alarms(18, 19))
    watch.note_append(appended(1, 0, 0, 0, minute=19))
    pipeline.commit(3, 0, 0, 0)
    assert list(watch.look()) == []
    story = watch.story(10.0, EQUAL, interrupted=False)
    assert (story.alarms, story.caught_s) == (2, (0.5,))


def test_the_last_heartbeats_bring_no_bots(watched):
    watch, pipeline, _ = watched
    watch.note_append(appended(1, 1, 1, 1, minute=60))
    pipeline.commit(1, 1, 1, 1)
    assert list(watch.look()) == []
    assert watch.is_caught_up


def test_a_kill_is_made_up_for_when_all_that_had_arrived_is_in_the_views(watched):
    watch, pipeline, now = watched
    watch.begin()
    watch.note_append(appended(3, 0, 0, 0))
    pipeline.commit(1, 0, 0, 0)
    list(watch.look())
    now[0] = 10.0
    watch.note_kill()
    assert list(watch.look()) == []
    watch.note_append(appended(5, 0, 0, 0))  # it goes on arriving
    pipeline.commit(2, 0, 0, 0)
    assert list(watch.look()) == []
    assert watch.is_recovering
    now[0] = 12.5
    pipeline.commit(4, 0, 0, 0)
    assert list(watch.look()) == [
        "it goes on: what had arrived until the kill is in the views, 2.5 s after it"
    ]
    assert not watch.is_recovering
    assert watch.story(20.0, EQUAL, interrupted=False).recovered_s == (2.5,)


def test_the_story_has_the_figures_of_the_run():
    story = LiveStory(
        seconds=61.0,
        event_time=timedelta(hours=1.25),
        records=20_000,
        left_out={"late": 40, "duplicate": 612, "dead": 6},
        batches=142,
        ages=[(0.2, 10), (0.4, 89), (9.0, 1)],
        recovered_s=[8.25],
        alarms=8,
        caught_s=[0.61],
        comparison=EQUAL,
    )
    assert (story.freshness_s(0.05), story.freshness_s(0.5), story.freshness_s(1.0)) == (
        0.2,
        0.4,
        9.0,
    )
    assert str(story).splitlines() == [
        "The live part in figures:",
        "  events     20,000 records in 61 s, 1.2 hours of event time",
        "  left out   40 late, 612 duplicate, 6 dead",
        "  batches    142",
        "  kills      1; all was in the views again after 8.2 s",
        "  bots       caught after 0.6 s; 8 alarms",
        "  freshness  p50 0.40 s, p99 0.40 s",
        "  results    1,234 rows of 8 views and topics: 0 too many, 0 missing",
    ]


def test_partitions_are_those_of_the_demo():
    assert PARTITIONS == 4  # as these tests count
