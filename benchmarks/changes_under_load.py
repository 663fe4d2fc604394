"""Eight hours of events in twenty minutes, in which the logic of the app is changed five times, with kills.

One process appends events at a steady rate; their times pass 24 times as fast as the clock. The app runs on Spark. For
each change the edited file is deployed beside it, then with ``--stop``, and run. The deployment is killed (``kill -9``) at
random moments beside the app and in the switch, and the app once after each restart.

All the while every view is read as a whole, with its position. A naive model, which knows nothing of the library, computes
each version of the logic over the events up to that position: the rows must be those of the version before or of the one
after, and of the latter only, once they were. At the end all views must have all events, by the last version.

The freshness is the age of the oldest event that is not in the views, ten times a second: before a deployment, and while
one works beside the app.

    python benchmarks/changes_under_load.py [--minutes 20] [--changes 5] [--rate 400] [--deploy-rate 20000] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from _measure import table

import millstream as ms
from millstream.views.query import Query
from millstream.views.store_location import open_state_store

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
PARTITIONS = 4
SQUEEZED = 24
VIEWS = ("minutes", "kinds")
TICK_S = 0.05
KILLS_AFTER_S = 8.0

SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

FACTOR = {factor}


def weigh(frame):
    return frame.select("kind", weight=pl.col("cost") * FACTOR)


app = ms.App("ads", log={log!r}, buckets=2)
fields = {{"ad": str, "kind": str, "cost": int, "at": datetime}}
clicks = app.topic("clicks", fields)
stream = clicks.stream(time="at", watermark=ms.watermark("1 minute"), lateness="1 day")
minutes = stream.window(ms.tumbling("{minutes} minutes"), by="ad", name="minutes").emit("update")
minutes.agg(n=ms.count(), {top}cost=ms.sum("cost")).view("minutes")
weighed = stream.filter(pl.col("cost") > {above}).select("kind", "cost")
weighed = weighed.map_frames(weigh, schema={{"kind": str, "weight": int}}, name="weigh")
kinds = weighed.window(ms.tumbling("1 hour"), by="kind", name="kinds").emit("update")
kinds.agg(weight=ms.sum("weight")).view("kinds")
"""


@dataclass(frozen=True)
class Version:
    """One version of the logic."""

    minutes: int = 1
    top: bool = False
    factor: int = 2
    above: int = -1

    def source(self, log: Path) -> str:
        top = 'top=ms.max("cost"), ' if self.top else ""
        return SOURCE.format(
            log=str(log), minutes=self.minutes, top=top, factor=self.factor, above=self.above
        )


VERSIONS = (
    Version(),
    Version(top=True),
    Version(top=True, factor=3),
    Version(minutes=2, top=True, factor=3),
    Version(minutes=2, top=True, factor=3, above=1),
    Version(minutes=2, factor=3, above=1),
)


def event(number: int, rate: float) -> dict[str, Any]:
    """Return an event by its number: event ``n`` is record ``n // PARTITIONS`` of partition ``n % PARTITIONS``."""
    mixed = number * 2_654_435_761 % (1 << 32) >> 7
    at = START + timedelta(seconds=SQUEEZED * number / rate)
    kind = ("click", "show")[mixed // 28 % 2]
    return {"ad": f"a{mixed % 4}", "kind": kind, "cost": mixed // 4 % 7, "at": at}


# ── the model ───────────────────────────────────────────────────────────────────────────────


def floor(at: datetime, size: timedelta) -> datetime:
    return at - (at - START) % size


@dataclass
class Model:
    """The rows of one view of one version, over the events up to a position that grows."""

    version: Version
    view: str
    rate: float
    read: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    groups: dict[tuple[datetime, str], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0, 0])
    )

    @property
    def size(self) -> timedelta:
        return HOUR if self.view == "kinds" else timedelta(minutes=self.version.minutes)

    def rows(self, position: list[int]) -> set[tuple[Any, ...]]:
        """Return the rows that the view must have at a position."""
        for partition, (before, end) in enumerate(zip(self.read, position, strict=True)):
            for offset in range(before, end):
                self._add(event(offset * PARTITIONS + partition, self.rate))
        self.read = position
        return {
            (start, start + self.size, key, *self._values(*values))
            for (start, key), values in self.groups.items()
        }

    def _add(self, one: Mapping[str, Any]) -> None:
        if self.view == "kinds" and one["cost"] <= self.version.above:
            return
        key = one["kind" if self.view == "kinds" else "ad"]
        values = self.groups[floor(one["at"], self.size), key]
        values[0] += 1
        values[1] = max(values[1], one["cost"])
        values[2] += one["cost"]

    def _values(self, count: int, top: int, cost: int) -> tuple[int, ...]:
        if self.view == "kinds":
            return (cost * self.version.factor,)
        return (count, top, cost) if self.version.top else (count, cost)


