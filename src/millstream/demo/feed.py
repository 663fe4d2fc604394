"""Writes the demo's events into the log at a chosen speed, and goes on exactly after being killed.

The order of arrival is a pure function of the input, so a partition's log end offset says which of
its records are there already: the feed writes the rest. Nothing is written twice and nothing is
left out, wherever it was killed. It works in a thread beside the pipeline, whose process owns the
log, where that is a folder.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import polars as pl

from millstream.client import EventLog, connect
from millstream.client.producer import Producer
from millstream.demo.ads_disorder import DisorderedRecords
from millstream.demo.ads_events import PARTITIONS, SECOND_US, TOPIC
from millstream.errors import ConfigError, FolderOwnedError, MillstreamError

CHUNK_S = 0.1  # how much running time one append covers
OWNER_WAIT_S = 15.0  # the JVM of a demo that was killed needs a moment to notice and let go

_T = TypeVar("_T")


def create_topic(log: EventLog, *, wait_s: float = OWNER_WAIT_S) -> list[int]:
    """Make sure that the topic exists; return how many records each partition has.

    Raises:
        FolderOwnedError: Another process, perhaps another demo, owns the folder and stays.
    """
    retry_while_owned(log.acquire_ownership, wait_s=wait_s)
    log.create_topic(TOPIC, partitions=PARTITIONS, exist_ok=True)
    return log.end_offsets(TOPIC)


def retry_while_owned(write: Callable[[], _T], *, wait_s: float = OWNER_WAIT_S) -> _T:
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


def remaining(travel: DisorderedRecords, ends: Sequence[int]) -> pl.DataFrame:
    """Return the records that the log does not have yet, still in the order of arrival.

    Raises:
        ConfigError: The log has more records than there are: it was filled by something else.
    """
    for partition, (there, all_there_are) in enumerate(zip(ends, travel.lengths, strict=True)):
        if there > all_there_are:
            raise ConfigError(
                f"Partition {partition} of {TOPIC} has {there} records, and the demo has "
                f"{all_there_are}. Another program wrote to it; use a folder of the demo's own."
            )
    end = pl.DataFrame(
        {"partition": range(len(ends)), "end": ends},
        schema={"partition": pl.Int32, "end": pl.Int64},
    )
    rest = travel.order.join(end, on="partition", how="left", maintain_order="left")
    return rest.filter(pl.col("place") >= pl.col("end")).drop("end")


def chunks(
    records: pl.DataFrame,
    *,
    speed: float,
    clock: Callable[[], float],
    pause: Callable[[float], object],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[pl.DataFrame]:
    """Yield the records in the order of arrival, each as soon as its time has come.

    Args:
        speed: Seconds of arrival time that pass per second of ``clock``.
        pause: Called with the seconds to let pass when nothing is due.
        stopped: Whether to end before all are sent; asked after every pause.
    """
    if records.is_empty():
        return
    times = records["arrival_us"]
    began_s, began_us = clock(), int(times[0])
    sent, passed_s = 0, 0.0
    while sent < records.height and not stopped():
        due_us = began_us + passed_s * speed * SECOND_US
        due = int(times.search_sorted(int(due_us), side="right"))
        if due > sent:
            yield records[sent:due]
            sent = due
        if sent < records.height:
            pause(CHUNK_S)
            passed_s = clock() - began_s


def feed(
    log: EventLog,
    travel: DisorderedRecords,
    *,
    speed: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
    stopped: Callable[[], bool] = lambda: False,
    on_append: Callable[[pl.DataFrame], object] = lambda _rows: None,
    closes: bool = False,
) -> int:
    """Write what the log lacks of the records; return how many were written.

    Each chunk is durable before the next begins, so what a crash leaves in a partition is always a
    beginning of its records.

    Args:
        on_append: Called with the rows of ``order`` that have been written, after each append.
        closes: Write the last heartbeats also if it is stopped before; it cannot go on afterwards.
    """
    create_topic(log)
    written = 0
    with log.producer() as producer:
        # Only as the owner is it sure that nobody, such as an older demo, still adds to these.
        rest = remaining(travel, log.end_offsets(TOPIC))
        for chunk in chunks(rest, speed=speed, clock=clock, pause=pause, stopped=stopped):
            _append(producer, travel.records(chunk))
            on_append(chunk)
            written += chunk.height
        if closes and written < rest.height:
            _append(producer, travel.records(travel.last_heartbeats))
            on_append(travel.last_heartbeats)
            written += travel.last_heartbeats.height
    return written


def _append(producer: Producer, records: pl.DataFrame) -> None:
    producer.send_many(
        TOPIC,
        keys=records["key"].to_arrow(),
        values=records["value"].to_arrow(),
        timestamps_ms=records["timestamp_ms"].to_arrow(),
    ).result()


class FeedThread:
    """A feed at work in a thread of its own; use it in a ``with`` statement.

    It holds after its first records until somebody reads them, so that the events pass before the eyes
    of whoever watches, not while Spark still starts. When it fails it calls ``interrupt``, which by
    default is Ctrl-C for the main thread, because the job would wait for records that do not come;
    :meth:`check` then says why. ``on_append`` and ``closes`` are as in :func:`feed`; the thread calls the first.
    """

    def __init__(
        self,
        address: Path | str,
        travel: DisorderedRecords,
        speed: float,
        *,
        interrupt: Callable[[], object] | None = None,
        on_append: Callable[[pl.DataFrame], object] = lambda _rows: None,
        closes: bool = False,
    ) -> None:
        self._on_append, self._closes = on_append, closes
        self._interrupt = interrupt or interrupt_main
        self._interrupted = threading.Condition()
        self._go = self._ended = False
        self._gone_at_s: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(address, travel, speed),
            name="millstream-demo-feed",
            daemon=True,
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the feed end where it is, and wait until it has."""
        with self._interrupted:
            self._ended = True
            self._interrupted.notify_all()
        self._thread.join()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, by itself or not."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Signal the feed that the pipeline reads what it writes."""
        with self._interrupted:
            self._go = True
            self._interrupted.notify_all()

    def check(self) -> None:
        """Raise what the feed failed with, if it did."""
        if self._error is not None:
            raise self._error

    def _run(self, address: Path | str, travel: DisorderedRecords, speed: float) -> None:
        try:
            with connect(address) as log:
                feed(
                    log,
                    travel,
                    speed=speed,
                    clock=self._clock,
                    pause=self._pause,
                    stopped=lambda: self._ended,
                    on_append=self._on_append,
                    closes=self._closes,
                )
        except (MillstreamError, OSError) as error:
            self._error = error
            self._interrupt()

    def _clock(self) -> float:
        """Return the seconds that have passed since "go on"."""
        return 0.0 if self._gone_at_s is None else time.monotonic() - self._gone_at_s

    def _pause(self, seconds: float) -> None:
        """Let seconds pass, unless the demo ends; the first time wait for "go on"."""
        with self._interrupted:
            self._interrupted.wait_for(lambda: self._go or self._ended)
            if self._gone_at_s is None:
                self._gone_at_s = time.monotonic()
            self._interrupted.wait_for(lambda: self._ended, seconds)


def interrupt_main() -> None:
    """Send the main thread what Ctrl-C sends."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
