"""A pipeline over advertising whose batches are committed as a job commits them, and a server."""

from __future__ import annotations

import datetime as dt
import json
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from http.client import HTTPConnection
from types import SimpleNamespace
from urllib.parse import urlencode, urlsplit

import polars as pl
import pytest

import millstream as ms
from millstream.kernels.errors.dead_letters import DEAD_LETTER_SCHEMA
from millstream.views.commit.batch_history import PhaseTimer, batch_record
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.commit.time_status import time_status
from millstream.views.panels import to_plain
from millstream.views.runs.progress import Progress
from millstream.views.server.server import serve

NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
TOPIC = "ad-events"
WINDOWS = "tumbling(1 minute) by ad_id"


@dataclass
class AdEvent:
    ad_id: int
    client: str
    kind: str
    cost: Decimal
    at: dt.datetime


def pipeline(log):
    """Declare rates and spend per minute, the budgets of clients, and the ads that are stopped."""
    app = ms.App("ads", log=log)
    events = app.topic(TOPIC, AdEvent, key="ad_id", partitions=2)
    clean = events.stream(time="at").filter(pl.col("kind") != "heartbeat")
    (
        clean.window(ms.tumbling("1 minute"), by="ad_id")
        .emit("update")
        .agg(
            shown=ms.count(pl.col("kind") == "impression"),
            clicked=ms.count(pl.col("kind") == "click"),
            cost=ms.sum("cost"),
        )
        .view("ad_ctr", key=("window_start", "ad_id"))
    )
    spend = clean.with_columns(budget=pl.lit(Decimal("100.00")))
    spend.select("client", spent="cost", budget="budget").view("budgets", key="client")
    spend.select("ad_id", stopped_at="at", client="client").view("stopped_ads", key="ad_id")
    panels, measure = ms.panels, ms.panels.Measure
    rate = measure("Click rate", "clicked", per="shown", unit="percent")
    cost = measure("Spend", "cost", unit="€")
    app.dashboard(
        panels.Counters(
            "So far",
            "ad_ctr",
            (measure("Impressions", "shown"), measure("Clicks", "clicked"), cost),
        ),
        panels.Lines("Click rate per minute", "ad_ctr", (rate,)),
        panels.Lines("Spend per minute", "ad_ctr", (cost,)),
        panels.Top("Top ads", "ad_ctr", by="ad_id", measures=(cost, rate), rows=5),
        panels.Limits("Budgets", "budgets", "client", "spent", "budget", unit="€"),
        panels.Newest("Stopped ads", "stopped_ads", by="stopped_at", show=("ad_id", "client")),
    )
    return app


def _dead_letters(reasons):
    letter = {"topic": TOPIC, "partition": 0, "step": TOPIC, "number": 0, "time": NOON}
    rows = [
        {**letter, "offset": offset, "reason": reason, "headers": "[]", "value": b"{}"}
        for offset, reason in reasons.items()
    ]
    return pl.DataFrame(rows, schema=DEAD_LETTER_SCHEMA)