# ── the events ──────────────────────────────────────────────────────────────────────────────


def produce(folder: Path, rate: float) -> None:
    """Append events by the clock until the file ``stop`` is there, and leave their number in ``count``."""
    with ms.connect(folder / "log") as log, log.producer() as producer:
        log.create_topic("clicks", partitions=PARTITIONS)
        began, sent = time.time(), 0
        (folder / "began").write_text(repr(began))
        while not (folder / "stop").exists():
            due = int((time.time() - began) * rate)
            for number in range(sent, due):
                one = event(number, rate)
                value = json.dumps({**one, "at": one["at"].isoformat()}).encode()
                producer.send("clicks", value, partition=number % PARTITIONS)
            producer.flush()
            sent = max(sent, due)
            time.sleep(TICK_S)
    (folder / "count").write_text(str(sent))


# ── what reads the views ────────────────────────────────────────────────────────────────────


class Watch(threading.Thread):
    """Reads the views again and again, compares them with the models, and measures how fresh they are.

    ``live`` is the version that is in place, and ``next`` the one that may be.
    """

    def __init__(self, store: Path, began: float, rate: float) -> None:
        super().__init__(daemon=True)
        self.store, self.began, self.rate = store, began, rate
        self.live = self.next = 0
        self.seen = {}  # view → the latest version that its rows were of, and no other
        self.models: dict[tuple[int, str], Model] = {}
        self.phase = ""
        self.lags: dict[str, list[float]] = defaultdict(list)
        self.checks = self.positions = 0
        self.position = [0] * PARTITIONS
        self.failure: str | None = None
        self.ended = False

    def run(self) -> None:
        try:
            while not self.ended:
                began = time.time()
                with open_state_store(self.store, readonly=True) as store:
                    for view in VIEWS:
                        self._check(view, store.select(view, Query()))
                time.sleep(max(0.0, 0.1 - (time.time() - began)))
        except Exception as error:  # noqa: BLE001 - the main thread ends with it
            self.failure = repr(error)

    def _check(self, view: str, found: Any) -> None:
        read = (found.position or {}).get("clicks", {})
        position = [int(read.get(str(number), 0)) for number in range(PARTITIONS)]
        self._measure(position)
        rows = {*found.rows.iter_rows()}
        possible = range(max(self.live, self.seen.get(view, 0)), self.next + 1)
        of = [number for number in possible if self._model(number, view).rows(position) == rows]
        if not of:
            self.failure = f"{view} at {position} has rows of none of the versions {[*possible]}"
            self.ended = True
            return
        self.seen[view] = min(of)
        self.checks += 1

    def _model(self, number: int, view: str) -> Model:
        found = self.models.get((number, view))
        if found is None:
            found = self.models[number, view] = Model(VERSIONS[number], view, self.rate)
        return found

    def _measure(self, position: list[int]) -> None:
        oldest = min(offset * PARTITIONS + number for number, offset in enumerate(position))
        self.lags[self.phase].append(max(0.0, time.time() - self.began - oldest / self.rate))
        self.positions += position != self.position
        self.position = position

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        try:
            yield
        finally:
            self.phase = ""

    @property
    def lag_s(self) -> float:
        oldest = min(offset * PARTITIONS + number for number, offset in enumerate(self.position))
        return max(0.0, time.time() - self.began - oldest / self.rate)


