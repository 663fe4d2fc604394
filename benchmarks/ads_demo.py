"""The whole demo pipeline, all its outputs: how much it takes in, and how fresh what it shows is.

    python benchmarks/ads_demo.py [--minutes 5] [--rate 5000] [--batch 400000] [--rounds 3]
        [--fresh-minutes 2] [--only catch-up|freshness] [--check]

Catch-up. A log is filled with generated events (`--minutes` of them at `--rate` impressions a second,
with all their copies, clicks and heartbeats), the pipeline of `millstream demo ads` reads it from the
beginning, and what it takes from the first commit to the last is measured: by then everything has been
started and the code is warm. Told are records per second, CPU seconds of the whole process tree and its
memory. `--check` compares all views and topics with the independent computation.

Freshness. The same events are written as they occur, a tenth of a second at a time, while the pipeline
runs. Of each commit it is known which records were read; a record's freshness is the time from the return
of its append to the commit that has it in all views. The first half minute warms up and does not count.
Told, besides: of each budget that was exhausted meanwhile, what came of its client from the event that
used it up until the commit that says so: what a front-end server could have served in error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
from _measure import MemoryWatch, run_apart, spread, table, tree_cpu_s
from rich.console import Console

import millstream as ms
from millstream.demo import ads_expected
from millstream.demo.ads_disorder import DisorderedRecords
from millstream.demo.ads_events import PARTITIONS, TOPIC
from millstream.demo.ads_input import AdsInput
from millstream.demo.ads_pipeline import AD_CTR, build
from millstream.demo.ads_run import compare
from millstream.demo.feed import chunks

WARM_S = 30.0


def fill(folder: Path, travel: DisorderedRecords) -> None:
    """Write all records to a log."""
    with ms.connect(folder) as log:
        log.create_topic(TOPIC, partitions=PARTITIONS)
        with log.producer() as producer:
            for start in range(0, travel.order.height, 200_000):
                records = travel.records(travel.order[start : start + 200_000])
                producer.send_many(
                    TOPIC, keys=records["key"].to_arrow(), values=records["value"].to_arrow()
                ).result()


def catch_up(given: AdsInput, batch: int, *, check: bool) -> dict[str, float]:
    """Run the pipeline over a full log; return figures from the first commit to the last."""
    moments: list[tuple[float, float, int]] = []

    def note(progress: object) -> None:
        moments.append((time.monotonic(), tree_cpu_s(), progress.read))  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name, MemoryWatch() as memory:
        folder = Path(name)
        fill(folder, given.disorder())
        app = build(folder, given.clients, given.stop_rule)
        began, cpu = time.monotonic(), tree_cpu_s()
        report = app.run(until="caught-up", rows_per_batch=batch, show=False, on_progress=note)
        whole_s, whole_cpu_s = time.monotonic() - began, tree_cpu_s() - cpu
        equal = compare(folder, given, Console(file=sys.stderr)) if check else None
    seconds, cpu_s = moments[-1][0] - moments[0][0], moments[-1][1] - moments[0][1]
    rows = sum(read for _, _, read in moments[1:])
    if equal is False:
        raise SystemExit("the views differ from the independent computation")
    return {
        "records": report.read,
        "batches": len(moments),
        "records/s": rows / seconds,
        "CPU us/record": cpu_s / rows * 1e6,
        "whole, s": whole_s,
        "whole, CPU-s": whole_cpu_s,
        "memory, MiB": memory.mib_max,
    }


class Writer(threading.Thread):
    """Writes records as they occur, and notes when each append had returned."""

    def __init__(self, folder: Path, travel: DisorderedRecords) -> None:
        super().__init__(daemon=True)
        self._folder, self._travel = folder, travel
        self.go = threading.Event()
        self.ended = threading.Event()
        self._held_s = 0.0
        self.appends: list[tuple[float, list[int]]] = []  # when, and the ends of the partitions

    def run(self) -> None:
        sent = [0] * PARTITIONS
        with ms.connect(self._folder) as log, log.producer() as producer:
            clock = lambda: time.monotonic() - self._held_s  # noqa: E731
            for chunk in chunks(self._travel.order, speed=1.0, clock=clock, pause=time.sleep):
                records = self._travel.records(chunk)
                producer.send_many(
                    TOPIC, keys=records["key"].to_arrow(), values=records["value"].to_arrow()
                ).result()
                for partition, count in chunk["partition"].value_counts().iter_rows():
                    sent[partition] += count
                self.appends.append((time.monotonic(), list(sent)))
                if not self.go.is_set():  # Spark starts over the first records
                    self.go.wait()
                    self._held_s = time.monotonic() - self.appends[0][0]
        self.ended.set()


def freshness(given: AdsInput) -> dict[str, float]:
    """Run the pipeline beside a writer; return how old records were when their commit was done."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name, MemoryWatch() as memory:
        folder = Path(name)
        travel = given.disorder()
        with ms.connect(folder) as log:
            log.create_topic(TOPIC, partitions=PARTITIONS)
        writer = Writer(folder, travel)
        writer.start()
        commits: list[tuple[float, list[int]]] = []
        cpu: list[float] = []
        views: list[ms.View] = []

        def note(_progress: object) -> None:
            at = time.monotonic()
            if not views:  # it is there from the first commit on
                views.append(ms.view(AD_CTR, log=folder))
            position = views[0].position.get(TOPIC, {})
            commits.append((at, [position.get(str(p), 0) for p in range(PARTITIONS)]))
            cpu.append(tree_cpu_s())
            writer.go.set()

        app = build(folder, given.clients, given.stop_rule)
        app.run(
            until=lambda _: writer.ended.is_set() and commits[-1][1] == writer.appends[-1][1],
            show=False,
            on_progress=note,
        )
        with ms.connect(folder) as log:
            overshoot = in_flight(log, given, travel, commits)
    ages, weights = ages_of(writer.appends, commits)
    order = np.argsort(ages)
    share = np.cumsum(weights[order]) / weights.sum()
    p50, p99 = (float(ages[order][np.searchsorted(share, q)]) for q in (0.5, 0.99))
    return {
        "records": float(sum(travel.lengths)),
        "batches": len(commits),
        "p50, s": p50,
        "p99, s": p99,
        "CPU-s per s": (cpu[-1] - cpu[0]) / (commits[-1][0] - commits[0][0]),
        "memory, MiB": memory.mib_max,
        **overshoot,
    }