class Ads:
    """A run of the pipeline whose batches the test makes."""

    def __init__(self, folder):
        self.log = folder / "data"
        self._open = ExitStack()
        log = self._open.enter_context(closing(ms.connect(self.log)))
        log.create_topic(TOPIC, partitions=2)
        self._producer = self._open.enter_context(log.producer())
        self.app = app = pipeline(self.log)
        self.plan = app.plan()
        state_store = app.folder / "views.db"
        self.committer = self._open.enter_context(open_committer(self.plan, state_store, self.log))
        self.committer.state_store.put_description(
            "ads", "dashboard", [to_plain(panel) for panel in app.panels]
        )
        self.batch_id = self.committer.begin_run("main", "one")
        self.read = 0
        self.timer = PhaseTimer()

    @property
    def state_store(self):
        return self.committer.state_store

    def commit(self, *rows, spent=None, stopped=None, late=0, unread=0, dead=None):
        """Commit a batch of rates: (minute, ad, shown, clicked, cost) each.

        ``dead``: offset → the reason why a record of partition 0 is a dead letter.
        """
        minutes = [NOON + dt.timedelta(minutes=row[0]) for row in rows]
        rates = {
            "window_start": minutes,
            "window_end": [minute + dt.timedelta(minutes=1) for minute in minutes],
            "ad_id": [row[1] for row in rows],
            "shown": [row[2] for row in rows],
            "clicked": [row[3] for row in rows],
            "cost": [Decimal(row[4]) for row in rows],
        }
        made = {"ad_ctr": self._frame("ad_ctr", rates)}
        if spent:
            budgets = {
                "client": list(spent),
                "spent": [Decimal(value) for value in spent.values()],
                "budget": [Decimal("100.00")] * len(spent),
            }
            made["budgets"] = self._frame("budgets", budgets)
        if stopped:
            stops = {"ad_id": [stopped], "stopped_at": [max(minutes)], "client": ["acme"]}
            made["stopped_ads"] = self._frame("stopped_ads", stops)
        events = sum(row[2] + row[3] for row in rows) + late
        for _ in range(events + unread):
            self._producer.send(TOPIC, {}, partition=0)
        self._producer.flush()
        self.read += events
        watermark_us = max(int(minute.timestamp() * 1_000_000) for minute in minutes)
        result = BatchResult(
            steps=self.plan.steps,
            rows=made,
            step_counts={
                TOPIC: Counter(read=events, emitted=events, rows_out=events),
                WINDOWS: Counter(read=events, held=events - late, late=late, rows_out=len(rows)),
            },
            position={TOPIC: {"0": self.read, "1": 0}},
            watermarks={WINDOWS: watermark_us},
            clocks={
                WINDOWS: {
                    TOPIC: {
                        "watermark": watermark_us,
                        "active": True,
                        "partitions": {"0": watermark_us},
                        "idle": [1],
                    }
                }
            },
            late_by_us={WINDOWS: 90_000_000} if late else {},
            state={WINDOWS: Counter(bytes=4096, rows=len(rows))},
            worked_ms={TOPIC: 60.0, WINDOWS: 140.0},
            dead_letters=None if dead is None else _dead_letters(dead),
        )
        progress, status = self._status(result, events, unread)
        self.timer.begin(20.0)
        self.timer.took_ms |= {"read": 70.0, "stages": 145.0, "collect": 5.0}
        record = batch_record(progress, result, self.timer, self.committer.run)
        self.timer.took_ms["commit"] = 12.0
        self.committer.commit(self.batch_id, result, status, record=record)
        self.batch_id += 1

    def _frame(self, view, columns):
        schema = self.state_store.schema(view)
        return pl.DataFrame(columns, schema=schema.dtypes)

    def _status(self, result, events, unread):
        at = dt.datetime.now(dt.UTC)
        progress = Progress(
            app="ads",
            batch_id=self.batch_id,
            at=at,
            duration_ms=250.0,
            read=events,
            emitted=result.rows["ad_ctr"].height,
            held=result.total("held"),
            late=result.total("late"),
            filtered=0,
            dead=0,
            duplicate=0,
            watermark=result.watermark,
            lag={f"{TOPIC}/0": unread, f"{TOPIC}/1": 0},
            behind_s=0.25,
            state_bytes=4096,
        )
        before = self.state_store.status("ads")
        time_part = time_status(before, self.plan, result, self.batch_id, at)
        status = {**progress.to_dict(), "forgotten_producers": {}, "gauges": {}, **time_part}
        return progress, status

    def close(self):
        self._open.close()


@pytest.fixture
def ads(tmp_path, monkeypatch):
    """The app, whose batches are made up: their ledgers have only what the page shows."""
    monkeypatch.setattr(BatchResult, "check_balance", lambda *_: None)
    opened = Ads(tmp_path)
    yield opened
    opened.close()


class Client:
    """Asks the server as any program would."""

    def __init__(self, url):
        self.url = url.rstrip("/")

    def ask(self, path, /, headers=None, **parameters):
        """Return status, headers and text of an answer."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        request = urllib.request.Request(self.url + path + query, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return SimpleNamespace(
                    status=answer.status, headers=answer.headers, text=answer.read().decode()
                )
        except urllib.error.HTTPError as error:
            with error:
                return SimpleNamespace(
                    status=error.code, headers=error.headers, text=error.read().decode()
                )

    def json(self, path, /, **parameters):
        answer = self.ask(path, **parameters)
        assert answer.status == 200, answer.text
        return json.loads(answer.text)

    def error(self, path, /, **parameters):
        """Return the status and the message of an answer that is an error."""
        answer = self.ask(path, **parameters)
        assert answer.status >= 400
        return answer.status, json.loads(answer.text)["error"]["message"]

    @contextmanager
    def events(self, path, headers=None):
        """Subscribe; give a function that returns the next event as (id, kind, data)."""
        parts = urlsplit(self.url)
        with closing(HTTPConnection(parts.hostname, parts.port, timeout=60)) as connection:
            connection.request("GET", path, headers=headers or {})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield lambda: _next_event(answer)


def _next_event(answer):
    found = {}
    while True:
        line = answer.readline().decode()
        if not line:
            return None  # the server has ended it
        name, _, value = line.rstrip("\n").partition(": ")
        if name in ("id", "event", "data"):
            found[name] = value
        elif not line.strip() and "data" in found:
            number = int(found["id"].partition("-")[0]) if "id" in found else None
            return number, found.get("event"), json.loads(found["data"])


@pytest.fixture
def client_of():
    return Client


@pytest.fixture
def server(ads):
    with serve(ads.log, listen="127.0.0.1:0") as serving:
        yield Client(serving.url)
