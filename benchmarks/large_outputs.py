"""What one batch with many changed rows costs: written by the driver, and by tasks on a cluster.

    python benchmarks/large_outputs.py [--rows 10000000] [--rounds 1]

A standalone cluster of Spark with two executors of one core, on this machine, and a PostgreSQL of its own. A few
events become that many rows in a step, so that little else than the output is measured: to a dataset, to a
view of PostgreSQL with that many keys, and to a topic: of the log in a folder, and of a broker (``topic-broker``). Both ways run the same code but for the decision
which of them writes (`tasks_write_outputs` in `spark/job.py`); topics of a folder are the driver's in any case. Each case is a
driver process of its own.

CPU is that of all processes (driver, executors, JVMs, server); memory the most of the driver's Python process,
which holds what goes through it. Each case ends with a check of the rows that are there.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spark"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import polars as pl
import psycopg
from _measure import spread, table, tree_cpu_s
from broker.broker_process import AsProcess

import millstream as ms
from millstream.client.open import open_reader

FAN_OUT = 1000
EVENTS_TOPIC = "events"
OUTPUT_TOPIC = "rows"
SINKS = ("dataset", "view", "topic", "topic-broker")


def fan_out(events):
    """Make many rows of each event."""
    ids = pl.int_ranges(pl.col("id") * FAN_OUT, (pl.col("id") + 1) * FAN_OUT)
    rows = events.with_columns(id=ids).explode("id")
    return rows.with_columns(
        name=pl.format("row {}", pl.col("id").cast(pl.String).str.zfill(12)), v=pl.col("id") / 7
    )


def declare(log, state, store, sink):
    own = {"state": state} if sink == "topic-broker" else {}
    app = ms.App(f"large-{sink}", log=log, store=store, buckets=4, **own)
    events = app.topic(EVENTS_TOPIC, {"id": int}, key="id", partitions=4)
    rows = events.stream().map_frames(fan_out, rows="any")
    if sink == "dataset":
        rows.dataset(Path(log) / "rows")
    elif sink == "view":
        rows.view("rows", key="id", store=store)
    else:
        rows.to(OUTPUT_TOPIC, key="id", partitions=4)
    return app


def drive(log, state, store, sink, way, master):
    """Run the app as a driver; print what it took."""
    from millstream.spark import job

    if way == "driver":
        job.tasks_write_outputs = lambda _: False
    said = []
    began = time.monotonic()
    declare(log, state, store, sink).run(
        until="caught-up",
        master=master,
        cores=2,
        on_progress=lambda progress: said.append(progress.duration_ms),
        settings={
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "3g",
            "spark.executor.memory": "1g",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        },
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    own = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "batches": len(said),
                "batch_s": sum(said) / 1000,
                "wall_s": time.monotonic() - began,
                "driver_mib": memory,
                "driver_cpu_s": own.ru_utime + own.ru_stime,
            }
        )
    )


def case(folder, server, cluster, rows, sink, way, number):
    """Run one case from an empty log; return what it took, all processes together."""
    log = folder / f"log-{number}"
    if sink != "topic-broker":
        return case_on(log, folder, server, cluster, rows, sink, way, number)
    with AsProcess(log) as broker:
        address = f"kafka://{broker.address}"
        return case_on(address, folder, server, cluster, rows, sink, way, number)


def case_on(log, folder, server, cluster, rows, sink, way, number):
    """Run one case on a log."""
    store, state = server.url(f"large{number}"), folder / f"state-{number}"
    with ms.connect(log) as opened:
        opened.create_topic(EVENTS_TOPIC, partitions=4)
        with opened.producer() as producer:
            for event in range(rows // FAN_OUT):
                producer.send(EVENTS_TOPIC, {"id": event}, key=str(event))
    before = tree_cpu_s()
    places = [str(log), str(state), store]
    program = [sys.executable, __file__, "--drive", *places, sink, way, cluster.master]
    done = subprocess.run(
        program, env=cluster.environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    found["cpu_s"] = tree_cpu_s() - before
    if sink == "dataset":
        ids = ms.dataset(log / "rows").scan().select("id").collect()["id"]
        counted = (len(ids), ids.n_unique())
    elif sink.startswith("topic"):
        keys = pl.concat(list(written_keys(log)))
        counted = (len(keys), keys.n_unique())
    else:
        with psycopg.connect(store) as connection:
            counted = connection.execute("SELECT count(*), count(DISTINCT id) FROM rows").fetchone()
    assert counted == (rows, rows), counted
    return found


def written_keys(log):
    """Yield the keys of the records of the topic, batch by batch."""
    reader = open_reader(log)
    for partition, (start, end) in enumerate(reader.offsets(OUTPUT_TOPIC)):
        for batch in reader.read(OUTPUT_TOPIC, partition, start, end):
            yield pl.Series(batch.column("key"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sinks", default=",".join(SINKS))
    parser.add_argument("--drive", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(*options.drive)
        return
    from clusters import Cluster

    from millstream.testing.postgres import PostgresServer

    results = {}
    with ExitStack() as opened, tempfile.TemporaryDirectory() as root, PostgresServer() as server:
        folder = Path(root)
        (folder / "cluster").mkdir()
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
        cluster = Cluster(folder / "cluster", opened)
        cluster.environment["PYTHONPATH"] = os.pathsep.join(
            [cluster.environment["PYTHONPATH"], str(Path(__file__).parent)]
        )
        cases = [
            (sink, way)
            for sink in options.sinks.split(",")
            for way in (("driver",) if sink == "topic" else ("driver", "tasks"))
        ]
        for number in range(options.rounds * len(cases)):
            of = cases[number % len(cases)]
            found = case(folder, server, cluster, options.rows, *of, number)
            results.setdefault(of, []).append(found)
            print(*of, found, flush=True)
    names = ("cpu_s", "driver_cpu_s", "driver_mib", "batch_s")
    table(
        f"{options.rows:,} changed rows in one batch: median (range)",
        ["written", "CPU s", "of the driver's Python", "its memory, MiB", "batch, s"],
        [
            [f"{sink}, by {way}", *(spread([each[name] for each in found]) for name in names)]
            for (sink, way), found in results.items()
        ],
    )


if __name__ == "__main__":
    main()