def ages_of(
    appends: list[tuple[float, list[int]]], commits: list[tuple[float, list[int]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ages of records at their commit, and how many have each, once all is warm."""
    ages, weights = [], []
    began = appends[1][0] + WARM_S
    for partition in range(PARTITIONS):
        read = np.array([ends[partition] for _, ends in commits])
        before = 0
        for at, ends in appends:
            count, before = ends[partition] - before, ends[partition]
            if count and at >= began:
                # A record is counted by the commit that has the last one of its append.
                done = int(np.searchsorted(read, ends[partition]))
                ages.append(commits[done][0] - at)
                weights.append(count)
    return np.array(ages), np.array(weights)


def in_flight(
    log: ms.EventLog,
    given: AdsInput,
    travel: DisorderedRecords,
    commits: list[tuple[float, list[int]]],
) -> dict[str, float]:
    """Return how much was asked for between a budget's last event and the commit that tells of it."""
    told = ads_expected.expected_results(log, given.clients, given.stop_rule).topics[
        "budget-events"
    ]
    exhausted = told.filter(pl.col("budget_event") == "exhausted")
    about = travel.events[travel.order["event"]].hstack(travel.order.select("place"))
    counts, euros = [0], [0.0]
    for client, event_id in exhausted.select("client", "event_id").iter_rows():
        mine = about.filter(pl.col("client") == client)
        used_up = mine.filter(pl.col("event_id") == event_id)
        place, partition = used_up["place"][0], used_up["partition"][0]
        done = next(read[partition] for _, read in commits if read[partition] > place)
        after = mine.filter(
            pl.col("place").is_between(place, done, closed="none"), pl.col("cost_micros") > 0
        )
        counts.append(after.height)
        euros.append(after["cost_micros"].sum() / 1e6)
    return {
        "budgets exhausted": exhausted.height,
        "in flight, events max": max(counts),
        "in flight, EUR max": max(euros),
    }


def main() -> None:
    """Run what the command line asks for, each round in a process of its own; print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=int, default=5_000)
    parser.add_argument("--batch", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh-minutes", type=float, default=2.0)
    parser.add_argument("--only", choices=["catch-up", "freshness"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--contender", choices=["catch-up", "freshness"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender == "catch-up":
        made = AdsInput("generated", rate=given.rate, minutes=given.minutes)
        print(json.dumps(catch_up(made, given.batch, check=given.check)))
        return
    if given.contender == "freshness":
        made = AdsInput("generated", rate=given.rate, minutes=given.fresh_minutes)
        print(json.dumps(freshness(made)))
        return
    for what in (given.only,) if given.only else ("catch-up", "freshness"):
        results = [run_apart(__file__, what, *sys.argv[1:]) for _ in range(given.rounds)]
        rows = [[name, spread([one[name] for one in results], 2)] for name in results[0]]
        table(f"{what}, {given.rounds} rounds", ["figure", "median (least-most)"], rows)


if __name__ == "__main__":
    main()
