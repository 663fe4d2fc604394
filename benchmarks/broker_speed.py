"""The broker beside one node of Apache Kafka: same machine, same client, same durability.

Each side is a process of its own, started anew for each round; rounds alternate which side is first.
The client is confluent-kafka, in this process, with the same settings for both. Asked for:

- start: from the process's beginning until it answers who it is, and until a first record is acknowledged
- produce, fetch: batched, 4 partitions, records of 100 bytes and 1 KiB, acknowledged by all
- acknowledge: one record at a time, each waited for
- end to end: from sending to having it in a consumer, 200 records a second
- memory and CPU seconds of the server's process

"Synced" is a sync of the disk before each acknowledgement: what the broker always does when it is asked
for ``acks=all``, and Kafka with ``flush.messages=1``. Kafka "as it comes" acknowledges what is in the
page cache, and leaves the disk to replicas, of which there are none here.

    python benchmarks/broker_speed.py [--rounds 3] [--records 300000] [--single 300] [--lean-java]

Kafka runs with the options of its own start script (heap of 1 GiB, G1), or with those of the test kit
(``--lean-java``: 512 MiB, serial collector, first compiler only), which start sooner and take less.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _measure import TICKS, spread, table, tree_memory_mib
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millstream.testing.kafka import ApacheKafka

PARTITIONS = 4
WAIT_S = 120
SIZES = {"100 B": (100, 1), "1 KiB": (1024, 5)}  # bytes, and by how much fewer records
SYNCED = {"flush.messages": "1"}
_START_SCRIPT = [
    "-Xmx1G",
    "-Xms1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
]

Figures = dict[tuple[str, str], list[float]]


@dataclass
class Server:
    """A side that is up."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:13])) / TICKS

    def age_s(self) -> float:
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / TICKS


class _Kafka(ApacheKafka):
    def _words(self, program: list[str]) -> list[str]:
        return [str(self._java), *_START_SCRIPT, "-cp", f"{self._jars}/*", *program]


@contextlib.contextmanager
def kafka(*, lean: bool) -> Iterator[Server]:
    with (ApacheKafka if lean else _Kafka)() as node:
        yield Server(node.address, node.pid)


@contextlib.contextmanager
def ours() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        ready = Path(name, "ready")
        words = [sys.executable, "-m", "millstream", "broker", str(Path(name, "data"))]
        words += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                time.sleep(0.005)
            yield Server(ready.read_text().strip(), process.pid)
        finally:
            process.terminate()
            process.wait()


# -- the client -------------------------------------------------------------------------------


def producer(server: Server, **more: object) -> Producer:
    given = {"bootstrap.servers": server.address, "enable.idempotence": True, "log_level": 0}
    return Producer({**given, **{name.replace("_", "."): value for name, value in more.items()}})


