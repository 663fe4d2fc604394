"""Records per CPU-second of each source, into a log in a folder: reading, checking and writing, of the process alone.

``registry-…`` are values of a schema registry that are decoded into a table, without a log.

The same events of five fields, about 100 bytes as JSON, are put outside first: into ten files of a folder, or a stream of a
Redis server, or a queue of RabbitMQ, where each has an id. Each source runs in a process of its own, some times over. A server's own CPU is not counted.

    python benchmarks/sources.py [--records 200000] [--repeats 3] [--source csv ...]
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SOURCES = (
    "json-lines",
    "json-lines.gz",
    "csv",
    "csv-typed",
    "parquet",
    "generate",
    "redis",
    "amqp",
    "http-poll",
    "registry-avro",
    "registry-protobuf",
    "registry-json",
)
PAGE = 1000  # rows of an answer
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "long"},
        {"name": "product", "type": "string"},
        {"name": "cents", "type": "long"},
        {"name": "placed", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
PROTOBUF = """
syntax: "proto3" name: "order.proto" dependency: "google/protobuf/timestamp.proto"
message_type { name: "Order"
  field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "customer" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "product" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "cents" number: 4 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "placed" number: 5 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
}"""
FILES = 10


def events(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield events."""
    for n in range(first, first + count):
        yield {
            "id": n,
            "customer": n * 7919 % 100_000,
            "product": f"product-{n % 977}",
            "cents": n * 31 % 100_000,
            "placed": "2026-01-02T03:04:05.678Z",
        }


def put_files(source: str, folder: Path, records: int) -> None:
    """Write the files of a folder."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(FILES):
        rows = list(events(number * records // FILES, records // FILES))
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        name = folder / f"{number}"
        if source == "json-lines":
            name.with_suffix(".jsonl").write_bytes(lines)
        elif source == "json-lines.gz":
            Path(f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
        elif source == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), name.with_suffix(".parquet"))
        else:
            with name.with_suffix(".csv").open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


def connector_of(source: str, place: str, records: int) -> Any:
    """Return the connector that is measured."""
    import millstream as ms

    if source == "generate":
        schema = {"id": int, "customer": range(100_000), "product": str, "ok": bool, "x": float}
        return ms.generate(schema, count=records)
    if source == "http-poll":
        return ms.http_poll(place, rows="data", next="next", cursor="id", key="id")
    if source == "redis":
        return ms.redis_stream(place, "events")
    if source == "amqp":
        return ms.amqp(place, "events")
    types = {"id": int, "customer": int, "cents": int} if source == "csv-typed" else None
    return ms.folder(place, key="id", columns=types, settled="0 seconds")


def registry_values(kind: str, records: int) -> list[bytes]:
    """Return events as a registry's clients write them, all of the schema 1."""
    import io
    from datetime import datetime

    prefix, values = b"\0\0\0\0\1", []
    if kind == "protobuf":
        from google.protobuf import message_factory

        (order,) = message_factory.GetMessageClassesForFiles(["order.proto"], order_pool()).values()
    if kind == "avro":
        import fastavro

        schema = fastavro.parse_schema(AVRO)
    for event in events(0, records):
        placed = datetime.fromisoformat(event["placed"])
        if kind == "json":
            values.append(prefix + json.dumps(event).encode())
        elif kind == "avro":
            out = io.BytesIO()
            fastavro.schemaless_writer(out, schema, event | {"placed": placed})
            values.append(prefix + out.getvalue())
        else:
            message = order(**{name: event[name] for name in event if name != "placed"})
            message.placed.FromDatetime(placed)
            values.append(prefix + b"\0" + message.SerializeToString())
    return values


def order_pool() -> Any:
    """Return the pool of Protobuf's that has the message of the events."""
    from google.protobuf import descriptor_pb2, descriptor_pool, text_format, timestamp_pb2

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(text_format.Parse(PROTOBUF, descriptor_pb2.FileDescriptorProto()))
    return pool


