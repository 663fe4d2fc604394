"""State that is divided and put together often: the same answers as without, and no more of it than there are rows."""

import json
import random
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.kernels.state import appended_rows, sorted_runs
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.sorted_runs import Run
from millstream.testing.inputs import InputRecord
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
VIEWS = ("sets", "pairs", "rows", "best", "once")
USERS, VALUES = 9, 6


@dataclass
class Event:
    id: int
    user: int
    value: int
    at: datetime


def declared():
    """Return an app with every kind of state that is more than rows of keys."""
    app = ms.App("often", log="unused")
    orders, clicks = (
        app.topic(name, Event, partitions=2).stream(
            time="at", watermark=ms.watermark("10 minutes", idle=None)
        )
        for name in ("orders", "clicks")
    )
    orders.group_by("user").agg(values=ms.distinct("value"), n=ms.count()).view("sets", key="user")
    near = ("-20 seconds", "20 seconds")
    pairs = orders.join(clicks, "user", within=near, how="full")
    pairs.group_by("user").agg(n=ms.count()).view("pairs", key="user")
    left, right = (one.table(keep="all", unbounded=True) for one in (orders, clicks))
    joined = left.join(right, "user").group_by("user")
    joined.agg(n=ms.count()).view("rows", key="user")
    best = orders.top(2, by=[("value", "desc")], per="user", rank="place")
    best.group_by("user").agg(best=ms.sum("value")).view("best", key="user")
    rule = ms.bloom(fpr=1e-9, rotate="30 minutes", expect=64)
    once = orders.dedup("id", within="1 hour", bloom=rule)
    once.group_by("user").agg(n=ms.count()).view("once", key="user")
    return app


APP = declared()


class Rescaled:
    """The app in memory, batch by batch, with what has come in a list."""

    def __init__(self, folder, buckets=1, seed=5):
        self.folder, self.dice, self.came = folder, random.Random(seed), defaultdict(list)
        plan = APP.plan(Buckets(buckets, seed))
        self.engine = KernelEngine(
            plan, folder / "views.db", {"orders": 2, "clicks": 2}, self.dice, now_ms=0
        )
        self.opened = ExitStack()
        self.committer = self.engine._begin(self.opened)

    def batch(self, count):
        """Run a batch of so many new events of each topic."""
        records = {
            topic: [self._event(topic) for _ in range(count)] for topic in ("orders", "clicks")
        }
        for ends in self.engine._ends(records, 1):
            self.engine._commit(self.committer, self.engine.batch_id, self.engine._batch(ends))
            self.engine.batch_id += 1

    def _event(self, topic):
        seconds = 5 * sum(map(len, self.came.values()))
        number = self.dice.randrange(1 + len(self.came[topic]))  # some ids come again
        user, value = self.dice.randrange(USERS), self.dice.randrange(VALUES)
        self.came[topic].append((number, user, value))
        at = (START + timedelta(seconds=seconds)).isoformat()
        text = json.dumps({"id": number, "user": user, "value": value, "at": at})
        return InputRecord(self.dice.randrange(2), text.encode())

    def views(self):
        with SqliteStateStore(self.folder / "views.db", readonly=True) as store:
            return {name: sorted(store.scan(name).rows()) for name in VIEWS}

    def messages(self):
        manifests = [json.loads(state.stored) for state in self.engine.states.values()]
        return [message for manifest in manifests for message in manifest.values()]

    def runs(self, *, filters=False):
        """Return all references to runs; of chunks only those in one bucket, which are the same in others."""
        return [
            Run.from_message(entry)
            for message in self.messages()
            for family, entries in message["runs"].items()
            for entry in entries
            if filters or family != "filters"
        ]

    def rows(self):
        return sum(run.rows for run in self.runs())

    def numbers(self, *counters):
        """Return what the next rows would get as their numbers."""
        values = [message["values"] for message in self.messages()]
        return [held[name] for held in values for name in counters if name in held]


def computed(came):
    """Compute from the events that came what does not depend on their times."""
    orders, clicks = came["orders"], came["clicks"]
    of_user = Counter(user for _, user, _ in orders)
    values = {user: {value for _, other, value in orders if other == user} for user in of_user}
    of_clicks = Counter(user for _, user, _ in clicks)
    best = {
        user: sorted((value for _, other, value in orders if other == user), reverse=True)[:2]
        for user in of_user
    }
    return {
        "sets": sorted((user, len(values[user]), count) for user, count in of_user.items()),
        "rows": sorted((u, of_user[u] * of_clicks[u]) for u in of_user if of_clicks[u]),
        "best": sorted((user, sum(found)) for user, found in best.items()),
    }


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(sorted_runs, "PART_ROWS", 40)
    monkeypatch.setattr(appended_rows, "_SMALL_CHUNKS_MAX", 12)
    monkeypatch.setattr(appended_rows, "_CHUNK_BYTES", 4000)


PLANS = st.lists(
    st.tuples(st.none() | st.sampled_from([1, 2, 3, 4, 7, 16]), st.sampled_from([0, 1, 6, 25])),
    max_size=10,
)


@settings(max_examples=some(12), deadline=None)
@given(PLANS, st.sampled_from([1, 3, 4]))
def test_answers_and_size_are_those_without_a_rescale(tmp_path_factory, plan, buckets):
    rescaled, plain = (Rescaled(tmp_path_factory.mktemp("app"), buckets) for _ in range(2))
    with rescaled.opened, plain.opened:
        for one in (rescaled, plain):
            one.batch(10)
        for count, events in plan:
            if count is not None:
                rescaled.engine.rescale(count)
            for one in (rescaled, plain):
                one.batch(events)
            found = rescaled.views()
            assert found == plain.views()
            assert {name: found[name] for name in computed(rescaled.came)} == computed(
                rescaled.came
            )
            assert rescaled.rows() <= 4 * plain.rows()


@pytest.mark.parametrize("many", [2, 16])
def test_dividing_and_putting_together_again_is_the_state_that_it_was(tmp_path, many):
    one = Rescaled(tmp_path)
    with one.opened:
        for _ in range(4):
            one.batch(15)
        before = one.messages()
        one.engine.rescale(many)
        one.engine.rescale(1)
        once = one.messages()
        assert [message["runs"] for message in once] == [message["runs"] for message in before]
        assert [message["emitted"] for message in once] == [
            message["emitted"] for message in before
        ]
        for _ in range(60):
            one.engine.rescale(many)
            one.engine.rescale(1)
        assert one.messages() == once
        one.batch(15)
        assert {name: one.views()[name] for name in computed(one.came)} == computed(one.came)


def test_rows_and_numbers_do_not_grow_with_rescales(tmp_path):
    rescaled, plain = (Rescaled(_made(tmp_path / name)) for name in ("rescaled", "plain"))
    with rescaled.opened, plain.opened:
        for cycle in range(8):
            for count in (16, 1):
                if cycle:
                    rescaled.engine.rescale(count)
                for one in (rescaled, plain):
                    one.batch(10)
        assert rescaled.views() == plain.views()
        assert rescaled.rows() <= 2 * plain.rows()
        assert len(rescaled.runs(filters=True)) <= 3 * len(plain.runs(filters=True)) + 40
        came = sum(map(len, rescaled.came.values()))
        assert max(rescaled.numbers("groups.next", "left.next")) <= 16 * came


def _made(folder):
    folder.mkdir()
    return folder