def consumer(server: Server, topic: str) -> Consumer:
    made = Consumer(
        {
            "bootstrap.servers": server.address,
            "group.id": "g",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    made.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    return made


def make_topics(server: Server, names: dict[str, dict[str, str]]) -> None:
    admin = AdminClient({"bootstrap.servers": server.address, "log_level": 0})
    topics = [NewTopic(name, PARTITIONS, 1, config=config) for name, config in names.items()]
    for made in admin.create_topics(topics).values():
        made.result(WAIT_S)


def send(server: Server, topic: str, count: int, size: int) -> None:
    made = producer(server, linger_ms=5, batch_size=1_000_000, batch_num_messages=100_000)
    value = os.urandom(size)
    for number in range(count):
        while True:
            try:
                made.produce(topic, value, partition=number % PARTITIONS)
            except BufferError:
                made.poll(0.05)
            else:
                break
    assert made.flush(WAIT_S) == 0


def receive(server: Server, topic: str, count: int) -> None:
    reader, found = consumer(server, topic), 0
    while found < count:
        found += len(reader.consume(10_000, 1.0))
    reader.close()


def acknowledge(server: Server, topic: str, count: int) -> list[float]:
    made = producer(server, linger_ms=0)
    took = []
    for number in range(count + 20):
        began = time.perf_counter()
        made.produce(topic, bytes(100), partition=0)
        assert made.flush(WAIT_S) == 0
        if number >= 20:
            took.append(1000 * (time.perf_counter() - began))
    return took


def end_to_end(server: Server, topic: str, count: int) -> list[float]:
    took: list[float] = []
    reader = consumer(server, topic)
    while not reader.assignment() or reader.poll(0.3) is not None:
        pass

    def listen() -> None:
        while len(took) < count + 20:
            found = reader.poll(0.5)
            if found is not None:
                took.append(1000 * (time.perf_counter() - float(found.value())))

    thread = threading.Thread(target=listen)
    thread.start()
    made = producer(server, linger_ms=0)
    for _ in range(20):  # until it has its right to send, and both have their connections
        made.produce(topic, repr(time.perf_counter()).encode(), partition=0)
        assert made.flush(WAIT_S) == 0
    for _ in range(count):
        made.produce(topic, repr(time.perf_counter()).encode(), partition=0)
        made.poll(0.005)
    assert made.flush(WAIT_S) == 0
    thread.join(WAIT_S)
    reader.close()
    return took[20:]


# -- a round ----------------------------------------------------------------------------------


class Side:
    """What one side came to, in figures by name."""

    def __init__(self, name: str, server: Server, figures: Figures) -> None:
        self._name, self._server, self._figures = name, server, figures

    def note(self, what: str, value: float, side: str = "") -> None:
        self._figures.setdefault((what, side or self._name), []).append(value)

    def started(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._server.address, "log_level": 0})
        admin.list_topics(timeout=WAIT_S)
        self.note("start: answers, s", self._server.age_s())
        self.note("memory after the start, MiB", tree_memory_mib(self._server.pid))
        make_topics(self._server, {"first": {}})
        made = producer(self._server, linger_ms=0)
        made.produce("first", b"first")
        assert made.flush(WAIT_S) == 0
        self.note("start: first record acknowledged, s", self._server.age_s())

    def throughput(self, side: str, config: dict[str, str], records: int) -> None:
        for title, (size, fewer) in SIZES.items():
            topic, count = f"t-{size}-{len(config)}", records // fewer
            make_topics(self._server, {topic: config})
            for what in ("produce", "fetch"):
                cpu_s, began = self._server.cpu_s(), time.perf_counter()
                if what == "produce":
                    send(self._server, topic, count, size)
                else:
                    receive(self._server, topic, count)
                took_s = time.perf_counter() - began
                self.note(f"{what} {title}, records/s", count / took_s, side)
                cpu_s = self._server.cpu_s() - cpu_s
                self.note(f"{what} {title}, server CPU µs/record", 1e6 * cpu_s / count, side)

    def latency(self, side: str, config: dict[str, str], single: int) -> None:
        for what, work in (("acknowledge", acknowledge), ("end to end", end_to_end)):
            topic = f"{what.replace(' ', '-')}-{len(config)}"
            make_topics(self._server, {topic: config})
            cpu_s = self._server.cpu_s()
            took = sorted(work(self._server, topic, single))
            self.note(f"{what}, p50 ms", statistics.median(took), side)
            self.note(f"{what}, p99 ms", took[int(0.99 * len(took))], side)
            cpu_s = self._server.cpu_s() - cpu_s
            self.note(f"{what}, server CPU µs/record", 1e6 * cpu_s / single, side)

    def ended(self) -> None:
        self.note("memory after all, MiB", tree_memory_mib(self._server.pid))


OURS, SYNCED_KAFKA, KAFKA = "ours, synced", "Kafka, synced", "Kafka, as it comes"


def run_round(which: str, figures: Figures, options: argparse.Namespace) -> None:
    with ours() if which == OURS else kafka(lean=options.lean_java) as server:
        side = Side(which, server, figures)
        side.started()
        make_topics(server, {"warm": {}})
        send(server, "warm", options.records // 4, 100)
        receive(server, "warm", options.records // 4)
        of_kafka = [(SYNCED_KAFKA, SYNCED), (KAFKA, {})]
        variants: list[tuple[str, dict[str, str]]] = [(OURS, {})] if which == OURS else of_kafka
        for name, config in variants:
            side.throughput(name, config, options.records)
            side.latency(name, config, options.single)
        side.ended()


def show(figures: Figures) -> None:
    names = list(dict.fromkeys(what for what, _ in figures))
    rows: list[list[object]] = []
    for what in names:
        mine = figures[what, OURS]
        kafkas = figures.get((what, SYNCED_KAFKA)), figures.get((what, KAFKA))
        digits = 0 if statistics.median(mine) > 100 else 2
        cells: list[object] = [what, spread(mine, digits)]
        for values in kafkas:
            if values is None:
                cells += ["", ""]
                continue
            ratio = statistics.median(values) / statistics.median(mine)
            cells += [spread(values, digits), f"{ratio:.2f}"]
        rows.append(cells)
    header = ["", OURS, SYNCED_KAFKA, "ratio", KAFKA, "ratio"]
    table("medians (range); ratio is Kafka's median to ours", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--single", type=int, default=300)
    parser.add_argument("--lean-java", action="store_true")
    options = parser.parse_args()
    figures: Figures = {}
    print(f"load at the start: {os.getloadavg()}")
    for number in range(options.rounds):
        sides = [OURS, KAFKA]
        for which in sides if number % 2 == 0 else reversed(sides):
            run_round(which, figures, options)
    show(figures)
    print(f"load at the end: {os.getloadavg()}")


if __name__ == "__main__":
    main()
