"""The programs of the kill loop: one that owns a log, and one that sends to it through a socket.

The owner appends each batch and responds with the offset. A sender numbers its batches as an idempotent
producer, sends each until it gets a response, and writes every response into its journal; when it is killed,
its next life goes on behind the last line of the journal. What a batch holds follows from its number alone,
so it can be sent again by anybody.

    python kill_loop.py owner FOLDER SOCKET
    python kill_loop.py sender NUMBER JOURNAL SOCKET STOP_FILE
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

SENDERS = 4
PARTITIONS = 3
TOPIC = "t"


def partition_of(sender: int) -> int:
    return sender % PARTITIONS


def values_of(sender: int, batch: int) -> list[bytes]:
    count = 1 + (sender * 7 + batch * 3) % 4
    return [b"%d/%d/%d " % (sender, batch, n) + b"x" * (batch * 37 % 300) for n in range(count)]


def own(folder: str, socket: str) -> None:
    from millstream.log.writer import LogWriter

    Path(socket).unlink(missing_ok=True)
    with LogWriter(folder) as writer, Listener(socket, "AF_UNIX", backlog=SENDERS) as listener:
        if TOPIC not in writer.topics():
            writer.create_topic(TOPIC, partitions=PARTITIONS, settings={"segment.bytes": "200000"})
        while True:
            threading.Thread(target=serve, args=(writer, listener.accept()), daemon=True).start()


def serve(writer: object, connection: Connection) -> None:
    from millstream.log.batch import ProducerStamp, stamp
    from millstream.log.encoding import SimpleRecord, encode_records

    try:
        while True:
            sender, sequence, values = connection.recv()
            rows = [SimpleRecord(0, b"k", value) for value in values]
            batch = stamp(
                encode_records(rows), ProducerStamp(sender + 1, 0, sequence), transactional=False
            )
            (offset,) = writer.append(TOPIC, partition_of(sender), [batch])  # type: ignore[attr-defined]
            connection.send(offset)
    except (EOFError, OSError):
        pass  # the sender is gone


def send(sender: int, journal: Path, socket: str, stop: Path) -> None:
    text = journal.read_bytes() if journal.exists() else b""
    batch = text.count(b"\n")
    sequence = sum(len(values_of(sender, n)) for n in range(batch))
    handle = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # A line cut short was never a response. (In one step: it may be killed again at any time.)
    os.ftruncate(handle, text.rfind(b"\n") + 1)
    connection: Connection | None = None
    while not stop.exists():
        try:
            connection = connection or Client(socket, "AF_UNIX")
            values = values_of(sender, batch)
            connection.send((sender, sequence, values))
            offset = connection.recv()
        except (EOFError, OSError):
            connection = None
            time.sleep(0.01)
            continue
        os.write(handle, b"%d\n" % offset)
        batch, sequence = batch + 1, sequence + len(values)


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        own(sys.argv[2], sys.argv[3])
    else:
        send(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
