"""The demo's pipeline: click rates, budgets, and ads to stop, from one stream of events.

The stream has duplicates, disorder and stragglers. `examples/ads/app.py` runs this pipeline as an app of
your own, and `examples/ads/second_version.py` runs it with another click rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import polars as pl

import millstream as ms
from millstream.demo.ads_events import PARTITIONS, TOPIC, AdEvent, Client
from millstream.demo.ads_input import StopRule

APP = "ads"
# Views:
AD_CTR = "ad_ctr"  # per minute and ad
SPEND_BY_DAY = "spend_by_day"  # per client and day of its zone
STOPPED_ADS = "stopped_ads"
LATE_EVENTS = "late_events"
# Topics, besides the ads that are stopped:
DECISIONS = "decisions"
BUDGET_EVENTS = "budget-events"
AD_STOPS = "ad-stops"

# The smoothed rate of an ad that was seldom shown is near what ads have on average.
USUAL_RATE, WEIGHT = 0.005, 200

# Of the page, here and in the live part:
SHOWN = ms.panels.Measure("Shown", "shown")
RATE = ms.panels.Measure("Click rate", "clicked", per="shown", unit="percent")
COST = ms.panels.Measure("Cost", "cost", unit="€", places=2)
_CLICKED = ms.panels.Measure("Clicked", "clicked")
TOP_ADS = ms.panels.Top(
    "Top ads", AD_CTR, by="ad", measures=(COST, SHOWN, _CLICKED, RATE), time="window_start"
)
BUDGETS = ms.panels.Limits(
    "Clients against their budgets",
    SPEND_BY_DAY,
    label="client",
    value="spent",
    limit="budget",
    unit="€",
    newest="budget_day",
    places=2,
)
TOO_LATE = ms.panels.Newest("Too late", LATE_EVENTS, by="occurred_at", show=("client", "late_by"))


def build(
    log: Path | str,
    clients: Mapping[str, Client],
    stop: StopRule,
    *,
    state: Path | None = None,
) -> ms.App:
    """Declare the pipeline over a log; ``state`` is the folder for state and views where the log is none."""
    app = ms.App(APP, log=log, state=state)
    declare(app, clients, stop)
    return app


def declare(app: ms.App, clients: Mapping[str, Client], stop: StopRule) -> None:
    """Declare the pipeline in an app, wherever its log, state and store are."""
    declare_outputs(app, clients, stop)
    add_dashboard(app)


def declare_outputs(app: ms.App, clients: Mapping[str, Client], stop: StopRule) -> ms.Stream:
    """Declare views and topics, without the page; return the events, each once."""
    once = deduplicated_events(app)
    add_rates(once, smoothed_rate())
    add_spending(once, client_table(app, clients))
    add_stopped_ads(once, stop, smoothed_rate()).to(AD_STOPS, key="ad")
    return once


def deduplicated_events(app: ms.App) -> ms.Stream:
    """Read the events, each once, at the time when it occurred.

    They arrive up to a minute out of order, some up to an hour late. Servers send an event again when they
    get no response; the duplicates have its id.
    """
    topic = app.topic(TOPIC, AdEvent, key="client", partitions=PARTITIONS)
    # Heartbeats move the watermark and are then filtered out. As every partition has them, none is
    # ever idle (idle=None), and the result depends on the events alone.
    sent = topic.stream(
        time=ms.device_time("occurred_at", "sent_at", "received_at"),
        watermark=ms.watermark("1 minute", idle=None),
        lateness="1 hour",
        late="side",
    ).filter(pl.col("kind") != "heartbeat")
    once = sent.dedup("event_id", within="30 minutes")
    late = once.late.select("event_id", "kind", "client", "ad", "occurred_at", "late_by")
    late.view(LATE_EVENTS, key="event_id")
    return once


def smoothed_rate() -> pl.Expr:
    """Smooth a click rate: with few impressions it is near the usual one."""
    return (pl.col("clicked") + USUAL_RATE * WEIGHT) / (pl.col("shown") + WEIGHT)


def count_ads(windows: ms.Windowed, rate: pl.Expr) -> ms.Stream:
    """Count impressions, clicks and cost of ads, with their rate."""
    return windows.agg(
        shown=ms.count(pl.col("kind") == "impression"),
        clicked=ms.count(pl.col("kind") == "click"),
        cost=ms.sum("cost_micros"),
    ).with_columns(cost=euros("cost"), rate=rate)


def add_rates(once: ms.Stream, rate: pl.Expr) -> None:
    """Keep impressions, clicks, cost and rate per minute and ad; corrected for an hour."""
    minutes = once.window(ms.tumbling("1 minute"), by="ad")
    count_ads(minutes.emit("update", early="10 seconds"), rate).view(AD_CTR)


def add_spending(once: ms.Stream, clients: ms.Table) -> None:
    """Decide on each event whether its client can pay for it, and keep what was spent."""
    unknown = {"zone": "UTC", "click_micros": 0, "budget_micros": 0}
    priced = once.lookup(clients, on="client")
    decided = priced.with_columns(
        *(pl.col(name).fill_null(value) for name, value in unknown.items())
    ).budget(
        "client",
        cost="cost_micros",
        limit="budget_micros",
        least="click_micros",  # a client that cannot pay for one click is not shown
        zone=pl.col("zone"),
    )
    decided.filter(pl.col("kind") == "impression").select(
        "event_id", "client", "ad", decision=serving_decision()
    ).to(DECISIONS, key="client")
    budget_events = decided.filter(pl.col("budget_event").is_not_null())
    budget_events.select("client", "budget_day", "budget_event", "event_id").to(
        BUDGET_EVENTS, key="client"
    )
    # The latest row of a client's day has its totals.
    decided.select(
        "client", "budget_day", spent=euros("spent"), budget=euros("budget_micros")
    ).view(SPEND_BY_DAY, key=("client", "budget_day"))


def client_table(app: ms.App, clients: Mapping[str, Client]) -> ms.Table:
    """Give the clients as a table: zone, price of a click, and budget of each.

    An event is looked up in it, because the ad servers wait for the decision, and a look-up waits for nothing.
    ``join_asof`` would take the price that was valid when the event occurred, whatever came late; so it would
    hold each event until the watermark has passed it by the hour for which late ones are allowed. The
    table is given here, so it is there with the first batch, and a replay comes to the same. Where prices
    change while the program runs, read them from a topic: ``app.table("clients", ..., key="client")``.
    """
    rows = [
        (name, about.zone, about.click_micros, about.budget_micros)
        for name, about in clients.items()
    ]
    columns = {"client": str, "zone": str, "click_micros": int, "budget_micros": int}
    return app.static_table(
        pl.DataFrame(rows, schema=columns, orient="row"), key="client", name="clients"
    )


def euros(micros: str) -> pl.Expr:
    """Return an amount of millionths of a euro in euros, exactly."""
    return pl.col(micros) * pl.lit(Decimal("0.000001"))


def serving_decision() -> pl.Expr:
    """Return the decision about an impression, as the servers read it."""
    return pl.when(pl.col("decision") == "granted").then(pl.lit("served")).otherwise("decision")


def add_stopped_ads(once: ms.Stream, stop: StopRule, rate: pl.Expr) -> ms.Stream:
    """Find the ads with many impressions and a low click rate in several windows in a row, each once."""
    windows = count_ads(once.window(ms.tumbling(stop.window), by="ad").emit("final"), rate)
    enough = windows.filter(pl.col("shown") >= stop.shown_min)
    in_a_row = enough.window(ms.count_window(stop.windows, slide=1, unbounded=True), by="ad").agg(
        rate_max=ms.max("rate"), shown=ms.sum("shown"), clicked=ms.sum("clicked")
    )
    low = in_a_row.filter(pl.col("rate_max") < stop.floor)
    stops = low.dedup("ad", within="30 days").rename({"window_end": "stopped_at"})
    stops = stops.select("ad", "stopped_at", "rate_max", "shown", "clicked")
    return stops.view(STOPPED_ADS, key="ad")


def add_dashboard(app: ms.App) -> None:
    """Declare the panels of the page."""
    app.dashboard(
        ms.panels.Lines("Click rate per minute", AD_CTR, (RATE,), last="3 hours"),
        ms.panels.Lines("Cost per minute", AD_CTR, (COST,), last="3 hours"),
        TOP_ADS,
        BUDGETS,
        ms.panels.Newest(
            "Stopped ads", STOPPED_ADS, by="stopped_at", show=("ad", "shown", "clicked")
        ),
        TOO_LATE,
    )
