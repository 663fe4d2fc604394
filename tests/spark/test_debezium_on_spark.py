"""Tables of Debezium's envelope on Spark: no batch shows a part of a transaction, and they end as the database does."""

import pytest
from debezium_model import COLUMNS, SCHEMA, TOPICS, TRANSACTIONS, Source, states_by_batch

import millstream as ms
from millstream import testing

WHOLE = ms.debezium(transactions=TRANSACTIONS)
VIEWS = ("users", "orders")


def app_of(envelope):
    app = ms.App("shop", log="unused")
    tables = [app.table(topic, SCHEMA, key="id", envelope=envelope) for topic in TOPICS]
    for view, table in zip(VIEWS, tables, strict=True):
        table.view(view)
    users, orders = tables
    orders = orders.rename({name: f"order_{name}" for name in COLUMNS})
    users.join(orders, {"id": "order_id"}, how="full").view("both")
    return app


def source_of(seed, **options):
    """Return a source without a snapshot, whose rows belong to no transaction."""
    source = Source(seed, **options)
    source.begin(keys=0)
    for _ in range(10):
        source.commit()
        if source.written and source.transactions and source.dice.random() < 0.2:
            source.restart()
    return source


def rows_of(out, *views):
    return {view: sorted(out[view].rows(), key=repr) for view in (*VIEWS, *views)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_no_batch_on_spark_shows_a_part_of_a_transaction(spark, in_turns, partitions):
    source = source_of(partitions)
    options = {"partitions": partitions, "seed": partitions}
    out = testing.run(app_of(WHOLE), source.topics, batches=4, engine="spark", **options)
    states = [
        {view: state[topic] for view, topic in zip(VIEWS, TOPICS, strict=True)}
        for state in source.states
    ]
    at = 0
    for seen in states_by_batch(out, VIEWS):
        at = next((n for n in range(at, len(states)) if states[n] == seen), None)
        assert at is not None, (seen, states)
    assert rows_of(out) == states[-1]
    assert out.dead.height == source.model.dead
    in_process = testing.run(app_of(WHOLE), source.topics, batches=6, crash=1, **options)
    assert rows_of(out, "both") == rows_of(in_process, "both")


@pytest.mark.timeout(600)
def test_without_transactions_tables_on_spark_follow_each_record(spark):
    source = source_of(5, transactions=False)
    inputs = {topic: source.topics[topic] for topic in TOPICS}
    out = testing.run(app_of("debezium"), inputs, batches=3, partitions=1, engine="spark")
    last = source.states[-1]
    assert rows_of(out) == {v: last[t] for v, t in zip(VIEWS, TOPICS, strict=True)}
    in_process = testing.run(app_of("debezium"), inputs, batches=5, partitions=1, seed=4, crash=1)
    assert rows_of(out, "both") == rows_of(in_process, "both")
