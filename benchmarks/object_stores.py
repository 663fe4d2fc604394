"""Compares clients of S3 for runs of state: pyarrow's file system, obstore, s3fs; on a real server, versitygw.

    pip install obstore s3fs; python benchmarks/object_stores.py

Times are medians of one request after another, in milliseconds. Then each client meets faults, made by a proxy:
what it raises or returns, after how long, and with how many requests. The order of clients changes with each
round. Set MILLSTREAM_VERSITYGW to the server's binary (tests/s3_server.py).
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from s3_server import Fault, FaultProxy, environment, find_binary, s3_server

SIZES = {"64 KiB": 64 << 10, "8 MiB": 8 << 20}


class Obstore:
    """obstore with its own retries."""

    def __init__(self, port):
        from obstore.store import S3Store

        env = environment(port)
        self.store = S3Store(
            "bucket",
            endpoint=env["AWS_ENDPOINT_URL"],
            access_key_id=env["AWS_ACCESS_KEY_ID"],
            secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "10s"},
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

    def __init__(self, port):
        from pyarrow import fs

        env = environment(port)
        self.fs = fs.S3FileSystem(
            access_key=env["AWS_ACCESS_KEY_ID"],
            secret_key=env["AWS_SECRET_ACCESS_KEY"],
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
            request_timeout=10,
            connect_timeout=5,
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

    def __init__(self, port):
        import s3fs

        env = environment(port)
        self.fs = s3fs.S3FileSystem(
            key=env["AWS_ACCESS_KEY_ID"],
            secret=env["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=env["AWS_ENDPOINT_URL"],
            client_kwargs={"region_name": "us-east-1"},
            config_kwargs={"read_timeout": 10, "connect_timeout": 5},
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


CLIENTS = {"obstore": Obstore, "pyarrow": Pyarrow, "s3fs": S3fs}


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
        order = list(clients)[round_number % 3 :] + list(clients)[: round_number % 3]
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


def faults(server_port, names):
    data = os.urandom(1 << 20)
    for name in names:
        make = CLIENTS[name]
        for kind in (
            "none",
            "503",
            "503 for ever",
            "cut upload",
            "cut download",
            "lost answer",
            "slow",
        ):
            for mode in ("put", "create", "get"):
                if not applies(kind, mode) or not hasattr(make, mode):
                    continue
                with FaultProxy(server_port) as proxy:
                    client = make(proxy.port)
                    target = f"{name}-{kind.replace(' ', '-')}-{mode}"
                    with contextlib.suppress(Exception):
                        make(server_port).put(target, data) if mode == "get" else None
                    left = [10**9 if "ever" in kind else 2]

                    def decide(method, path, kind=kind, target=target, left=left):
                        if (
                            target in path
                            and left[0]
                            and kind != "none"
                            and method in {"PUT", "GET", "POST"}
                        ):
                            left[0] -= 1
                            return Fault(kind.removesuffix(" for ever"), 12.0)
                        return None

                    proxy.decide = decide
                    began = time.perf_counter()
                    try:
                        args = (target,) if mode == "get" else (target, data)
                        outcome = f"done {getattr(client, mode)(*args) or ''}"
                    except Exception as error:  # noqa: BLE001 - what it raises is what is asked
                        outcome = f"{type(error).__name__}: {str(error)[:90]!r}"
                    took = time.perf_counter() - began
                    print(
                        f"{kind:13} {name:8} {mode:6} {took:6.1f} s {len(proxy.requests):3} requests  {outcome}",
                        flush=True,
                    )


def applies(kind, mode):
    return {
        "cut upload": mode != "get",
        "cut download": mode == "get",
        "lost answer": mode != "get",
    }.get(kind, True)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--no-faults", action="store_true")
    options.add_argument("--only", choices=tuple(CLIENTS), help="meet faults with one client")
    chosen = options.parse_args()
    if find_binary() is None:
        sys.exit("There is no versitygw: see tests/s3_server.py.")
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder), "bucket") as port:
        speed(port, chosen.rounds, chosen.count)
        if not chosen.no_faults:
            faults(port, [chosen.only] if chosen.only else list(CLIENTS))


if __name__ == "__main__":
    main()
