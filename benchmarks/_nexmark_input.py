"""Nexmark's input, made once and kept: a log for us, JSON files for the others, rows for the answers.

All hold the same events, in the order of their time. The log has four partitions, which take turns.
Flink reads two files of each kind, one for each of its readers, each with every other part of the
time: its watermarks would run ahead of what is in other files. Plain Spark reads pairs of files, one
pair for each batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from _nexmark_events import EVENTS_PER_S, MADE_BY, START_MS, as_json

# What Millstream reads: --input → the folder of a log with the same records, as JSON; in the columnar
# one its segments are closed and have their archives beside them (Parquet, see docs/archive.md).
LOGS = {"json": "log", "columnar": "log-columnar"}
PARTITIONS = 4
READERS = 2
_CHUNK = 5_000  # events that go to one place before it is the next one's turn
_VERSION = 3  # of the input; another one is made anew


@dataclass(frozen=True)
class Input:
    """Where the input lies. ``batches`` is how many pairs of files there are for plain Spark."""

    folder: Path
    events: int
    batches: int

    @property
    def bids(self) -> int:
        return self.about["records"]["bids"]

    @property
    def about(self) -> dict:
        return json.loads((self.folder / "about.json").read_text())

    @property
    def closed_ms(self) -> int:
        """Windows that end by then are closed in every engine: the last event less 7 s.

        Watermarks are 4 s behind; the partition that got its last chunk first, 2 s more.
        """
        return START_MS + self.events * 1000 // EVENTS_PER_S - 7_000

    def rows(self, kind: str) -> pl.LazyFrame:
        return pl.scan_parquet(self.folder / "rows" / kind / "*.parquet")


def prepared(cache: Path, events: int, batches: int, form: str) -> Input:
    """Make the input, unless the cache has it, and the form of the log."""
    made = Input(cache / f"events-{events}-{batches}-v{_VERSION}", events, batches)
    if not (made.folder / "about.json").exists():
        shutil.rmtree(made.folder, ignore_errors=True)
        made.folder.mkdir(parents=True)
        digest, records = _write_files(made)
        fill_s, fill_cpu_s = _fill_log(made)
        about = {
            "sha256": digest,
            "records": records,
            "fill_s": round(fill_s, 2),
            "fill_cpu_s": round(fill_cpu_s, 2),
        }
        (made.folder / "about.json").write_text(json.dumps(about))
    if form == "columnar" and not (made.folder / LOGS[form]).exists():
        _archive_log(made)
    return made


def _chunks(events: int, batches: int):
    """Yield (batch, number in all, first event, events): chunks do not go over a batch's end."""
    per_batch = -(-events // batches)
    number = 0
    for batch in range(batches):
        end = min((batch + 1) * per_batch, events)
        for start in range(batch * per_batch, end, _CHUNK):
            yield batch, number, start, min(_CHUNK, end - start)
            number += 1


def _write_files(made: Input) -> tuple[str, dict[str, int]]:
    """Write all files but the log; give the hash of all JSON, and how many records there are."""
    digest = hashlib.sha256()
    records = dict.fromkeys(MADE_BY, 0)
    for kind, make in MADE_BY.items():
        for name in (f"flink/{kind}", f"spark/{kind}", f"rows/{kind}"):
            (made.folder / name).mkdir(parents=True)
        ends = [(made.folder / f"flink/{kind}/{n}.json").open("wb") for n in range(READERS)]
        for batch, number, start, count in _chunks(made.events, made.batches):
            frame = make(count, start)
            text = b"".join(value.as_py() + b"\n" for value in as_json(frame))
            digest.update(text)
            records[kind] += frame.height
            ends[number % READERS].write(text)
            pair = made.folder / f"spark/{kind}/{batch:04}-{number % READERS}.json"
            with pair.open("ab") as end:
                end.write(text)
            # Spark takes files in the order of their age.
            os.utime(pair, (START_MS / 1000 + batch * 10, START_MS / 1000 + batch * 10))
            frame.write_parquet(made.folder / f"rows/{kind}/{number:06}.parquet")
        for end in ends:
            end.close()
    return digest.hexdigest(), records


def _archive_log(made: Input) -> None:
    """Copy the log, close its segments, and have them archived; tell what that took."""
    import _nexmark_queries as queries

    import millstream as ms

    half_made = made.folder / "log-half-made"
    shutil.rmtree(half_made, ignore_errors=True)
    shutil.copytree(
        made.folder / LOGS["json"], half_made, ignore=shutil.ignore_patterns("apps", "*.sock")
    )
    used = time.process_time()
    schemas = {"bids": queries.Bid, "auctions": queries.Auction, "persons": queries.Person}
    for topic, schema in schemas.items():
        ms.App("archive", log=half_made).topic(topic, schema).archive(close_active=True)
    print(f"archives were made with {time.process_time() - used:.1f} CPU-s", flush=True)
    half_made.rename(made.folder / LOGS["columnar"])


def _fill_log(made: Input) -> tuple[float, float]:
    """Send the same events to the log; give the wall and CPU seconds that the sending took."""
    import millstream as ms

    wall = cpu = 0.0
    with ms.connect(made.folder / LOGS["json"]) as log, log.producer() as producer:
        for kind, make in MADE_BY.items():
            log.create_topic(kind, partitions=PARTITIONS)
            for _, _, start, count in _chunks(made.events, made.batches):
                values = as_json(make(count, start))
                began, used = time.monotonic(), time.process_time()
                producer.send_many(kind, values=values)
                wall, cpu = wall + time.monotonic() - began, cpu + time.process_time() - used
        began, used = time.monotonic(), time.process_time()
        producer.flush()
        wall, cpu = wall + time.monotonic() - began, cpu + time.process_time() - used
    return wall, cpu