# ── the run ─────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """The app, its file, and the deployments."""

    folder: Path
    deploy_rate: int
    dice: random.Random
    kills: int = 0
    process: subprocess.Popen[bytes] | None = None
    watch: Watch | None = None

    def write(self, number: int) -> None:
        (self.folder / "app.py").write_text(VERSIONS[number].source(self.folder / "log"))

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "millstream", *arguments],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start(self) -> None:
        self.process = self.command("run", str(self.folder / "app.py"))

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process and its children, if it is still there."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.kills += 1

    def deploy(self, *options: str, kills: int) -> int:
        """Deploy until it ends by itself; kill it some times before. Return its exit code."""
        arguments = ["deploy", str(self.folder / "app.py"), *options]
        arguments += ["--records-per-second", str(self.deploy_rate)]
        for _ in range(kills):
            process = self.command(*arguments)
            try:
                return process.wait(self.dice.uniform(0.2, KILLS_AFTER_S))
            except subprocess.TimeoutExpired:
                self.kill(process)
        return self.command(*arguments).wait()

    def settle(self, seconds: float = 600) -> None:
        """Wait until the app has caught up."""
        assert self.watch is not None
        limit = time.time() + seconds
        last = self.watch.positions
        while self.watch.lag_s > 3 or self.watch.positions < last + 5:
            self.check()
            if time.time() > limit:
                raise SystemExit(f"the app is {self.watch.lag_s:.1f} s behind: take a lower --rate")
            time.sleep(0.2)

    def sleep(self, seconds: float) -> None:
        limit = time.time() + seconds
        while time.time() < limit:
            self.check()
            time.sleep(0.2)

    def check(self) -> None:
        assert self.watch is not None
        if self.watch.failure:
            raise SystemExit(self.watch.failure)

    def change(self, number: int, seconds: float) -> None:
        """Let the app run for some time, and then change it to another version."""
        assert self.watch is not None
        assert self.process is not None
        self.settle()
        with self.watch.during(f"before {number}"):
            self.sleep(seconds)
        self.write(number)
        self.watch.next = number
        with self.watch.during(f"beside {number}"):
            code = self.deploy(kills=1)
        if code not in (0, 3):
            raise SystemExit(f"the deployment ended with {code}: see output.txt")
        code = self.deploy("--stop", "--timeout", "5 minutes", kills=2)
        if code:
            raise SystemExit(f"the switch ended with {code}: see output.txt")
        self.watch.live = number
        self.process.wait(120)
        self.start()
        self.sleep(self.dice.uniform(2, 30))
        self.kill(self.process)
        self.start()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def report(run: Run, changes: int) -> None:
    assert run.watch is not None
    rows = []
    for number in range(1, changes + 1):
        before, beside = (run.watch.lags[f"{name} {number}"] for name in ("before", "beside"))
        for share in (0.5, 0.99):
            was, now = percentile(before, share), percentile(beside, share)
            name = f"change {number}, p{share * 100:.0f}"
            rows.append([name, f"{was:.2f}", f"{now:.2f}", f"{now / max(was, 1e-3):.2f}"])
    table("freshness, seconds", ["", "before", "beside a rebuild", "ratio"], rows)
    print(
        f"{run.watch.checks:,} reads of a view at {run.watch.positions:,} positions, all of one version; "
        f"{run.kills} kills of {changes} changes"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--changes", type=int, default=5, choices=range(1, len(VERSIONS)))
    parser.add_argument("--rate", type=float, default=400, help="events a second")
    parser.add_argument(
        "--deploy-rate", type=int, default=20_000, help="records a second of a rebuild"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--produce", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce is not None:
        produce(given.produce, given.rate)
        return
    with tempfile.TemporaryDirectory(prefix="changes-") as name:
        run = Run(Path(name), given.deploy_rate, random.Random(given.seed))
        arguments = ["--produce", name, "--rate", str(given.rate)]
        producer = subprocess.Popen([sys.executable, __file__, *arguments])
        try:
            measure(run, given)
            (run.folder / "stop").touch()
            producer.wait()
            finish(run, int((run.folder / "count").read_text()), given.changes)
        except BaseException:
            print((run.folder / "output.txt").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            for process in filter(None, (producer, run.process)):
                if process.poll() is None:
                    process.kill() if process is producer else run.kill(process)


def measure(run: Run, given: argparse.Namespace) -> None:
    while not (run.folder / "began").exists():
        time.sleep(0.1)
    began = float((run.folder / "began").read_text())
    run.write(0)
    run.start()
    store = run.folder / "log" / "apps" / "ads" / "views.db"
    while not store.exists() or not has_views(store):
        time.sleep(0.5)
    run.watch = Watch(store, began, given.rate)
    run.watch.start()
    for number in range(1, given.changes + 1):
        # What is left, divided among the changes that are left; a change takes about a minute and a half besides.
        left = given.minutes * 60 - (time.time() - began)
        run.change(number, max(10.0, left / (given.changes + 1 - number) - 90))
        print(
            f"change {number} is done after {time.time() - began:.0f} s, {run.kills} kills",
            flush=True,
        )
    run.settle()


def has_views(store: Path) -> bool:
    with open_state_store(store, readonly=True) as opened:
        return {*VIEWS} <= {schema.name for schema in opened.views()}


def finish(run: Run, count: int, changes: int) -> None:
    """Let the app read all events, and compare for the last time."""
    assert run.watch is not None
    limit = time.time() + 300
    while sum(run.watch.position) < count:
        run.check()
        if time.time() > limit:
            raise SystemExit(f"the views have {sum(run.watch.position)} of {count} events")
        time.sleep(0.2)
    seen = run.watch.checks
    while run.watch.checks < seen + 2 * len(VIEWS):
        run.check()
        time.sleep(0.1)
    run.watch.ended = True
    run.watch.join()
    run.check()
    print(f"{count:,} events, {count * SQUEEZED / run.watch.rate / 3600:.1f} hours of them")
    report(run, changes)


if __name__ == "__main__":
    main()
