"""The program of the take-over loop: a process that writes to a folder, as its owner or as a client.

It sends numbered records to all partitions, a few at a time, and commits transactions of one record for
each of two topics. What was acknowledged goes into its journal, line by line; it ends when the stop file exists,
and at SIGTERM.

    python ownership_loop.py NAME FOLDER JOURNAL STOP_FILE
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

PARTITIONS = 3
WINDOW = 8
TOPIC, PAIRS = "t", ("left", "right")


def owner_of(folder: Path) -> int | None:
    """Return the process id that the lock names; of the last owner if there is none now."""
    try:
        text = (folder / "LOCK").read_text()
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def write(name: str, folder: Path, journal: Path, stop: Path) -> None:
    import millstream as ms

    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    handle = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with ms.connect(folder) as log:
        log.create_topic(TOPIC, partitions=PARTITIONS, exist_ok=True)
        for topic in PAIRS:
            log.create_topic(topic, exist_ok=True)
        pairs = log.producer(linger_ms=0, transactional_id=name.partition("/")[0])
        producer = log.producer(linger_ms=1)
        number = 0
        waiting = deque()
        while not (ended or stop.exists()):
            number += 1
            sent_s = time.monotonic()
            future = producer.send(TOPIC, f"{name}:{number}", partition=number % PARTITIONS)
            waiting.append((number, sent_s, future))
            while len(waiting) >= WINDOW:
                done, sent_s, future = waiting.popleft()
                record = future.result()
                row = f"sent {name}:{done} {record.partition} {record.offset} {sent_s} {time.monotonic()}\n"
                os.write(handle, row.encode())
            if number % 20 == 0:
                commit(log, pairs, f"{name}:{number}", handle)
        producer.flush()


def commit(log: object, producer: object, value: str, handle: int) -> None:
    """Commit one record to each topic; a transaction of a running process is never aborted."""
    with producer.transaction() as transaction:  # type: ignore[attr-defined]
        producer.send(PAIRS[0], value)  # type: ignore[attr-defined]
        time.sleep(0.002)
        producer.send(PAIRS[1], value)  # type: ignore[attr-defined]
        transaction.fence(value, 1)
    os.write(handle, f"pair {value}\n".encode())


if __name__ == "__main__":
    write(sys.argv[1], *map(Path, sys.argv[2:]))
