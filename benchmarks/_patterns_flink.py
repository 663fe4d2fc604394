"""The row patterns cep0 to cep3 on PyFlink's MATCH_RECOGNIZE. Runs in an environment of its own, which has apache-flink.

The patterns are those of the Nexmark project. State is on the heap, objects are reused, a checkpoint to a local folder every 10 s.
Results go to ``blackhole``, or to files if they are kept.
"""

from __future__ import annotations

import os
import shutil

from _nexmark_passes import Spec, run_passes
from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableDescriptor, TableEnvironment

ALWAYS = {
    "parallelism.default": "2",
    "pipeline.object-reuse": "true",
    "taskmanager.memory.managed.size": "512m",
    "table.local-time-zone": "UTC",
    "execution.checkpointing.interval": "10 s",
}
AVERAGE = """
    MEASURES FIRST(A.date_time) AS first_time, LAST(A.date_time) AS last_time, AVG(A.price) AS amount
    ONE ROW PER MATCH AFTER MATCH SKIP {skip}
    PATTERN (A+ B) DEFINE A AS AVG(A.price) < 10000
"""
PATTERNS = {
    "cep0": """
        MEASURES S.date_time AS first_time, LAST(U.date_time) AS last_time, LAST(D.price) AS amount
        ONE ROW PER MATCH AFTER MATCH SKIP TO LAST U
        PATTERN (S D+ U)
        DEFINE
            D AS (LAST(D.price, 1) IS NULL AND D.price < S.price) OR D.price < LAST(D.price, 1),
            U AS U.price > LAST(D.price, 1)
    """,
    "cep1": AVERAGE.format(skip="PAST LAST ROW"),
    "cep2": AVERAGE.format(skip="TO NEXT ROW"),
    "cep3": """
        MEASURES A.date_time AS first_time, C.date_time AS last_time, A.price - C.price AS amount
        ONE ROW PER MATCH AFTER MATCH SKIP PAST LAST ROW
        PATTERN (A B* C) WITHIN INTERVAL '5' SECOND
        DEFINE B AS B.price > A.price - 50, C AS C.price < A.price - 50
    """,
}


def bids(spec: Spec) -> TableEnvironment:
    """Make an environment with the table of bids."""
    config = Configuration()
    checkpoints = (spec.out / "flink-checkpoints").absolute().as_uri()
    for name, value in {**ALWAYS, "execution.checkpointing.dir": checkpoints}.items():
        config.set_string(name, value)
    made = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(config)
    table_env = TableEnvironment.create(made.build())
    path = (spec.folder / "flink").absolute().as_uri()
    table_env.execute_sql(
        "CREATE TABLE bids (auction BIGINT, bidder BIGINT, price BIGINT, date_time TIMESTAMP_LTZ(3), "
        "WATERMARK FOR date_time AS date_time - INTERVAL '4' SECOND) WITH ("
        f"'connector' = 'filesystem', 'path' = '{path}', 'format' = 'json', "
        "'json.timestamp-format.standard' = 'ISO-8601')"
    )
    return table_env


def sink(spec: Spec, query: str, *, kept: bool) -> TableDescriptor:
    """Say where the matches go."""
    if not kept:
        return TableDescriptor.for_connector("blackhole").build()
    folder = spec.out / f"flink-{query}"
    shutil.rmtree(folder, ignore_errors=True)
    described = TableDescriptor.for_connector("filesystem")
    return described.option("path", folder.absolute().as_uri()).format("json").build()


def main() -> None:
    os.environ["TZ"] = "UTC"
    spec = Spec.read()

    def run(query: str, _number: int, kept: bool) -> None:  # noqa: FBT001 - as it is called
        found = bids(spec).sql_query(
            "SELECT auction, bidder, first_time, last_time, amount FROM bids MATCH_RECOGNIZE ("
            f"PARTITION BY auction, bidder ORDER BY date_time {PATTERNS[query]})"
        )
        found.execute_insert(sink(spec, query, kept=kept)).wait()

    run_passes(spec, run)


if __name__ == "__main__":
    main()
