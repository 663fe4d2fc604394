"""Jobs of ``process_state.py``, each in a process of its own: ours by row or in frames, and PySpark's transformWithState.

Two passes over the same rows, each with state that is empty first; the CPU of the second is printed. Ours reads JSON from a log, the peer
parquet files, one for each batch. The output goes nowhere, and is counted.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from _measure import plain_spark, tree_cpu_s

CORES = 2


@dataclass
class Event:
    key: int
    at: datetime


def ours(kind: str, folder: Path, batches: int, rows: int, number: int) -> int:
    """Run our job once; return how many rows came out."""
    import process_state as shared

    import millstream as ms

    app = ms.App(f"{kind}-{number}", log=folder / "log")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark("0 seconds", idle=None)
    )
    made = stream.process(shared.FUNCTIONS[kind](), by="key", schema=shared.SCHEMA, order="arrival")
    count = folder / f"count-{kind}-{number}"
    count.write_text("0")

    def add(frame, _context):
        count.write_text(str(int(count.read_text()) + frame.height))

    made.foreach(add)
    app.run(until="caught-up", cores=CORES, rows_per_batch=rows // batches, show=False)
    return int(count.read_text())


def peer(folder: Path, number: int) -> int:
    """Run transformWithState once; return how many rows came out."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import LongType, StructField, StructType

    whole = StructType([StructField("count", LongType())])

    class Counter(StatefulProcessor):
        def init(self, handle):
            self.state = handle.getValueState("count", whole)

        def handleInputRows(self, key, rows, _timers):  # noqa: N802 - Spark's name
            known = self.state.get()
            count = known[0] if known else 0
            for _ in rows:
                count += 1
                yield Row(key=key[0], count=count)
            self.state.update((count,))

        def close(self):
            pass

    # A busy machine may take long to start a worker.
    spark = plain_spark(CORES, settings={"spark.python.authenticate.socketTimeout": "300s"})
    out = StructType([StructField("key", LongType()), StructField("count", LongType())])
    read = spark.readStream.schema("key long, at timestamp").option("maxFilesPerTrigger", 1)
    made = (
        read.parquet(str(folder / "parquet"))
        .groupBy("key")
        .transformWithState(
            statefulProcessor=Counter(),
            outputStructType=out,
            outputMode="Update",
            timeMode="None",
        )
    )
    total = []
    checkpoint = folder / f"checkpoint-{number}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    query = (
        made.writeStream.outputMode("update")
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(lambda frame, _: total.append(frame.count()))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(total)


def main() -> None:
    _, kind, folder, batches, rows = sys.argv[1:]
    place = Path(folder)
    if kind == "peer":
        run = functools.partial(peer, place)
    else:
        import millstream as ms

        shutil.rmtree(place / "log" / "apps", ignore_errors=True)
        ms.App("session", log=place / "log").spark_session(cores=CORES)
        run = functools.partial(ours, kind, place, int(batches), int(rows))
    came = run(0)
    begun = tree_cpu_s()
    again = run(1)
    used = tree_cpu_s() - begun
    assert came == again
    print(json.dumps({"cpu_s": used, "rows": again}))


if __name__ == "__main__":
    main()
