"""Compares clients of S3 for runs of state: obstore, pyarrow's file system, s3fs, and ours, which retries by itself on obstore;
on a real server, versitygw.

    pip install obstore s3fs; python benchmarks/object_stores.py

Times are medians of one request after another, in milliseconds. Then each client meets faults, made by a proxy:
what it raises or returns, after how long, with how many requests, and what is in the bucket then. There each client is a process
of its own, all at once, as they do nothing but wait; and has the time-outs and retries that it has by default. The order of
clients changes with each round. Set MILLSTREAM_VERSITYGW to the server's binary (tests/s3_server.py).
"""

import argparse
import hashlib
import io
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from s3_server import SECRET, USER, Fault, FaultProxy, environment, find_binary, s3_server

SIZES = {"64 KiB": 64 << 10, "8 MiB": 8 << 20}


class Obstore:
    """obstore with its own retries."""

    def __init__(self, port, secret=SECRET):
        from obstore.store import S3Store

        self.store = S3Store(
            "bucket",
            endpoint=environment(port)["AWS_ENDPOINT_URL"],
            access_key_id=USER,
            secret_access_key=secret,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def put(self, name, data):
        import obstore

        obstore.put(self.store, name, data, use_multipart=False)

    def create(self, name, data):
        import obstore

        obstore.put(self.store, name, data, use_multipart=False, mode="create")

    def get(self, name):
        return len(memoryview(self.store.get(name).bytes()))

    def names(self, prefix):
        return sum(len(page) for page in self.store.list(prefix))


class Pyarrow:
    """pyarrow.fs.S3FileSystem."""

    def __init__(self, port, secret=SECRET):
        from pyarrow import fs

        self.fs = fs.S3FileSystem(
            access_key=USER,
            secret_key=secret,
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
        )

    def put(self, name, data):
        with self.fs.open_output_stream(f"bucket/{name}") as out:
            out.write(data)

    def get(self, name):
        with self.fs.open_input_file(f"bucket/{name}") as file:
            return len(memoryview(file.read()))

    def names(self, prefix):
        from pyarrow import fs

        return len(self.fs.get_file_info(fs.FileSelector(f"bucket/{prefix}")))


class S3fs:
    """s3fs, through fsspec's synchronous face."""

    def __init__(self, port, secret=SECRET):
        import s3fs

        self.fs = s3fs.S3FileSystem(
            key=USER,
            secret=secret,
            endpoint_url=environment(port)["AWS_ENDPOINT_URL"],
            client_kwargs={"region_name": "us-east-1"},
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def put(self, name, data):
        self.fs.pipe_file(f"bucket/{name}", data)

    def create(self, name, data):
        self.fs.pipe_file(f"bucket/{name}", data, mode="create")

    def get(self, name):
        return len(self.fs.cat_file(f"bucket/{name}"))

    def names(self, prefix):
        return len(self.fs.ls(f"bucket/{prefix}"))


class Ours:
    """What Millstream's runs of state go by: obstore, with retries of our own. Each put is conditional."""

    def __init__(self, port, secret=SECRET):
        from millstream.object_store.client import ObjectClient, open_requests

        os.environ |= environment(port) | {"AWS_SECRET_ACCESS_KEY": secret}
        open_requests.cache_clear()  # the URL is the same, what the environment says is not
        self.client = ObjectClient("s3://bucket")

    def put(self, name, data):
        self.client.put(name, memoryview(data))

    def get(self, name):
        return self.client.get(name).size

    def names(self, prefix):
        return len(list(self.client.names(prefix)))


CLIENTS = {"ours": Ours, "obstore": Obstore, "pyarrow": Pyarrow, "s3fs": S3fs}


def timed(call, count):
    times, cpu = [], time.process_time()
    for number in range(count):
        began = time.perf_counter()
        call(number)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times), 1000 * (time.process_time() - cpu) / count


def speed(port, rounds, count):
    found = {}
    clients = {name: make(port) for name, make in CLIENTS.items()}
    for round_number in range(rounds):
        first = round_number % len(clients)
        order = [*list(clients)[first:], *list(clients)[:first]]
        for name in order:
            client = clients[name]
            for label, size in SIZES.items():
                data = os.urandom(size)
                times = max(4, count * (64 << 10) // size) if size > 1 << 20 else count
                prefix = f"{name}-{round_number}-{size}"
                put = timed(lambda n, p=prefix, d=data, c=client: c.put(f"{p}/{n}", d), times)
                get = timed(lambda n, p=prefix, c=client: c.get(f"{p}/{n}"), times)
                found.setdefault((name, f"put {label}"), []).append(put)
                found.setdefault((name, f"get {label}"), []).append(get)
            listed = timed(
                lambda _n, c=client, p=f"{name}-{round_number}-{64 << 10}": c.names(p), 5
            )
            found.setdefault((name, f"list {count}"), []).append(listed)
    for (name, what), samples in sorted(found.items(), key=lambda each: each[0][1]):
        wall, cpu = (statistics.median(each) for each in zip(*samples, strict=True))
        print(f"{what:12} {name:8} {wall:8.2f} ms  {cpu:8.2f} ms CPU")


@dataclass(frozen=True)
class Trouble:
    """A fault, and which requests meet it: the first ``requests``, or all for ``lasting_s``."""

    name: str
    fault: Fault
    requests: int = 2
    lasting_s: float = 0.0
    modes: tuple[str, ...] = ("put", "create", "get")


EVER_S = 1e9
PUTS = ("put", "create")
TROUBLES = (
    Trouble("none", Fault("503"), 0),
    Trouble("503 twice", Fault("503")),
    Trouble("503 for 60 s", Fault("503"), lasting_s=60, modes=("put", "get")),
    Trouble("503 for ever", Fault("503"), lasting_s=EVER_S, modes=("put", "get")),
    Trouble("12 s slow, twice", Fault("slow", 12.0), modes=("put", "get")),
    Trouble("cut off for 60 s", Fault("silence", 1.0), lasting_s=60, modes=("put", "get")),
    Trouble("cut upload, twice", Fault("cut upload"), modes=PUTS),
    Trouble("cut upload, for ever", Fault("cut upload"), lasting_s=EVER_S, modes=("put",)),
    Trouble("cut download, twice", Fault("cut download"), modes=("get",)),
    Trouble("lost answer, once", Fault("lost answer"), 1, modes=PUTS),
    Trouble("wrong secret", Fault("503"), 0, modes=("put", "get")),
)


@dataclass
class Decisions:
    """Gives requests for one object their trouble, from the first of them on."""

    trouble: Trouble
    target: str
    seen: int = 0
    began: float = 0.0

    def decide(self, method, path):
        if self.target not in path or not self._meets(method, path):
            return None
        self.began, self.seen = self.began or time.monotonic(), self.seen + 1
        lasts = time.monotonic() - self.began < self.trouble.lasting_s
        return self.trouble.fault if lasts or self.seen <= self._requests else None

    def _meets(self, method, path):
        """Return whether it is a request of the kind that the fault is of."""
        if self.trouble.fault.kind == "cut upload":
            return method == "PUT"
        if (
            self.trouble.fault.kind == "lost answer"
        ):  # to what makes the object, not to a part of it
            whole = method == "PUT" and "partNumber" not in path
            return whole or (method == "POST" and "uploadId" in path)
        return method in {"PUT", "GET", "HEAD", "POST"}

    @property
    def _requests(self):
        return 0 if self.trouble.lasting_s else self.trouble.requests


def meet_faults(name, server_port, folder):
    """Let one client meet every fault, and print what came of it."""
    data, make = os.urandom(1 << 20), CLIENTS[name]
    for trouble in TROUBLES:
        for mode in trouble.modes:
            if not hasattr(make, mode):
                continue
            target = f"{name}-{re.sub('[^a-z0-9]+', '-', trouble.name)}-{mode}"
            if mode == "get":
                make(server_port).put(target, data)
            with FaultProxy(server_port) as proxy:
                client = make(proxy.port, *(["wrong"] if trouble.name == "wrong secret" else []))
                proxy.decide = Decisions(trouble, target).decide
                began, cpu = time.perf_counter(), time.process_time()
                outcome = outcome_of(client, mode, target, data)
                took, cpu = time.perf_counter() - began, time.process_time() - cpu
            left = "" if mode == "get" else f"; there: {what_is_left(server_port, target, data)}"
            pending = pending_uploads(folder, target)
            left += f" and {pending} unfinished uploads" if pending else ""
            count = len(proxy.requests)
            print(
                f"{trouble.name:20} {name:8} {mode:6} {took:6.1f} s {cpu:5.2f} CPU s {count:3} requests  {outcome}{left}",
                flush=True,
            )


def outcome_of(client, mode, target, data):
    """Return what a user sees: that it is done, or the error, in one line."""
    warned = io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger().addHandler(handler)
    try:
        done = getattr(client, mode)(*((target,) if mode == "get" else (target, data)))
        said = "done" if mode != "get" or done == len(data) else f"returned {done} bytes"
    except Exception as error:  # noqa: BLE001 - what it raises is what is asked
        text = str(error)
        about = f"{len(text)} characters, {text.count(chr(10)) + 1} lines"
        shown = " with the key's id" if USER in text else ""
        said = f"{type(error).__name__} ({about}{shown}): {text[:160]!r}"
    finally:
        logging.getLogger().removeHandler(handler)
    lines = warned.getvalue().splitlines()
    return f"{said}; told: {lines[-1][:120]!r}" if lines else said


def what_is_left(server_port, target, data):
    """Return what the bucket has under the name."""
    try:
        found = Obstore(server_port).store.get(target).bytes()
    except FileNotFoundError:
        return "nothing"
    return "the object" if memoryview(found) == data else f"{len(found)} other bytes"


def pending_uploads(folder, target):
    """Count the uploads by parts of an object that were neither completed nor aborted."""
    object_folder = hashlib.sha256(target.encode()).hexdigest()
    uploads = folder / "data" / "bucket" / ".sgwtmp" / "multipart" / object_folder
    return len(list(uploads.iterdir())) if uploads.exists() else 0


def compare_faults(server_port, folder):
    """Run each client as a process, all at once; print what each says, one after the other."""
    here = [sys.executable, __file__, "--port", str(server_port), "--folder", str(folder)]
    running = [
        subprocess.Popen([*here, "--client", name], stdout=subprocess.PIPE, text=True)
        for name in CLIENTS
    ]
    for process in running:
        print(process.communicate()[0], flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--no-faults", action="store_true")
    options.add_argument("--no-speed", action="store_true")
    options.add_argument("--only", choices=tuple(CLIENTS), help="meet faults with one client")
    for name, kind in (("client", str), ("port", int), ("folder", Path)):
        options.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.client:
        meet_faults(chosen.client, chosen.port, chosen.folder)
        return
    if find_binary() is None:
        sys.exit("There is no versitygw: see tests/s3_server.py.")
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder), "bucket") as port:
        if not chosen.no_speed:
            speed(port, chosen.rounds, chosen.count)
        if chosen.only:
            meet_faults(chosen.only, port, Path(folder))
        elif not chosen.no_faults:
            compare_faults(port, Path(folder))


if __name__ == "__main__":
    main()
