"""The events of the demo's live part, and the rule by which its alarms are raised."""

from __future__ import annotations

import random

import polars as pl

import millstream as ms
from millstream import testing
from millstream.demo.ads_events import MINUTE_US, PARTITIONS, TOPIC
from millstream.demo.ads_expected import difference, expected_results
from millstream.demo.feed import feed
from millstream.demo.live_events import CLIENTS, START_US, LiveInput, live_events
from millstream.demo.live_pipeline import CLICK_ALARMS, build


def test_bots_click_as_no_reader_does_and_only_while_they_are_there():
    given = LiveInput(seed=1, minutes=300)
    once = live_events(given).with_columns(minute=(pl.col("at_us") - START_US) // MINUTE_US)
    assert once["event_id"].n_unique() == once.height
    counts = once.group_by("client", "minute").agg(
        shown=(pl.col("kind") == "impression").sum(), clicked=(pl.col("kind") == "click").sum()
    )
    visited = pl.concat(
        pl.DataFrame(
            {
                "client": visit.client,
                "minute": range(
                    (visit.start_us - START_US) // MINUTE_US, (visit.end_us - START_US) // MINUTE_US
                ),
            }
        )
        for visit in given.bots
    )
    assert {visit.client for visit in given.bots} == {"cinema", "bank", "shoes", "games"}
    by_bots = counts.join(visited, on=["client", "minute"], how="semi")
    assert by_bots.height == visited.height
    # A click comes up to 40 seconds after its impression, so the first minute has fewer.
    assert by_bots.select((pl.col("clicked") * 4 > pl.col("shown")).all()).item()
    after = visited.with_columns(pl.col("minute") + 1)  # clicks on what was shown just before
    readers = counts.join(pl.concat([visited, after]), on=["client", "minute"], how="anti")
    assert (
        readers.filter(pl.col("clicked") >= 10, pl.col("clicked") * 4 > pl.col("shown")).height == 0
    )


def test_traffic_rises_towards_noon_and_every_client_has_some():
    once = live_events(LiveInput(seed=5, minutes=480)).filter(pl.col("kind") == "impression")
    hours = once.group_by(hour=(pl.col("at_us") - START_US) // (60 * MINUTE_US)).len().sort("hour")
    assert hours["len"].to_list() == sorted(hours["len"])
    assert set(once["client"]) == set(CLIENTS)


class Clock:
    """Time that passes only when somebody waits; the feed is stopped after so many waits."""

    def __init__(self, pauses: int) -> None:
        self.now, self.left = 0.0, pauses

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.left -= 1


def logged_part(folder, given: LiveInput, pauses: int):
    """Write a beginning of the events, as a feed that is stopped does; return what must come of it."""
    travel, clock = given.disorder(), Clock(pauses)
    appended = []
    with ms.connect(folder) as log:
        written = feed(
            log,
            travel,
            speed=60.0,
            clock=lambda: clock.now,
            pause=clock.pause,
            stopped=lambda: clock.left <= 0,
            on_append=lambda rows: appended.append(rows.height),
            closes=True,
        )
        assert written == sum(appended) == sum(log.end_offsets(TOPIC)) < travel.order.height
        found = expected_results(log, given.clients, given.stop_rule, live=True)
        rows = [
            testing.Row(value, partition=number)
            for number in range(PARTITIONS)
            for value in pl.DataFrame(log.read(TOPIC, number))["value"]
        ]
    return found, rows


def test_what_has_arrived_when_the_feed_is_stopped_gives_the_independent_answers(tmp_path):
    seed = 2
    pauses = random.Random(seed).randrange(200, 235)
    expected, rows = logged_part(tmp_path, LiveInput(seed, minutes=24), pauses)
    run = testing.run(build(tmp_path), {TOPIC: rows}, batches=4, seed=seed)
    for name, wanted in expected.views.items():
        assert difference(run[name], wanted).is_empty(), name
    assert expected.views[CLICK_ALARMS].height > 0
    assert set(expected.views[CLICK_ALARMS]["client"]) == {"cinema"}
