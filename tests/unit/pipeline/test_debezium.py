"""Tables of Debezium's envelope: compared with a database, and what is refused."""

from __future__ import annotations

import random

import pytest
from debezium_model import (
    ORDERS,
    SCHEMA,
    TOPICS,
    TRANSACTIONS,
    USERS,
    Source,
    Tables,
    states_by_batch,
)
from example_counts import some
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.testing import Tick

VIEWS = ("users", "orders")
SEEDS = st.integers(0, 1 << 32)


def app_of(envelope, **options):
    app = ms.App("shop", log="unused")
    for view, topic in zip(VIEWS, TOPICS, strict=True):
        app.table(topic, SCHEMA, key="id", envelope=envelope, **options).view(view)
    return app


def by_view(state):
    return dict(zip(VIEWS, (state[topic] for topic in TOPICS), strict=True))


def rows_of(out):
    return {view: sorted(out[view].rows(), key=repr) for view in VIEWS}


def source_of(seed, *, commits=8, restarts=True, **options):
    source = Source(seed, **options)
    source.begin()
    for _ in range(commits):
        source.commit()
        if restarts and source.written and source.dice.random() < 0.2:
            source.restart()
    return source


@given(seed=SEEDS, batches=st.integers(1, 9), partitions=st.sampled_from([1, 4, 7]))
def test_no_batch_shows_a_part_of_a_transaction(seed, batches, partitions):
    source = source_of(seed)
    inputs = {
        topic: [*source.snapshot[topic], Tick("1 second"), *rows]
        for topic, rows in source.topics.items()
    }
    out = testing.run(
        app_of(ms.debezium(transactions=TRANSACTIONS)),
        inputs,
        batches=batches,
        partitions=partitions,
        seed=seed,
        crash=1,
    )
    states = [by_view(state) for state in source.states]
    at = None
    for seen in states_by_batch(out, VIEWS):
        if at is None and seen != states[0]:
            continue  # the snapshot is not in a transaction
        later = [number for number in range(at or 0, len(states)) if states[number] == seen]
        assert later, (seen, states)
        at = later[0]
    assert rows_of(out) == states[-1]
    assert out.dead.height == source.model.dead
