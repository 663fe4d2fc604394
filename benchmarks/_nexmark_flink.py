"""Nexmark on PyFlink's SQL. Runs in an environment of its own, which has apache-flink and no more.

Parallelism 2, objects reused, state on the heap, a checkpoint to a local folder every 10 s, and
mini-batches for q17 and q18 (of 50,000 rows or 2 s). The queries are the text of the Nexmark project
for Flink, but for q7, which takes the first row by price of each window (Flink's own window ranking)
instead of joining the highest price back: half the work for Flink. Results go to ``blackhole``.
"""

from __future__ import annotations

import os
import shutil

from _nexmark_passes import Spec, run_passes
from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableDescriptor, TableEnvironment

PARALLELISM = 2
COLUMNS = {
    "bids": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, "
    "date_time TIMESTAMP_LTZ(3), extra STRING, p_time AS PROCTIME()",
    "auctions": "id BIGINT, item_name STRING, initial_bid BIGINT, reserve BIGINT, "
    "date_time TIMESTAMP_LTZ(3), expires TIMESTAMP_LTZ(3), seller BIGINT, category BIGINT, "
    "extra STRING",
    "persons": "id BIGINT, name STRING, state STRING, date_time TIMESTAMP_LTZ(3), extra STRING",
}
HOPS = """
    SELECT auction, COUNT(*) AS num, window_start, window_end
    FROM TABLE(HOP(TABLE bids, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
    GROUP BY auction, window_start, window_end
"""
QUERIES = {
    "q0": "SELECT auction, bidder, price, channel, url, date_time, extra FROM bids",
    "q1": """SELECT auction, bidder, CAST(0.908 * price AS DECIMAL(23, 3)) AS price, date_time, extra
        FROM bids""",
    "q2": "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
    "q5": f"""SELECT hops.auction, hops.num, hops.window_end
        FROM ({HOPS}) AS hops
        JOIN (
            SELECT MAX(num) AS most, window_start, window_end FROM ({HOPS})
            GROUP BY window_start, window_end
        ) AS best
        ON hops.window_start = best.window_start AND hops.window_end = best.window_end
            AND hops.num >= best.most""",
    "q7": """SELECT auction, bidder, price, date_time, extra, window_end FROM (
            SELECT *, ROW_NUMBER() OVER (
                PARTITION BY window_start, window_end ORDER BY price DESC) AS place
            FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
        ) WHERE place <= 1""",
    "q8": """SELECT p.id, p.name, p.window_start FROM (
            SELECT id, name, window_start, window_end
            FROM TABLE(TUMBLE(TABLE persons, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY id, name, window_start, window_end
        ) AS p JOIN (
            SELECT seller, window_start, window_end
            FROM TABLE(TUMBLE(TABLE auctions, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY seller, window_start, window_end
        ) AS a
        ON p.id = a.seller AND p.window_start = a.window_start AND p.window_end = a.window_end""",
    "q11": """SELECT bidder, COUNT(*) AS num, window_start, window_end
        FROM TABLE(SESSION(
            TABLE bids PARTITION BY bidder, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end""",
    "q12": """SELECT bidder, COUNT(*) AS num, window_start, window_end
        FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(p_time), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end""",
    "q17": """SELECT auction, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`,
            COUNT(*) AS total,
            COUNT(*) FILTER (WHERE price < 10000) AS rank1,
            COUNT(*) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2,
            COUNT(*) FILTER (WHERE price >= 1000000) AS rank3,
            MIN(price) AS `min`, MAX(price) AS `max`, AVG(price) AS `avg`, SUM(price) AS `sum`
        FROM bids GROUP BY auction, DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q18": """SELECT auction, bidder, price, channel, url, date_time, extra FROM (
            SELECT *, ROW_NUMBER() OVER (
                PARTITION BY bidder, auction ORDER BY date_time DESC) AS place
            FROM bids
        ) WHERE place <= 1""",
}
UPDATING = ("q17", "q18")
ALWAYS = {
    "parallelism.default": str(PARALLELISM),
    "pipeline.object-reuse": "true",
    "taskmanager.memory.managed.size": "512m",
    "table.local-time-zone": "UTC",
    "execution.checkpointing.interval": "10 s",
}
MINI_BATCH = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "2 s",
    "table.exec.mini-batch.size": "50000",
}


def tables(spec: Spec, query: str) -> TableEnvironment:
    """Make an environment for one query, with the source tables."""
    config = Configuration()
    checkpoints = spec.out / "flink-checkpoints"
    settings = {**ALWAYS, "execution.checkpointing.dir": checkpoints.absolute().as_uri()}
    if query in UPDATING:
        settings |= MINI_BATCH
    for name, value in settings.items():
        config.set_string(name, value)
    made = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(config)
    table_env = TableEnvironment.create(made.build())
    for kind, columns in COLUMNS.items():
        path = (spec.folder / "flink" / kind).absolute().as_uri()
        table_env.execute_sql(
            f"CREATE TABLE {kind} ({columns}, "
            "WATERMARK FOR date_time AS date_time - INTERVAL '4' SECOND) WITH ("
            f"'connector' = 'filesystem', 'path' = '{path}', 'format' = 'json', "
            "'json.timestamp-format.standard' = 'ISO-8601')"
        )
    return table_env


def sink(spec: Spec, query: str, *, kept: bool) -> TableDescriptor:
    """Say where the results go: to files if they are kept, else nowhere."""
    if not kept:
        return TableDescriptor.for_connector("blackhole").build()
    folder = spec.out / f"flink-{query}"
    shutil.rmtree(folder, ignore_errors=True)
    described = TableDescriptor.for_connector("filesystem").option(
        "path", folder.absolute().as_uri()
    )
    return described.format("debezium-json" if query in UPDATING else "json").build()


def main() -> None:
    os.environ["TZ"] = "UTC"
    spec = Spec.read()

    def run(query: str, _number: int, kept: bool) -> None:  # noqa: FBT001 - as it is called
        table_env = tables(spec, query)
        table_env.sql_query(QUERIES[query]).execute_insert(sink(spec, query, kept=kept)).wait()

    run_passes(spec, run)


if __name__ == "__main__":
    main()
