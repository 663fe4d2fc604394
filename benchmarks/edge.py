"""The edge: events a second by single posts and by lines, and how long a single acknowledged post takes.

The server is `millstream edge` as a process of its own, over a folder, which syncs before it acknowledges; the client is
this process, on kept connections, as small as can be. Beside each figure stands the CPU time of the server for an event,
which says more than times where other work shares the machine. Then what a reader gets by server-sent events, and
what becomes of datagrams that are sent as quickly as one process can.

    python benchmarks/edge.py [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from _measure import TICKS, table

import millstream as ms

EVENT = b'{"user": "user-%06d", "ad": 1234567, "kind": "impression", "cost": 0.0012, "slot": "top-left"}'
LINES = 1000
CONNECTIONS = 32


class Server:
    """The edge as a process."""

    def __init__(self, folder: Path):
        self.ready = folder / "ready"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "millstream", "edge", str(folder / "data")),
                *("--http", "127.0.0.1:0", "--ready-file", str(self.ready)),
                *("--statsd", "127.0.0.1:0", "--statsd-topic", "metrics"),
            ],
            stdout=subprocess.DEVNULL,
        )
        while not self.ready.exists():
            assert self.process.poll() is None
            time.sleep(0.02)
        self.url, self.statsd = self.ready.read_text().split()

    def cpu_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / TICKS

    def memory_mib_max(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) >> 10

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Client:
    """One kept connection."""

    def __init__(self, url, kind, path="/topics/events?key_field=user", headers=""):
        place = urlsplit(url)
        self.place = place.hostname, place.port
        self.head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{headers}"
            "Content-Length: %d\r\n%s\r\n"
        )

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection(*self.place)
        return self

    async def __aexit__(self, *_):
        self.writer.close()
        await self.writer.wait_closed()

    async def post(self, body, more=""):
        self.writer.write((self.head % (len(body), more)).encode() + body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        await self.reader.readexactly(size)


async def posts(url, seconds, connections, kind, body_of, more=lambda _: ""):
    """Post until time is up; return how many requests were answered, and how long each took."""
    took_s = []
    end_s = time.monotonic() + seconds

    async def one(worker):
        async with Client(url, kind) as client:
            n = worker
            while time.monotonic() < end_s:
                begin_s = time.monotonic()
                await client.post(body_of(n), more(n))
                took_s.append(time.monotonic() - begin_s)
                n += connections

    await asyncio.gather(*(one(worker) for worker in range(connections)))
    return took_s


def measured(server, name, seconds, connections, kind, body_of, *, per_post=1, more=lambda _: ""):
    before_s, began_s = server.cpu_s(), time.monotonic()
    took_s = asyncio.run(posts(server.url, seconds, connections, kind, body_of, more))
    wall_s = time.monotonic() - began_s
    events = len(took_s) * per_post
    cut = statistics.quantiles(took_s, n=100)
    return [
        name,
        f"{events:,}",
        f"{events / wall_s:,.0f}",
        f"{statistics.median(took_s) * 1000:.2f}",
        f"{cut[98] * 1000:.2f}",
        f"{(server.cpu_s() - before_s) / events * 1e6:,.1f}",
    ]


def streamed(server, count):
    """Read so many events of the topic from its start."""
    place = urlsplit(server.url)
    before_s, began_s, seen = server.cpu_s(), time.monotonic(), 0
    with socket.create_connection((place.hostname, place.port)) as reading:
        reading.sendall(
            b"GET /topics/events/events?from=earliest HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        )
        while seen < count:
            seen += reading.recv(1 << 20).count(b"\ndata: ")
    wall_s = time.monotonic() - began_s
    cpu_us = (server.cpu_s() - before_s) / seen * 1e6
    return [
        "server-sent events, one reader",
        f"{seen:,}",
        f"{seen / wall_s:,.0f}",
        "",
        "",
        f"{cpu_us:,.1f}",
    ]


def datagrams(server, count):
    """Send datagrams as quickly as one process can; say how many the server has, and where the rest went."""
    host, _, port = server.statsd.rpartition(":")
    before_s = server.cpu_s()
    began_s = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for n in range(count):
            line = b"requests.%d:1|c|#env:prod\ndatagram.sequence:%d|g|#sender:bench" % (n % 50, n)
            sender.sendto(line, (host, int(port)))
    sent_s = time.monotonic() - began_s
    taken = -1
    while taken != (taken := status(server.url)["statsd"]["appended"]):
        time.sleep(0.5)
    counts = status(server.url)["statsd"]
    cpu_us = (server.cpu_s() - before_s) / max(taken, 1) * 1e6
    print(
        f"datagrams: {count:,} sent in {sent_s:.1f} s; {counts['appended']:,} appended, "
        f"{counts['kernel_dropped']:,} dropped by the kernel, {counts['lost_in_sequence']:,} missing by number; "
        f"{cpu_us:.0f} µs of CPU for each"
    )


def status(url):
    import json
    from urllib.request import urlopen

    with urlopen(f"{url}status", timeout=30) as answer:
        return json.load(answer)


def measure(server, seconds):
    lines = b"\n".join(EVENT % n for n in range(LINES))
    one = lambda n: EVENT % n  # noqa: E731 - a table of cases
    run = str(os.getpid())
    rows = [
        measured(server, "single posts, 1 connection", seconds, 1, "application/json", one),
        measured(
            server,
            f"single posts, {CONNECTIONS} connections",
            seconds,
            CONNECTIONS,
            "application/json",
            one,
        ),
        measured(
            server,
            "single posts with a key, 1 connection",
            seconds / 2,
            1,
            "application/json",
            one,
            more=lambda n: f"Idempotency-Key: {run}-{n}\r\n",
        ),
        measured(
            server,
            f"{LINES} lines a post, 2 connections",
            seconds,
            2,
            "application/x-ndjson",
            lambda _: lines,
            per_post=LINES,
        ),
    ]
    rows.append(streamed(server, min(status(server.url)["http"]["events"], 50_000)))
    columns = ["", "events", "events/s", "p50 ms", "p99 ms", "server CPU µs/event"]
    table("the edge over a folder", columns, rows)
    datagrams(server, 20_000)
    print(f"memory of the server: {server.memory_mib_max()} MiB at most")
    print(f"load of the machine (1, 5 minutes): {os.getloadavg()[0]:.1f}, {os.getloadavg()[1]:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        with ms.connect(Path(folder) / "data") as log:
            log.create_topic("events", partitions=4)
            log.create_topic("metrics")
        server = Server(Path(folder))
        try:
            measure(server, seconds)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
