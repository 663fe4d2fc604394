"""Every rule of time against a naive model that takes records one by one, as the definition says.

Whatever the batches, lanes and tasks, and however partitions interleave: the same events are late,
the same windows come out, and event time gets equally far.
"""

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing

START = datetime(1970, 1, 1, tzinfo=UTC)
NEVER = -(10**9)
SIZE = 10


@dataclass
class Event:
    id: int
    at: datetime | None
    kind: str = "event"
    device: str | None = None
    wm: datetime | None = None


@dataclass(frozen=True)
class Said:
    """A record as drawn; a mark where ``kind`` is "mark". Seconds."""

    partition: int
    at: int | None
    kind: str
    device: str | None
    wm: int | None
    arrival: int


@dataclass(frozen=True)
class Rules:
    delay: int | None = 0
    punctuated: bool = False
    heartbeats: bool = False
    per: bool = False
    ends: bool = False
    future: int | None = None
    lateness: int = 0
    idle: int | None = None


@dataclass
class Known:
    """What the model knows of one partition."""

    reached: int = NEVER
    own: dict = field(default_factory=dict)
    heard: dict = field(default_factory=dict)
    spoke: int = 0

    def rise(self):
        self.reached = max([self.reached, *([min(self.own.values())] if self.own else [])])

    def pass_time(self, now, idle):
        """Let go who has been quiet; who fell silent earlier goes earlier."""
        for since in sorted({at for at in self.heard.values() if now - at >= idle}):
            for name in [name for name, at in self.heard.items() if at == since]:
                del self.own[name], self.heard[name]
            self.rise()


def when(seconds):
    return None if seconds is None else START + timedelta(seconds=seconds)


def model(said, rules, partitions):  # noqa: C901 - one story, told from top to bottom
    """Judge records one by one; see the definition in the architecture document."""
    known = [Known() for _ in range(partitions)]
    in_time, late, dead, counts = set(), set(), set(), {}
    now, everywhere = 0, NEVER

    def all_reached():
        """Say how far the input is; while all partitions are quiet it stays where it was."""
        active = [p.reached for p in known if rules.idle is None or now - p.spoke < rules.idle]
        return max(everywhere, min(active, default=NEVER))

    for number, record in enumerate(said):
        part = known[record.partition]
        if record.kind == "tick":
            everywhere = all_reached()
            now += record.arrival
            for quiet in known:
                quiet.pass_time(now, rules.idle)
            everywhere = all_reached()
            continue
        part.spoke = now if record.kind != "mark" else part.spoke
        if record.kind == "mark":
            part.reached = max(part.reached, record.at)
            part.own = {name: max(at, record.at) for name, at in part.own.items()}
            continue
        only = rules.heartbeats and record.kind == "heartbeat"
        spoken = [record.at, record.wm if rules.punctuated else None]
        too_far = rules.future is not None and any(
            at is not None and at > record.arrival + rules.future for at in spoken
        )
        if too_far or (record.at is None and not only):
            dead.add(number)
            continue
        name = record.device if rules.per else "all"
        part.own.setdefault(name, part.reached)
        part.heard[name] = now
        before = part.own[name]
        if rules.delay is not None and record.at is not None:
            part.own[name] = max(part.own[name], record.at - rules.delay)
        if rules.punctuated and record.wm is not None:
            part.own[name] = max(part.own[name], record.wm)
        part.rise()
        if rules.ends and record.kind == "bye":
            del part.own[name], part.heard[name]
            part.rise()
        if only:
            continue
        start = record.at // SIZE * SIZE
        if start + SIZE + rules.lateness <= before:
            late.add(number)
        else:
            in_time.add(number)
            counts[start] = counts.get(start, 0) + 1
    reached = all_reached()
    final = {s: n for s, n in counts.items() if s + SIZE + rules.lateness <= reached}
    return in_time, late, dead, final, None if reached == NEVER else when(reached)


