"""Reading five million JSON records back: from the segments of the log, and from their archives.

The same plans read the same records both ways, in processes of their own with one thread each: all 7
columns, then the 2 that a count by minute and ad needs. What is measured is what a task of a job does
before its first step: read, decode, give columns. Equal sums of the columns are checked first.

    python benchmarks/replay_columnar.py [--events 5000000] [--pairs 3]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
from _measure import run_apart, spread, table
from json_windows import AdEvent, values

PARTITIONS = 4
BATCH = 250_000


def fill(folder: Path, events: int) -> dict:
    """Write the log and archive it; give the sizes and what archiving cost."""
    import millstream as ms

    with ms.connect(folder) as log, log.producer() as producer:
        log.create_topic("events", partitions=PARTITIONS)
        for start in range(0, events, BATCH):
            producer.send_many("events", values=values(min(BATCH, events - start), start))
    before_s = time.process_time()
    found = ms.App("bench", log=folder).topic("events", AdEvent).archive(close_active=True)
    return {
        "archive_cpu_s": time.process_time() - before_s,
        "segment_bytes": sum(one.segment_bytes for one in found),
        "archive_bytes": sum(one.archive_bytes for one in found),
    }


def source_of(folder: Path, columns: str):
    """Give the plan's source for all columns, or for the two that counting takes."""
    import millstream as ms

    app = ms.App("bench", log=folder)
    stream = app.topic("events", AdEvent).stream(time="at")
    if columns == "2":
        counted = stream.window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count())
        counted.view("by_ad")
    else:
        stream.view("events", key="event_id")
    return app.plan().sources[0]


def read(folder: Path, way: str, columns: str) -> dict:
    """Read and decode everything once; give CPU seconds and sums to compare."""
    from millstream.engine.source.split_reader import CHUNK_BYTES, SplitReader
    from millstream.kernels.decode.records import RecordDecoder, columns_read
    from millstream.log.reader import LogReader

    source = source_of(folder, columns)
    decoder = RecordDecoder(source.values, source.fields)
    reader = LogReader(folder)
    records = SplitReader(reader, source)

    def batches(partition: int, start: int, end: int):
        if way == "archive":
            return records.read(partition, start, end)
        wanted = columns_read(source.fields)
        return reader.read("events", partition, start, end, columns=wanted, bytes_max=CHUNK_BYTES)

    ranges = reader.offsets("events")
    for batch in batches(0, *ranges[0]):  # libraries load
        decoder.decode(batch, 0)
        break
    rows, sums, cpu_s, wall_s = 0, {}, 0.0, 0.0
    for partition, (start, end) in enumerate(ranges):
        found = iter(batches(partition, start, end))
        while True:
            began_s, began_wall_s = time.process_time(), time.monotonic()
            batch = next(found, None)
            decoded = None if batch is None else decoder.decode(batch, partition)
            cpu_s += time.process_time() - began_s
            wall_s += time.monotonic() - began_wall_s
            if decoded is None:
                break
            rows += decoded.table.num_rows
            add(sums, pl.from_arrow(decoded.table))
    return {"cpu_s": cpu_s, "wall_s": wall_s, "rows": rows, "sums": sums}


def add(sums: dict, frame: pl.DataFrame) -> None:
    """Add up a number for each column that any other value in it would change."""
    for name in frame.columns:
        sums[name] = (sums.get(name, 0) + int(frame[name].hash(7).sum() or 0)) % (1 << 64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        folder, way, columns = options.contender
        print(json.dumps(read(Path(folder), way, columns)))
        return
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        made = fill(Path(name), options.events)
        runs: dict[tuple[str, str], list[dict]] = {}
        for pair in range(options.pairs):
            for columns in ("7", "2"):
                ways = ("segments", "archive") if pair % 2 == 0 else ("archive", "segments")
                for way in ways:
                    runs.setdefault((way, columns), []).append(
                        run_apart(__file__, name, way, columns)
                    )
                one, other = (runs[way, columns][-1] for way in ways)
                if (one["sums"], one["rows"]) != (other["sums"], other["rows"]):
                    sys.exit("the records differ: no timing counts")
    report(options.events, made, runs)


def report(events: int, made: dict, runs: dict[tuple[str, str], list[dict]]) -> None:
    rows = []
    for columns in ("7", "2"):
        both = [runs[way, columns] for way in ("segments", "archive")]
        ratio = [a["cpu_s"] / b["cpu_s"] for a, b in zip(*both, strict=True)]
        for way, found in zip(("segments", "archive"), both, strict=True):
            cpu_s = [run["cpu_s"] for run in found]
            rate = [events / one / 1e6 for one in cpu_s]
            wall_s = spread([run["wall_s"] for run in found], 2)
            more = spread(ratio, 1) if way == "archive" else ""
            rows.append([columns, way, spread(cpu_s, 2), spread(rate, 2), wall_s, more])
    table(
        f"{events:,} JSON records read and decoded (equal)",
        [
            "columns",
            "from",
            "CPU s",
            "M records per CPU-second",
            "wall s",
            "segments / archive, CPU",
        ],
        rows,
    )
    share = made["archive_bytes"] / made["segment_bytes"]
    print(
        f"  segments {made['segment_bytes'] / 1e6:,.0f} MB, archives {made['archive_bytes'] / 1e6:,.0f} MB "
        f"({share:.0%}); archiving took {made['archive_cpu_s']:.1f} CPU-seconds, "
        f"{events / made['archive_cpu_s'] / 1e6:.2f} M records each"
    )


if __name__ == "__main__":
    main()
