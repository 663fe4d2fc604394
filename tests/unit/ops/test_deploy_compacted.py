"""Deploying over topics that are compacted: what is rebuilt of them lacks records, and says so; but for tables."""

from __future__ import annotations

import json

import pytest
from edited_app import EditedApp, answers, events

import millstream as ms
from millstream.errors import ConfigError
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.views.coverage import partial_note
from millstream.views.store_location import open_state_store

SETTINGS = {"segment.bytes": "2000", "min.cleanable.dirty.ratio": "0"}
TRIPLE = ("FACTOR = 2", "FACTOR = 3")
LAST = """
import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
clicks = app.topic("clicks", {"ad": str, "kind": str, "cost": int}, key="ad").table()
clicks.group_by("kind").agg(n=ms.count(), cost=ms.sum("cost")).view("kinds")
"""
TRANSACTIONS = """
import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
whole = ms.debezium(transactions="shop.transaction")
orders = app.table("shop.orders", {"id": int, "ad": str}, key="id", envelope=whole)
orders.group_by("ad").agg(n=ms.count()).view("ads")
"""


def began(folder, source=None):
    """Return an app of which compaction has removed most records since it has read them."""
    edited = EditedApp(folder, 1, **({} if source is None else {"source": source}))
    with ms.connect(edited.log) as log:
        log.create_topic("clicks", partitions=1, cleanup="compact", settings=SETTINGS)
        rows = events(150, 5)
        with log.producer() as producer:
            for number, row in enumerate(rows):
                value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
                producer.send("clicks", value, key=row["ad"])
                if number % 5 == 4:
                    producer.flush()  # a batch is the least that a segment may have
    edited.run(edited.write())
    with ms.connect(edited.log) as log:
        log.run_maintenance()
        assert log.read("clicks", 0).num_rows < 75
    return edited, rows


def notes(app):
    with open_state_store(app.state_store, readonly=True) as store:
        return {
            one.name: partial_note(store.coverage(one.name))
            for one in store.views()
            if one.name != "dead_letters"
        }


def test_a_window_that_is_rebuilt_of_a_compacted_topic_needs_consent_and_says_what_it_lacks(
    tmp_path, call
):
    edited, rows = began(tmp_path)
    app = edited.write(TRIPLE)
    plan = plan_change(app)
    assert (plan.gone, plan.exit_code) == (0, 5)
    assert plan.to_dict()["compacted"] == {
        "step per_kind": ["clicks"],
        "view per_kind": ["clicks"],
    }
    assert "The topic 'clicks' is compacted: what is rebuilt" in call("plan", str(edited.file)).out
    for work in (deploy, compare):
        with pytest.raises(ConfigError, match="'clicks' is compacted: what is rebuilt would lack"):
            work(app)
    assert edited.views(app) == answers(rows)
    assert deploy(app, gone_ok=True).switched
    (note,) = filter(None, notes(app).values())
    assert note == notes(app)["per_kind"]
    assert "was computed of what compaction had left in 'clicks'" in note
    # Going back needs nothing of the log, and is whole.
    app = edited.write()
    assert rollback(app).records == 0
    assert edited.views(app) == answers(rows)
    assert {*notes(app).values()} == {None}


def test_a_table_needs_the_last_records_alone(tmp_path):
    edited, rows = began(tmp_path, LAST)
    app = edited.write(('cost=ms.sum("cost")', 'cost=ms.max("cost")'))
    assert plan_change(app).exit_code == 3
    assert deploy(app).switched
    last = {row["ad"]: row for row in rows}.values()
    costs = {
        kind: [row["cost"] for row in last if row["kind"] == kind] for kind in ("click", "show")
    }
    assert edited.views(app)["kinds"] == {(k, len(c), max(c)) for k, c in costs.items() if c}
    assert notes(app) == {"kinds": None}


def test_a_topic_of_transactions_that_is_compacted_is_refused_as_a_run_refuses_it(tmp_path):
    edited = EditedApp(tmp_path, 1, source=TRANSACTIONS)
    part = {"event_count": 1, "data_collection": "orders"}
    change = {"op": "c", "after": {"id": 1, "ad": "a"}, "transaction": {"id": "1"}}
    change["transaction"] |= {"total_order": 1, "data_collection_order": 1}
    end = {"status": "END", "id": "1", "event_count": 1, "data_collections": [part]}
    with ms.connect(edited.log) as log, log.producer() as producer:
        log.create_topic("shop.orders", partitions=1, cleanup="compact")
        log.create_topic("shop.transaction", partitions=1)
        producer.send("shop.orders", json.dumps(change).encode(), key=b'{"id":1}')
        producer.send("shop.transaction", json.dumps(end).encode())
    edited.run(edited.write())
    app = edited.write(("n=ms.count()", "n=ms.count(), most=ms.max('id')"))
    plan = plan_change(app)
    assert (plan.verdict, plan.exit_code) == ("refuses", 4)
    with pytest.raises(ConfigError, match=r"'shop.orders' is compacted, and the app applies whole"):
        deploy(app, gone_ok=True)
    assert edited.views(app)["ads"] == {("a", 1)}