def app_with(rules, partitions):
    app = ms.App("time", log="unused", buckets=2)
    rule = ms.watermark(
        None if rules.delay is None else timedelta(seconds=rules.delay),
        idle=None if rules.idle is None else timedelta(seconds=rules.idle),
        punctuation=pl.col("wm") if rules.punctuated else None,
        punctuation_only=pl.col("kind") == "heartbeat" if rules.heartbeats else None,
        per="device" if rules.per else None,
        ends=pl.col("kind") == "bye" if rules.ends else None,
        future_max=None if rules.future is None else timedelta(seconds=rules.future),
    )
    stream = app.topic("events", Event, partitions=partitions).stream(
        time="at", watermark=rule, lateness=timedelta(seconds=rules.lateness)
    )
    window = ms.tumbling(timedelta(seconds=SIZE))
    stream.window(window, by="id").emit("update").agg(n=ms.count()).view("in_time")
    aside = replace(
        stream, shape=replace(stream.shape, late_policy="side")
    )  # the same events, judged one by one
    aside.window(window, by="id").agg(n=ms.count()).late.view("too_late", key="id")
    stream.window(window, by=[]).emit("final").agg(n=ms.count()).view("final")
    return app


def rows_of(said):
    for number, record in enumerate(said):
        if record.kind == "mark":
            yield testing.Watermark("events", record.partition, at=when(record.at))
        elif record.kind == "tick":
            yield testing.Tick(timedelta(seconds=record.arrival))
        else:
            event = Event(number, when(record.at), record.kind, record.device, when(record.wm))
            yield testing.Row(event, partition=record.partition, at=when(record.arrival))


def interleaved(said, dice):
    """Put the partitions' records into another order, each partition's own being kept."""
    order = [number for number, _ in enumerate(said)]
    dice.shuffle(order)
    queues = {}
    for number, record in enumerate(said):
        queues.setdefault(record.partition, []).append(number)
    places = [said[number].partition for number in order]
    return [queues[partition].pop(0) for partition in places]


def outcome(said, rules, partitions, *, batches, seed):
    order = interleaved(said, random.Random(seed))
    mixed = [said[number] for number in order]
    out = testing.run(
        app_with(rules, partitions),
        {"events": list(rows_of(mixed))},
        batches=batches,
        partitions=partitions,
        seed=seed,
    )
    too_late = {order[number] for number in out["too_late"]["id"]}
    starts = out["final"]["window_start"]
    final = {
        int((start - START).total_seconds()): n
        for start, n in zip(starts, out["final"]["n"], strict=True)
    }
    assert out.late == 3 * len(too_late)
    return too_late, len(out.dead), final, out.watermark


def agrees(said, rules, partitions, *, batches, seed):
    _, late, dead, final, reached = model(said, rules, partitions)
    expected = (late, len(dead), final, reached)
    assert outcome(said, rules, partitions, batches=batches, seed=seed) == expected


def sound(rules):
    """Make of any draw one that can be declared."""
    changes = dict(vars(rules))
    changes["ends"] = rules.ends and rules.per
    changes["punctuated"] = rules.punctuated or rules.delay is None
    return Rules(**changes)


seconds = st.integers(-20, 80)
records = st.builds(
    Said,
    partition=st.integers(0, 2),
    at=seconds,
    kind=st.sampled_from(["event", "event", "event", "heartbeat", "bye", "mark"]),
    device=st.sampled_from(["a", "b", "c", None]),
    wm=st.none() | seconds,
    arrival=st.integers(0, 60),
)
rule_sets = st.builds(
    Rules,
    delay=st.sampled_from([None, 0, 7, 30]),
    punctuated=st.booleans(),
    heartbeats=st.booleans(),
    per=st.booleans(),
    ends=st.booleans(),
    future=st.sampled_from([None, None, 10]),
    lateness=st.sampled_from([0, 5]),
).map(sound)


