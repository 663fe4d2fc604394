"""What random plans maintain, batch by batch, is what SQL computes over the same rows at once."""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack

import duckdb
import pytest
from example_counts import some
from random_plans.plans import BASES, EVENTS, PlanDraw

from millstream import testing
from millstream.kernels.state.keyhash import Buckets
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.state_store.sqlite_store import SqliteStateStore

PLANS = int(os.environ.get("MILLSTREAM_RANDOM_PLANS", some(80)))
FIRST = int(os.environ.get("MILLSTREAM_RANDOM_PLANS_FIRST", "0"))
BATCHES = 5


def changes(dice, tables):
    """Draw the records of a batch; change the rows that the tables have by then."""
    records = {}
    for name, rows in tables.items():
        records[name] = made = []
        for _ in range(dice.choice([0, 1, 3, 8])):
            key = dice.randint(0, 5)
            if name in EVENTS:
                row = {"id": key, **{c: dice.choice([None, -1, 0, 1, 2]) for c in ("k", "v")}}
                rows[len(rows)] = row
                made.append(row)
            elif dice.random() < 0.25:
                rows.pop(key, None)
                made.append(testing.Row(None, key=str(key)))
            else:
                row = {"id": key, **{c: dice.choice([None, -1, 0, 1, 2]) for c in ("k", "v")}}
                rows[key] = row
                made.append(row)
    return records


def computed(query, tables):
    """Compute a query over the tables."""
    with duckdb.connect() as database:
        for name, rows in tables.items():
            database.execute(f"CREATE TABLE {name} (id BIGINT, k BIGINT, v BIGINT)")
            if rows:
                values = [(row["id"], row["k"], row["v"]) for row in rows.values()]
                database.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", values)
        return Counter(database.execute(query).fetchall())


@pytest.mark.parametrize("seed", range(FIRST, FIRST + PLANS))
def test_a_plan_maintains_what_its_query_computes(seed, tmp_path):
    drawn = PlanDraw(seed)
    result = drawn.draw()
    dice, rescales = random.Random(f"input of {seed}"), random.Random(f"rescales of {seed}")
    tables = {name: {} for name in BASES}
    plan = drawn.app.plan(Buckets(drawn.app.buckets, dice.getrandbits(63)))
    engine = KernelEngine(plan, tmp_path / "views.db", dict.fromkeys(BASES, 3), dice)
    engine.now_ms = 0
    with ExitStack() as opened:
        committer = engine._begin(opened)
        batch_id = 0
        for _ in range(BATCHES):
            records = changes(dice, tables)
            items = {name: items_of(drawn.app.topics[name], records[name], 3, 0) for name in BASES}
            items = {name: rows for name, rows in items.items() if name in engine.logs}
            for ends in engine._ends(items, dice.choice([1, 3])):
                if dice.random() < 0.2:
                    point = dice.choice(["before the commit", "after the commit"])
                    engine._crash(committer, batch_id, ends, point)
                    opened.close()
                    committer = engine._begin(opened)
                if rescales.random() < 0.2:
                    engine.rescale(rescales.choice([1, 2, 3, 7]))
                engine._commit(committer, batch_id, engine._batch(ends))
                batch_id += 1
            with SqliteStateStore(tmp_path / "views.db", readonly=True) as store:
                maintained = Counter(store.scan("result").select(result.columns).rows())
            assert maintained == computed(result.query, tables), (result.words, result.query)
