"""The demo's events, and the order in which they arrive."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime

import polars as pl
import pytest

from millstream.demo import ads_generated, ads_week
from millstream.demo.ads_disorder import CLOCKS_US, DEVICES_PER_CLOCK, heartbeat_key
from millstream.demo.ads_events import DAY_US, HOUR_US, MINUTE_US, PARTITIONS, WEEK_CLIENTS
from millstream.demo.ads_input import AdsInput
from millstream.errors import ConfigError
from millstream.log.murmur2 import partition_of

SEED = 1
GENERATED = AdsInput("generated", SEED, rate=200, minutes=4)
INPUTS = pytest.mark.parametrize("given", [AdsInput(seed=SEED), GENERATED], ids=lambda i: i.source)


def decoded(given: AdsInput) -> pl.DataFrame:
    """All records of an input, with their values; null where they cannot be read."""
    travel = given.disorder()
    records = travel.records(travel.order)
    rows = []
    for value in records["value"]:
        try:
            rows.append(json.loads(value))
        except ValueError:
            rows.append({})
    told = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        pl.col("occurred_at", "received_at", "sent_at")
        .str.to_datetime("%Y-%m-%dT%H:%M:%S%.6fZ", time_unit="us")
        .to_physical()
    )
    at = travel.events.select("at_us", "waited_us")[travel.order["event"]]
    return pl.concat([records, travel.order, at, told], how="horizontal")


def test_the_data_is_the_week_that_its_attribution_describes():
    week = ads_week.impressions()
    assert week.height == 60_000
    assert week["clicked"].sum() == 287
    assert week["user"].n_unique() == 337
    assert week["user"].max() == 336
    assert week["occurred_at"].min() >= datetime(2019, 11, 24, tzinfo=UTC)
    assert week["occurred_at"].max() < datetime(2019, 12, 1, tzinfo=UTC)
    assert week["occurred_at"].is_sorted()
    per_file = week.group_by("campaign", "policy").len()
    assert per_file["len"].to_list() == [10_000] * 6
    assert sorted(week["slot"].unique()) == [1, 2, 3]


def test_a_click_follows_its_impression_and_a_refund_its_click():
    once = ads_week.week_events(SEED).with_columns(number=pl.col("event_id").str.slice(1))
    assert once["event_id"].n_unique() == once.height
    kinds = {kind: once.filter(pl.col("kind") == kind) for kind in once["kind"].unique()}
    assert (kinds["impression"].height, kinds["click"].height) == (60_000, 287)
    for first, second, limits in (
        ("impression", "click", (2_000_000, 5 * MINUTE_US)),
        ("click", "refund", (30 * MINUTE_US, 6 * HOUR_US)),
    ):
        pairs = kinds[second].join(kinds[first], on="number", suffix="_before")
        assert pairs.height == kinds[second].height > 5
        assert (pairs["at_us"] - pairs["at_us_before"]).is_between(*limits).all()
        assert pairs["client"].equals(pairs["client_before"], check_names=False)
    costs = once.group_by("client", "kind").agg(pl.col("cost_micros").unique())
    for client, kind, (cost,) in costs.iter_rows():
        price = WEEK_CLIENTS[client]
        known = {"impression": price.impression_micros, "click": price.click_micros}
        assert cost == known.get(kind, -price.click_micros)


def test_made_up_events_come_at_their_rate_around_the_end_of_a_month():
    once = ads_generated.generated_events(SEED, 200, 4.0)
    assert once["event_id"].n_unique() == once.height
    shown = once.filter(pl.col("kind") == "impression")
    assert shown.height == 200 * 60 * 4
    reached = shown["at_us"] + shown["waited_us"]
    assert reached.is_between(*ads_generated.span_us(4.0)).all()
    middle = datetime(2026, 1, 31, 23, tzinfo=UTC)  # midnight in Berlin, the first client's zone
    assert abs(reached.mean() - middle.timestamp() * 1e6) < MINUTE_US
    rates = once.group_by("ad").agg(
        shown=(pl.col("kind") == "impression").sum(), clicked=(pl.col("kind") == "click").sum()
    )
    unloved = rates.filter((pl.col("ad") % 10).is_in(ads_generated.LOW_RATE_ADS))
    assert unloved["shown"].max() > 100
    assert unloved["clicked"].sum() == 0
    assert 0.005 < rates["clicked"].sum() / rates["shown"].sum() < 0.04
    busiest = shown["client"].value_counts(sort=True)["count"]
    assert busiest[0] > 5 * busiest[len(busiest) // 2]  # a few clients have most of it
    assert set(shown["client"]) <= set(GENERATED.clients)


def test_an_input_that_is_too_large_is_refused():
    with pytest.raises(
        ConfigError, match=r"12,000,000; the demo can make up to 10,000,000.*--rate"
    ):
        AdsInput("generated", rate=20_000, minutes=10).check()
    AdsInput("generated", rate=10_000, minutes=10).check()


@INPUTS
def test_a_seed_always_gives_the_same_bytes(given):
    travel = given.disorder()
    text = travel.records(travel.order).with_columns(pl.col("key", "value").cast(pl.String))
    digest = hashlib.sha256(text.write_csv().encode()).hexdigest()
    # A demo stopped today must go on after an upgrade: change this only with the data.
    assert (
        digest
        == {
            "week": "a38806e1a44a5b08a7aceeeb0b889fdc202444e0d25451a193829c70d9d14edb",
            "generated": "f8c3cd6cb31632ef40ae4fb38336a31dc035612ac855ea695b9833545a91f501",
        }[given.source]
    )
    other = AdsInput(given.source, SEED + 1, given.rate, given.minutes).disorder()
    assert not other.order.equals(travel.order)


@INPUTS
def test_every_event_arrives_and_copies_are_of_the_same_event(given):
    sent = decoded(given)
    whole = sent.filter(~pl.col("broken"), pl.col("kind") != "heartbeat")
    travel = given.disorder()
    real = travel.events.filter(pl.col("kind") != "heartbeat")
    assert set(whole["event_id"]) == set(real["event_id"])
    same = ("kind", "occurred_at", "client", "ad", "cost_micros")
    distinct = whole.group_by("event_id").agg(pl.col(same).n_unique())
    assert distinct.select(pl.max_horizontal(pl.col(same).max())).item() == 1
    assert 0.025 < whole.height / real.height - 1 < 0.04
    broken = sent.filter("broken")
    assert 0 < broken.height < 0.001 * sent.height
    assert broken["kind"].is_null().all()


def test_with_chaos_more_comes_twice_and_more_is_broken():
    usual, chaos = (AdsInput(seed=SEED, chaos=chaos).disorder().order for chaos in (False, True))
    assert chaos.height > usual.height + 6_000
    assert chaos["broken"].sum() > 2 * usual["broken"].sum() > 0


@INPUTS
def test_partitions_are_those_of_the_logs_own_partitioner(given):
    sent = decoded(given).unique(["key", "partition"])
    assert sent.height == sent["key"].n_unique()
    assert set(sent["partition"]) == set(range(PARTITIONS))
    for key, partition, kind in sent.select("key", "partition", "kind").iter_rows():
        assert partition == partition_of(key, PARTITIONS)
        if kind == "heartbeat":
            assert key.decode() == heartbeat_key(partition)


@INPUTS
def test_records_stand_in_the_order_of_arrival_and_a_heartbeat_is_the_last(given):
    sent = decoded(given)
    assert sent["arrival_us"].is_sorted()
    for part in sent.partition_by("partition"):
        assert part["place"].to_list() == list(range(part.height))
        assert part["timestamp_ms"].is_sorted()
        assert part["kind"][-1] == "heartbeat"
        # It is past the end of every client's last day, and past what any window waits for.
        assert part["received_at"][-1] >= part["received_at"].head(part.height - 1).max() + DAY_US


@INPUTS
def test_what_waited_on_a_device_and_its_clock_can_be_worked_out(given):
    sent = decoded(given).filter(pl.col("sent_at").is_not_null())
    waited = sent["sent_at"] - sent["occurred_at"]
    true_at = sent["received_at"] - waited
    assert (true_at - sent["at_us"]).is_between(0, 20_000_000).all()  # the way takes so long
    first = sent.unique("event_id", keep="first", maintain_order=True)
    assert 0.005 < (first["waited_us"] > 0).mean() < 0.02
    assert (first["waited_us"] > HOUR_US).sum() > 0
    off = first["occurred_at"] - first["at_us"]
    wrong = (first["user"] % DEVICES_PER_CLOCK).is_in(list(CLOCKS_US))
    assert set(off.filter(wrong)) == set(CLOCKS_US.values())
    assert set(off.filter(~wrong)) == {0}
