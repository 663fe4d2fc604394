"""Writes the demo's events into the log at a chosen speed, and goes on exactly after being killed.

The order of arrival is a pure function of the seed, so a partition's log end offset says which of
its records are there already: the feed writes the rest. Nothing is written twice and nothing is
left out, wherever it was killed. `python -m millstream.demo.feed` runs it as a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import polars as pl

from millstream.client import EventLog, connect
from millstream.demo.ads_events import HOUR_US, PARTITIONS, TOPIC, arrivals
from millstream.errors import ConfigError, FolderOwnedError

CHUNK_S = 0.1  # how much running time one append covers
OWNER_WAIT_S = 15.0  # a feed whose parent was killed needs a moment to notice and let go
SPEED = 10.0
"""Hours of the week that pass per second, if not said otherwise: the whole in about 24 seconds."""

_T = TypeVar("_T")


def create_topic(log: EventLog, *, wait_s: float = OWNER_WAIT_S) -> list[int]:
    """Make sure that the topic exists; return how many records each partition has.

    Raises:
        FolderOwnedError: Another process, perhaps another demo's feed, owns the folder and stays.
    """
    with as_owner(log.producer, wait_s=wait_s):
        if TOPIC not in log.topics():
            log.create_topic(TOPIC, partitions=PARTITIONS)
        return log.end_offsets(TOPIC)


def as_owner(write: Callable[[], _T], *, wait_s: float = OWNER_WAIT_S) -> _T:
    """Do what makes this process the folder's owner, waiting for an owner that is going away.

    Raises:
        FolderOwnedError: The owner stays. Stop it, or use another folder.
    """
    pause = threading.Event()
    end = time.monotonic() + wait_s
    while True:
        try:
            return write()
        except FolderOwnedError:
            if time.monotonic() >= end:
                raise
        pause.wait(0.1)


def lengths(records: pl.DataFrame) -> list[int]:
    """Return how many records each partition has once everything has arrived."""
    counts = dict(records["partition"].value_counts().rows())
    return [counts.get(partition, 0) for partition in range(PARTITIONS)]


def remaining(records: pl.DataFrame, ends: Sequence[int]) -> pl.DataFrame:
    """Return the records that the log does not have yet, still in the order of arrival.

    Raises:
        ConfigError: The log has more records than there are: it was filled by something else.
    """
    for partition, (there, all_there_are) in enumerate(zip(ends, lengths(records), strict=True)):
        if there > all_there_are:
            raise ConfigError(
                f"Partition {partition} of {TOPIC} has {there} records, and the demo has "
                f"{all_there_are}. Another program wrote to it; use a folder of the demo's own."
            )
    end = pl.DataFrame(
        {"partition": range(len(ends)), "end": ends},
        schema={"partition": pl.Int32, "end": pl.Int64},
    )
    rest = records.join(end, on="partition", how="left", maintain_order="left")
    return rest.filter(pl.col("place") >= pl.col("end")).drop("end")


def chunks(
    records: pl.DataFrame,
    *,
    speed: float,
    clock: Callable[[], float],
    pause: Callable[[float], object],
) -> Iterator[pl.DataFrame]:
    """Yield the records in the order of arrival, each as soon as its time has come.

    Args:
        speed: Hours of arrival time that pass per second of ``clock``.
        pause: Called with the seconds to let pass when nothing is due.
    """
    if records.is_empty():
        return
    times = records["arrival_us"]
    began_s, began_us = clock(), int(times[0])
    sent, passed_s = 0, 0.0
    while sent < records.height:
        due_us = began_us + passed_s * speed * HOUR_US
        due = int(times.search_sorted(int(due_us), side="right"))
        if due > sent:
            yield records[sent:due]
            sent = due
        if sent < records.height:
            pause(CHUNK_S)
            passed_s = clock() - began_s


def feed(
    log: EventLog,
    seed: int,
    *,
    speed: float = SPEED,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Write what the log lacks of the seed's records; return how many were written.

    Each chunk is durable before the next begins, so what a crash leaves in a partition is always a
    beginning of its records.
    """
    create_topic(log)
    written = 0
    with as_owner(log.producer) as producer:
        # Only as the owner is it sure that nobody, such as an older feed, still adds to these.
        rest = remaining(arrivals(seed), log.end_offsets(TOPIC))
        for chunk in chunks(rest, speed=speed, clock=clock, pause=pause):
            if stopped():
                break
            producer.send_many(
                TOPIC,
                keys=chunk["key"].to_arrow(),
                values=chunk["value"].to_arrow(),
                timestamps_ms=chunk["timestamp_ms"].to_arrow(),
            ).result()
            written += chunk.height
    return written


class Parent:
    """The demo that started this process, as heard on standard input.

    Its first byte means "go on": a reader is at work, so that the events pass before the eyes of
    whoever watches, not while Spark still starts. The end of the input means that it is gone.
    """

    def __init__(self) -> None:
        self._heard = threading.Condition()
        self._go = False
        self._gone = False
        self._held_s = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # The file descriptor itself: a thread that waits in a buffered reader blocks the exit.
        while os.read(sys.stdin.fileno(), 1):
            self._tell(gone=False)
        self._tell(gone=True)

    def _tell(self, *, gone: bool) -> None:
        with self._heard:
            self._go, self._gone = True, gone
            self._heard.notify_all()

    def gone(self) -> bool:
        """Whether the demo has ended."""
        return self._gone

    def clock(self) -> float:
        """Return seconds that pass only after "go on"."""
        return time.monotonic() - self._held_s

    def pause(self, seconds: float) -> None:
        """Let seconds pass, unless the demo ends; the first time wait for "go on"."""
        with self._heard:
            began = time.monotonic()
            self._heard.wait_for(lambda: self._go)
            self._held_s += time.monotonic() - began
            self._heard.wait_for(lambda: self._gone, seconds)


def main() -> None:
    """Feed the log folder that the command line names, as :class:`Parent` says."""
    parser = argparse.ArgumentParser(description="Write the demo's events into a log.")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=float, default=SPEED)
    arguments = parser.parse_args()
    parent = Parent()
    with connect(arguments.log) as log:
        feed(
            log,
            arguments.seed,
            speed=arguments.speed,
            clock=parent.clock,
            pause=parent.pause,
            stopped=parent.gone,
        )


if __name__ == "__main__":
    main()
