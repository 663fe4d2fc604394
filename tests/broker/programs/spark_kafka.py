"""What Spark's own connector for Kafka does with a broker, part by part.

Called with the address of a broker, the folder of the connector's jars, and a folder to work in. Each
part ends as one line: its name, and "ok" or what went wrong.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pyspark
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

ADDRESS, JARS, FOLDER = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
KAFKA = {"kafka.bootstrap.servers": ADDRESS}


def batch(spark: SparkSession, topic: str, **options: str) -> list[Row]:
    """Return the records of a topic, with their headers."""
    reader = spark.read.format("kafka").options(**KAFKA, subscribe=topic, **options)
    return reader.option("includeHeaders", "true").load().collect()


def write_and_read(spark: SparkSession) -> None:
    """A batch is written with keys and headers, and read whole, and from offsets and times."""
    rows = spark.range(2000).selectExpr(
        "CAST(id % 10 AS STRING) AS key",
        "CAST(id AS STRING) AS value",
        "array(struct('a' AS key, CAST('1' AS BINARY) AS value)) AS headers",
    )
    rows.write.format("kafka").options(**KAFKA, topic="spark-in").save()
    found = batch(spark, "spark-in")
    assert sorted(int(row.value) for row in found) == list(range(2000))
    assert all(int(row.value) % 10 == int(row.key) for row in found)
    assert {(one.key, bytes(one.value)) for row in found for one in row.headers} == {("a", b"1")}
    some = batch(spark, "spark-in", endingOffsets='{"spark-in":{"0":5,"1":7}}')
    assert sorted((row.partition, row.offset) for row in some) == [
        (number, offset) for number, end in ((0, 5), (1, 7)) for offset in range(end)
    ]
    later = str(int(time.time() * 1000) + 3_600_000)
    assert not batch(
        spark, "spark-in", startingTimestamp=later, startingOffsetsByTimestampStrategy="latest"
    )


def stream(spark: SparkSession) -> None:
    """A query goes from topic to topic; started again, it goes on where it was."""

    def run() -> None:
        source = spark.readStream.format("kafka").options(
            **KAFKA, subscribe="spark-in", startingOffsets="earliest", maxOffsetsPerTrigger="1500"
        )
        words = source.load().select("key", F.concat(F.lit("seen "), F.col("value")).alias("value"))
        query = (
            words.writeStream.format("kafka")
            .options(**KAFKA, topic="spark-out", checkpointLocation=str(FOLDER / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        assert not query.isActive

    run()
    more = spark.range(2000, 2100).selectExpr("CAST(id AS STRING) AS value")
    more.write.format("kafka").options(**KAFKA, topic="spark-in").save()
    run()
    found = sorted(int(row.value.split()[1]) for row in batch(spark, "spark-out"))
    assert found == list(range(2100))


def main() -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(map(str, sorted(JARS.glob("*.jar")))))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.codegen.wholeStage", "false")  # compiling costs more than it saves here
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    print("version", pyspark.__version__, sep="\t", flush=True)
    parts: list[Callable[[SparkSession], None]] = [write_and_read, stream]
    for part in parts:
        began_s, outcome = time.monotonic(), "ok"
        try:
            part(spark)
        except Exception:  # noqa: BLE001 - the test shows what it was
            outcome = traceback.format_exc().replace("\n", " | ")
        took_ms = round(1000 * (time.monotonic() - began_s))
        print(part.__name__, outcome, took_ms, sep="\t", flush=True)
    spark.stop()


main()