def decode(kind: str, place: str, records: int) -> None:
    """Decode values of a registry in batches, and print the CPU-seconds."""
    from datetime import datetime

    import pyarrow as pa

    from millstream.kernels.decode.registry_values import RegistryFormat
    from millstream.pipeline.schema import fields_of

    types = {"id": int, "customer": int, "product": str, "cents": int, "placed": datetime}
    values = registry_values(kind, records)
    decoder = RegistryFormat(place).decoder(fields_of(types, what="events"))
    decoder.decode(pa.array(values[:10], pa.binary()))  # what is loaded once is not counted
    before = time.process_time()
    good = sum(
        len(decoder.decode(pa.array(values[first : first + 10_000], pa.binary())).good)
        for first in range(0, records, 10_000)
    )
    print(time.process_time() - before)
    assert good == records


@contextmanager
def serve(source: str, records: int) -> Iterator[str]:
    """Serve events in pages, or the schemas of a registry, from a process of its own; yield its address."""
    command = [sys.executable, __file__, "--serve", source, "--records", str(records)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def answer_with(source: str, records: int) -> None:
    """Be the server, until the process is killed."""
    import base64

    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import http_service
    import registry_server

    def page(asked: Any, _number: int) -> Any:
        first = int(asked.target.rpartition("=")[2] or 0) if "=" in asked.target else 0
        end = min(first + PAGE, records)
        following = f"/?from={end}" if end < records else None
        return 200, {"data": list(events(first, end - first)), "next": following}

    registry = registry_server.Registry()
    if source == "registry-avro":
        registry.add("AVRO", AVRO, number=1)
    if source == "registry-json":
        registry.add("JSON", {"type": "object"}, number=1)
    if source == "registry-protobuf":
        file = order_pool().FindFileByName("order.proto").serialized_pb
        registry.add("PROTOBUF", base64.b64encode(file).decode(), number=1, file=file)
    with http_service.serving(page if source == "http-poll" else registry.answer) as service:
        print(service.url, flush=True)
        threading.Event().wait()


def read(source: str, place: str, log: str, records: int) -> None:
    """Run a source to its end, and print its CPU-seconds."""
    import millstream as ms

    if source.startswith("registry-"):
        decode(source.removeprefix("registry-"), place, records)
        return
    connector = connector_of(source, place, records)
    before = resource.getrusage(resource.RUSAGE_SELF)
    status = ms.source(connector, topic="events", to=log).run(until="caught-up")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (status.records, status.dead) == (records, 0), status
    print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def queue_server(folder: Path) -> Any:
    """Return a RabbitMQ server, to be used in ``with``."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import rabbitmq_server

    return rabbitmq_server.start(folder)


def put_messages(url: str, records: int) -> None:
    """Put events into a queue that is made."""
    import uuid

    import pika

    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.queue_declare("events", durable=True)
    for event in events(0, records):
        properties = pika.BasicProperties(message_id=uuid.uuid4().hex, delivery_mode=2)
        channel.basic_publish("", "events", json.dumps(event).encode(), properties)
    connection.close()


def measure(source: str, records: int, repeats: int) -> list[float]:
    """Return records per CPU-second, of each repetition."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = str(folder / "in")
        Path(place).mkdir()
        if source == "redis":
            sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
            import redis
            import redis_server

            server = stack.enter_context(redis_server.start(folder))
            place, client = server.url, redis.Redis(port=server.port)
            for first in range(0, records, 5000):
                with client.pipeline() as pipe:
                    for event in events(first, min(5000, records - first)):
                        pipe.xadd("events", event)
                    pipe.execute()
        elif source == "amqp":
            place = stack.enter_context(queue_server(folder)).url
        elif source == "http-poll" or source.startswith("registry-"):
            place = stack.enter_context(serve(source, records))
        elif source != "generate":
            put_files(source, Path(place), records)
        rates = []
        for number in range(repeats):
            if source == "amqp":  # what was read is in the queue no more
                put_messages(place, records)
            command = [
                sys.executable,
                __file__,
                "--read",
                source,
                place,
                str(folder / f"log{number}"),
            ]
            found = subprocess.run(
                [*command, "--records", str(records)], check=True, stdout=subprocess.PIPE, text=True
            )
            rates.append(records / float(found.stdout))
        return rates


def main() -> None:
    """Measure, or be the process that is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--source", nargs="*", choices=SOURCES, default=SOURCES)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        answer_with(given.serve, given.records)
        return
    if given.read:
        read(*given.read, given.records)
        return
    for source in given.source:
        rates = measure(source, given.records, given.repeats)
        print(
            f"{source:18} {statistics.median(rates):10,.0f} records per CPU-second "
            f"({min(rates):,.0f} to {max(rates):,.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
