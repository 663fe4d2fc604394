"""Event sourcing beside the package `eventsourcing` on SQLite, in one run: commands, loads, a projection.

Both are synced: every acknowledged command survives the loss of power. `eventsourcing` has its cache of
aggregates on, as an event store of ours has. It has no subscription on SQLite, so its projection reads the
notification log by thousands, and commits each event with its tracking, as its documentation has it. Loads are
of aggregates that are in no cache, in a store that is open and has read others before.

Commands are counted by the clock, as most of their time is waiting for the disk, and also by the processor. The
rest is counted by the processor only (user and system time of the process), which other work on the machine
disturbs less. A topic has one partition if nothing is said; `eventsourcing` has none, so it runs the same twice.

    python benchmarks/event_sourcing.py [--peer PYTHON] [--repeats 3]

`--peer` is a Python that has `eventsourcing` installed: `pip install "eventsourcing>=9.5,<9.6"`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

THREADS, COMMANDS, LONG, PROJECTED = 8, 250, 10_000, 20_000
SNAPSHOT_EVERY, LOADED = 1000, 5


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def commands(name: str, threads: int, call) -> dict[str, float]:
    """What commands of some threads take; ``call`` gets the number of a thread."""
    each = THREADS * COMMANDS // threads // (1 if threads > 1 else 4)

    def run(number: int) -> None:
        for _ in range(each):
            call(number)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    began, used = time.perf_counter(), cpu_s()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    count = each * threads
    return {
        f"commands/s, {name}": count / (time.perf_counter() - began),
        f"CPU of a command, {name}, us": (cpu_s() - used) / count * 1e6,
    }


def load_ms(load) -> float:
    """The median of loading several aggregates, one after the other; CPU time."""
    found = []
    for number in range(LOADED):
        used = cpu_s()
        load(f"long{number}")
        found.append((cpu_s() - used) * 1000)
    return statistics.median(found)


RUNS = (
    ("8 threads, 8 streams", THREADS, lambda number: f"a{number}"),
    ("8 threads, 8 streams, 4 partitions", THREADS, lambda number: f"a{number}"),
    ("8 threads, 1 stream", THREADS, lambda _: "hot"),
    ("1 thread", 1, lambda _: "one"),
)


# -- ours -----------------------------------------------------------------------------------------


def ours(folder: Path) -> dict[str, float]:
    from dataclasses import dataclass

    import millstream as ms

    events = ms.EventTypes()

    @events.register("paid")
    @dataclass(frozen=True)
    class Paid:
        amount: int

    decider = ms.Decider(
        initial=int,
        decide=lambda command, _: [Paid(amount) for amount in command],
        evolve=lambda state, event: state + event.amount,
        state=int,
    )

    def add(event, tables) -> None:
        tables.execute(
            "INSERT INTO {totals} VALUES (?, ?) "
            "ON CONFLICT (account) DO UPDATE SET total = total + excluded.total",
            (event.stream_id, event.data.amount),
        )

    found = {}
    with ms.connect(folder) as log:
        for name, threads, stream in RUNS:
            topic, partitions = ("divided", 4) if "partition" in name else ("one", None)
            with ms.EventStore(log, topic, decider, events, partitions=partitions) as store:
                store.handle(stream(0), [1])
                found |= commands(
                    name, threads, lambda number, stream=stream: store.handle(stream(number), [1])
                )
        for name, every in (("without", None), ("with", SNAPSHOT_EVERY)):
            options = {"snapshot_every": every}
            with ms.EventStore(log, name, decider, events, **options) as store:
                for stream in ("short", *(f"long{number}" for number in range(LOADED))):
                    for _ in range(LONG // 100):
                        store.handle(stream, [1] * 100)
                    store.handle(stream, [1] * 50)
            with ms.EventStore(log, name, decider, events, **options) as store:
                store.stream_ids()
                store.load("short")
                found[f"CPU of a load of 10,050 events {name} snapshot, ms"] = load_ms(store.load)
        with ms.EventStore(log, "projected", decider, events) as store:
            for at in range(PROJECTED // 100):
                store.handle(f"a{at % 50}", [1] * 100)
            totals = ms.Projection(
                "sums", {"totals": "account TEXT PRIMARY KEY, total INTEGER"}, add
            )
            with store.project(totals, folder / "views.db") as view:
                used = cpu_s()
                view.catch_up()
                found["projected events per CPU second"] = PROJECTED / (cpu_s() - used)
                assert view.query("SELECT sum(total) FROM totals") == [(PROJECTED,)]
    return found


# -- the peer -------------------------------------------------------------------------------------


def peer_bank(folder: Path):
    """What opens an application of accounts, with snapshots or without."""
    from uuid import NAMESPACE_URL, uuid5

    from eventsourcing.application import Application
    from eventsourcing.domain import Aggregate, event
    from eventsourcing.persistence import IntegrityError

    class Account(Aggregate):
        def __init__(self, name: str) -> None:
            self.name, self.total = name, 0

        @staticmethod
        def create_id(name: str):
            return uuid5(NAMESPACE_URL, name)

        @event("Paid")
        def pay(self, amount: int) -> None:
            self.total += amount

    class Bank(Application):
        log_section_size = 1000

        def open(self, name: str) -> None:
            self.save(Account(name))

        def pay(self, name: str, amounts: list[int]) -> None:
            while True:
                account = self.repository.get(Account.create_id(name))
                for amount in amounts:
                    account.pay(amount)
                try:
                    self.save(account)
                except IntegrityError:
                    continue  # another thread was first
                return

    class Snapshotting(Bank):
        snapshotting_intervals: ClassVar = {Account: SNAPSHOT_EVERY}

    def bank(name: str, kind=Bank, cache: str = "1000"):
        return kind(
            env={
                "PERSISTENCE_MODULE": "eventsourcing.sqlite",
                "SQLITE_DBNAME": str(folder / f"{name}.db"),
                "AGGREGATE_CACHE_MAXSIZE": cache,
                "SQLITE_LOCK_TIMEOUT": "60",
            }
        )

    return bank, Bank, Snapshotting, Account


def peer(folder: Path) -> dict[str, float]:
    bank, plain, snapshotting, account = peer_bank(folder)
    found = {}
    many = bank("many")
    for name in ("hot", "one", *(f"a{number}" for number in range(THREADS))):
        many.open(name)
    for name, threads, stream in RUNS:
        found |= commands(
            name, threads, lambda number, stream=stream: many.pay(stream(number), [1])
        )
    many.close()
    for name, kind in (("without", plain), ("with", snapshotting)):
        long = bank(name, kind)
        for stream in ("short", *(f"long{number}" for number in range(LOADED))):
            long.open(stream)
            for _ in range(LONG // 100):
                long.pay(stream, [1] * 100)
            long.pay(stream, [1] * 49)
        long.close()
        long = bank(name, kind)
        get, id_of = long.repository.get, account.create_id
        get(id_of("short"))
        took = load_ms(lambda stream, get=get, id_of=id_of: get(id_of(stream)))
        found[f"CPU of a load of 10,050 events {name} snapshot, ms"] = took
        long.close()
    source = bank("projected")
    for at in range(50):
        source.open(f"a{at}")
    for at in range(PROJECTED // 100):
        source.pay(f"a{at % 50}", [1] * 100)

    found["projected events per CPU second"] = projected_by_peer(source, folder)
    source.close()
    return found


def projected_by_peer(source, folder: Path) -> float:
    from eventsourcing.persistence import Tracking
    from eventsourcing.sqlite import SQLiteDatastore, SQLiteTrackingRecorder

    class Totals(SQLiteTrackingRecorder):
        def __init__(self, datastore, **kwargs) -> None:
            super().__init__(datastore, **kwargs)
            self.create_table_statements.append(
                "CREATE TABLE IF NOT EXISTS totals (account TEXT PRIMARY KEY, total INTEGER)"
            )

        def add(self, account: str, amount: int, tracking: Tracking) -> None:
            with self.datastore.transaction(commit=True) as cursor:
                cursor.execute(
                    "INSERT INTO totals VALUES (?, ?) "
                    "ON CONFLICT (account) DO UPDATE SET total = total + excluded.total",
                    (account, amount),
                )
                self._insert_tracking(cursor, tracking)

    view = Totals(SQLiteDatastore(str(folder / "views.db")))
    view.create_table()

    def project() -> int:
        start, count = 1, 0
        while batch := source.notification_log.select(start, 1000):
            for one in batch:
                paid = source.mapper.to_domain_event(one)
                amount = getattr(paid, "amount", 0)
                view.add(str(paid.originator_id), amount, Tracking("bank", one.id))
                count += 1
            start = batch[-1].id + 1
        return count

    used = cpu_s()
    count = project()
    return count / (cpu_s() - used)


def measure(python: str, what: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--one", what, "--folder", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=["ours", "peer"])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.one:
        print(json.dumps({"ours": ours, "peer": peer}[given.one](given.folder)))
        return
    runs = {"ours": [], "peer": []}
    for _ in range(given.repeats):  # in turn, so that a busy machine meets both
        runs["ours"].append(measure(sys.executable, "ours"))
        runs["peer"].append(measure(given.peer, "peer"))
    print("| | Millstream | eventsourcing 9.5 | ratio of medians |\n|---|---|---|---|")
    for name in runs["ours"][0]:
        cells, medians = [], []
        for side in ("ours", "peer"):
            values = sorted(run[name] for run in runs[side])
            medians.append(statistics.median(values))
            digits = 1 if ", ms" in name else 0
            cells.append(
                f"{medians[-1]:,.{digits}f} ({values[0]:,.{digits}f} to {values[-1]:,.{digits}f})"
            )
        more_is_better = "commands/s" in name or "per" in name
        ours_is = medians[0] / medians[1] if more_is_better else medians[1] / medians[0]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ours_is:.1f} x |")


if __name__ == "__main__":
    main()