@settings(deadline=None, max_examples=some(100))
@given(
    st.lists(records, max_size=50),
    rule_sets,
    st.sampled_from([1, 3]),
    st.integers(1, 7),
    st.integers(0, 999),
)
def test_every_rule_gives_what_the_model_gives(said, rules, partitions, batches, seed):
    said = [Said(**{**vars(r), "partition": r.partition % partitions}) for r in said]
    agrees(said, rules, partitions, batches=batches, seed=seed)


def long_history(dice, partitions, devices):
    """Draw devices that are alive by turns, each with a lag of its own."""
    lags = {f"d{number}": dice.choice([0, 0, 5, 40]) for number in range(devices)}
    said = []
    for now in range(150):
        name = dice.choice(sorted(lags))
        at = now - lags[name] - dice.randrange(8)
        kind = dice.choices(["event", "bye", "heartbeat", "mark"], [60, 3, 6, 1])[0]
        wm = at - 3 if dice.random() < 0.2 else None
        partition = dice.randrange(partitions)
        said.append(Said(partition, at if kind != "mark" else at - 40, kind, name, wm, now))
    return said


@settings(deadline=None, max_examples=some(60))
@given(
    st.lists(records, max_size=40),
    rule_sets,
    st.integers(0, 999),
    st.integers(10, 40),
)
def test_when_time_passes_quiet_producers_go_as_in_the_model(said, rules, seed, idle):
    # One batch between Ticks: while a partition has unread records, nobody is being quiet.
    kinds = {"mark": "tick"}  # a promise is no record: with it, being quiet depends on the batches
    said = [Said(**{**vars(r), "partition": 0, "kind": kinds.get(r.kind, r.kind)}) for r in said]
    rules = Rules(**{**vars(rules), "per": True, "future": None, "idle": idle})
    agrees(said, rules, 1, batches=1, seed=seed)


@pytest.mark.parametrize(
    ("rules", "partitions"),
    [
        (Rules(delay=5), 1),
        (Rules(delay=5, lateness=12), 7),
        (Rules(delay=None, punctuated=True, heartbeats=True), 4),
        (Rules(delay=5, per=True), 4),
        (Rules(delay=0, per=True, ends=True, heartbeats=True, punctuated=True, future=3), 1),
        (Rules(delay=0, per=True, ends=True, heartbeats=True, punctuated=True, future=3), 7),
        (Rules(delay=None, per=True, ends=True, punctuated=True), 4),
    ],
)
def test_batchings_of_a_long_history_agree(rules, partitions):
    said = long_history(random.Random(5), partitions, devices=9)
    for seed in range(6):
        agrees(said, rules, partitions, batches=1 + seed % 6, seed=seed)


arrivals = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=some(40))
@given(arrivals, st.sampled_from([1, 3]), st.integers(1, 6), st.integers(0, 99))
def test_over_processing_time_windows_follow_the_log_and_never_its_reading(
    drawn, partitions, batches, seed
):
    app = ms.App("arrivals", log="unused")
    topic = app.topic("events", Event, partitions=partitions)
    stream = topic.stream(time=ms.processing_time(settle="0 seconds"))
    stream.window(ms.tumbling("10 seconds"), by=[]).emit("final").agg(n=ms.count()).view("final")
    latest, counts, rows = {}, {}, []
    for number, at in drawn:
        partition = number % partitions
        latest[partition] = max(at, latest.get(partition, at))
        start = latest[partition] // 10 * 10
        counts[start] = counts.get(start, 0) + 1
        rows.append(testing.Row(Event(0, None), partition=partition, at=when(at)))
    end = max(at for _, at in drawn)
    ticked = [*rows, testing.Tick(at=when(end + 25))]
    for items, reached in [(rows, end), (ticked, end + 25)]:
        out = testing.run(app, {"events": items}, batches=batches, partitions=partitions, seed=seed)
        found = out["final"].select("window_start", "n").rows()
        assert out.late == 0
        assert out.watermark == when(reached)
        assert found == [(when(s), n) for s, n in sorted(counts.items()) if s + 10 <= reached]
