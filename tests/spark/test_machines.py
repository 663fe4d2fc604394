"""A cluster that cannot cheat: every machine has an address and a mount namespace of its own.

Neither the driver's folder nor another executor's can be seen on a machine, so whatever goes between them goes
by Spark, S3, PostgreSQL or the broker, but for a dataset, whose folder all see, as one that all have mounted. The "machines" are processes of this one, which share its network and clocks.

While they run, S3 answers 503, late, or not; uploads and downloads are torn; the disk of a cache is full; PostgreSQL crashes.
For MILLSTREAM_CUT_S seconds (5 by default, and 60 in `make test-long`) nobody reaches S3 at all. Of large state,
MILLSTREAM_STATE_GIB says how large (0.02 by default).
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import on_machines
import published_on_machines
import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from broker.broker_process import AsProcess
from clusters import SOURCE, Cluster, end
from mount_namespaces import may_unshare
from on_machines import CLICK_AFTER, VIEWS_PER_MINUTE, note_of, shown_at, word_of
from s3_server import Fault

import millstream as ms
from millstream.demo import ads_expected
from millstream.demo.ads_pipeline import APP
from millstream.demo.ads_run import topic_rows
from millstream.demo.feed import FeedThread, create_topic, remaining
from millstream.engine.stages.executor import _run_names
from millstream.engine.stages.run_files import object_name
from millstream.object_store.client import ObjectClient
from millstream.testing.kafka import ApacheKafka, why_not

pytestmark = pytest.mark.timeout(900)
ADDRESSES = {
    "one": "127.0.0.2",
    "two": "127.0.0.3",
    "three": "127.0.0.4",
    "driver-one": "127.0.0.10",
    "driver-two": "127.0.0.11",
}
# Only the machine's own folder is left of the place of temporary files.
ENTER = (
    'mount --bind "$0" /mnt && mount -t tmpfs none "$1" && mkdir -p "$0" && mount --move /mnt "$0" '
    '&& cd "$0" && shift && { [ -z "$CACHE_DISK" ] || mount -t tmpfs -o size="$CACHE_DISK" none cache; } '
    '&& exec "$@"'
)
# A disk that is full after the first few runs of state.
CACHE_DISKS = {"two": "48k", "three": "48k"}
CUT_S = float(os.environ.get("MILLSTREAM_CUT_S", "5"))
STATE_BYTES = int(float(os.environ.get("MILLSTREAM_STATE_GIB", "0.02")) * 2**30)
WAIT_S = 240
LONG_WAIT_S = 5400
LOGS = pytest.mark.parametrize("log", ["millstream", "apache"], indirect=True)


@dataclass
class Machines(Cluster):
    """A cluster whose workers and drivers each have a machine of their own; ``given`` is in the environment of all."""

    root: Path = field(kw_only=True)
    given: dict = field(kw_only=True)
    paths: ClassVar = (SOURCE, SOURCE.parent / "tests")

    def __post_init__(self):
        for name in ADDRESSES:
            (self.root / name / "cache").mkdir(parents=True)
        super().__post_init__()

    def enter(self, name):
        temporary = Path(tempfile.gettempdir())
        hidden = temporary if temporary in self.root.parents else self.root
        own = str(self.root / name)
        return [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            ENTER,
            own,
            str(hidden),
        ]

    def environment_of(self, name):
        own = self.root / name
        return {
            **self.environment,
            "SPARK_LOCAL_IP": ADDRESSES[name],
            "SPARK_LOCAL_DIRS": str(own / "spark"),
            "MILLSTREAM_CACHE": str(own / "cache"),
            "CACHE_DISK": CACHE_DISKS.get(name, ""),
            "MACHINE": name,
            "MACHINES": str(self.root),
            **self.given,
        }

    def worker(self, name):
        size = ("--cores", "2", "--memory", "2g", "--work-dir", str(self.root / name / "work"))
        here = ("--host", ADDRESSES[name], *self.at(0, 0))
        return self.start(
            name,
            "org.apache.spark.deploy.worker.Worker",
            *here,
            *size,
            self.master,
            inside=self.enter(name),
            environment=self.environment_of(name),
        )

    def driver(self, name, said, *ending, program=on_machines.__file__):
        """Start a program on a machine; what it says goes to a file."""
        command = [sys.executable, program, self.master, str(self.root / name / "app")]
        with said.open("wb") as out:
            process = subprocess.Popen(
                [*self.enter(name), *command, ADDRESSES[name], *ending],
                env=self.environment_of(name),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.opened.callback(end, process)
        return process


@pytest.fixture
def mounted():
    """A folder that all machines see, as it is not where temporary files are."""
    if Path(tempfile.gettempdir()) in (Path("/var/tmp"), Path("/var")):
        pytest.skip("temporary files are in /var/tmp, where all machines were to see a folder")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def log(request, tmp_path):
    """The URL of a log: in Millstream's broker, or in Apache Kafka."""
    if getattr(request, "param", "millstream") == "millstream":
        with AsProcess(tmp_path / "log") as broker:
            yield f"kafka://{broker.address}"
        return
    if missing := why_not():
        pytest.skip(f"no Apache Kafka: {missing}")
    with ApacheKafka() as node:
        yield f"kafka://{node.address}"


@pytest.fixture
def machines(request, tmp_path, log, database, s3_url, mounted, monkeypatch):
    if not may_unshare():
        pytest.skip("this user may not make mount namespaces (unshare): run it as root on Linux")
    if Path(tempfile.gettempdir()).resolve() in SOURCE.resolve().parents:
        pytest.skip("the checkout is among temporary files, of which a machine sees its own only")
    monkeypatch.setenv("PGUSER", unquote(urlsplit(database).username))
    monkeypatch.setenv("PGPASSWORD", unquote(urlsplit(database).password))
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ExitStack() as opened:
        for name, value in (
            ("LOG", log),
            ("STATE", s3_url),
            ("STORE", database),
            ("DATASET", str(mounted / "found")),
        ):
            monkeypatch.setenv(name, value)
        given = getattr(request, "param", {})
        yield Machines(folder, opened, root=tmp_path / "machines", given=given)


@dataclass(frozen=True)
class Size:
    """How many are shown in a minute, and how many words their notes have."""

    per_minute: int = VIEWS_PER_MINUTE
    words: int = 2

    def shown(self, number):
        """Return a record: written as text, as there may be millions of them."""
        at, note = shown_at(number, self.per_minute).isoformat(), note_of(number, self.words)
        return f'{{"id": {number}, "ad": {number % 7}, "at": "{at}", "note": "{note}"}}'

    def click(self, number):
        return f'{{"id": {number}, "at": "{self.clicked_at(number).isoformat()}"}}'

    def clicked_at(self, number):
        return shown_at(number, self.per_minute) + CLICK_AFTER

    def counted(self, events):
        """Count the clicks that are joined with what was shown, by minute and ad: a batch computation.

        Beside each count is the sum of what the notes say.
        """
        minutes = {}
        for number in range(1, events, 2):
            key = self.clicked_at(number).replace(second=0, microsecond=0), number % 7
            n, marks = minutes.get(key, (0, 0))
            minutes[key] = n + 1, marks + word_of(number) + self.words
        return minutes


SMALL = Size()


def send(log, topic, event_of, numbers):
    with ms.connect(log) as opened, opened.producer(compression="lz4") as producer:
        for name in ("shown", "clicks"):
            opened.create_topic(name, partitions=4, exist_ok=True)
        for first in range(0, len(numbers), 20_000):
            some = numbers[first : first + 20_000]
            values = list(map(event_of, some))
            producer.send_many(topic, values=values, keys=list(map(str, some))).result()


def send_small(log, first, end):
    send(log, "shown", SMALL.shown, range(first, end))
    send(log, "clicks", SMALL.click, range(first + 1, end, 2))


def minutes(store):
    with ms.view("minutes", store=store) as view:
        rows = view.scan().select("window_start", "ad", "n", "marks").rows()
    return {(at, ad): (n, marks) for at, ad, n, marks in rows}


def found(log):
    """Return the ids of the topic, which has each pair once."""
    with ms.connect(log) as opened:
        return [
            json.loads(value)["id"]
            for partition in range(2)
            for value in opened.read("found", partition, columns=("value",))["value"].to_pylist()
        ]


def in_dataset():
    return ms.dataset(os.environ["DATASET"]).scan().collect()["id"].sort().to_list()


def wait_for(said, words, process, wait_s=WAIT_S):
    pause = threading.Event()
    for _ in range(wait_s * 10):
        if words in said.read_text():
            return
        assert process.poll() is None, said.read_text()
        pause.wait(0.1)
    raise AssertionError(said.read_text())


def stopped(process):
    """Wait until a process has stopped, by a signal."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    return os.WIFSTOPPED(status)


@dataclass
class Faults:
    """Faults of S3, by the number of requests of a kind; the first upload begins a time in which nobody reaches it."""

    numbers: dict = field(default_factory=lambda: defaultdict(lambda: itertools.count(1)))
    cut_until: float = 0.0
    seen: Counter = field(default_factory=Counter)

    def decide(self, method, path):
        now = time.monotonic()
        if not self.cut_until and method == "PUT":
            self.cut_until = now + CUT_S
        fault = (
            Fault("silence")
            if now < self.cut_until
            else self.of(next(self.numbers[method]), method)
        )
        if fault is not None:
            self.seen["cut off" if now < self.cut_until else fault.kind] += 1
        return fault

    def of(self, number, method):
        if number % 9 == 0:
            return Fault("503")
        if number % 10 == 0:
            return Fault("slow", 0.5)
        if number % 5 == 0:
            return Fault("cut upload" if method == "PUT" else "cut download")
        return Fault("lost answer") if number % 7 == 0 and method == "PUT" else None


@pytest.mark.thorough
def test_machines_that_share_no_disk_give_the_batch_answer_and_a_driver_goes_on_elsewhere(
    no_spark, machines, tmp_path, s3, postgres_server
):
    log, store = os.environ["LOG"], os.environ["STORE"]
    said = {name: tmp_path / name for name in ("zombie", "second", "killed", "last")}
    send_small(log, 0, 24_000)
    zombie = machines.driver("driver-one", said["zombie"], "SIGSTOP", "2")
    wait_for(said["zombie"], "batch 0", zombie)
    end(machines.workers[0])  # with its executor, and what that one has of the batch
    machines.worker("three")
    assert stopped(zombie), said["zombie"].read_text()

    faults = Faults()
    s3.decide = faults.decide
    second = machines.driver("driver-two", said["second"])
    assert second.wait(WAIT_S) == 0, said["second"].read_text()
    assert minutes(store) == SMALL.counted(24_000)
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.wait(WAIT_S) == 1
    assert "FencedError" in said["zombie"].read_text()

    send_small(log, 24_000, 48_000)
    batches = said["second"].read_text().count("batch ")
    killed = machines.driver("driver-one", said["killed"], "SIGKILL", str(batches + 3))
    assert killed.wait(WAIT_S) == -signal.SIGKILL, said["killed"].read_text()
    last = machines.driver("driver-two", said["last"])
    wait_for(said["last"], "batch ", last)
    postgres_server.kill()
    postgres_server.start()
    assert last.wait(WAIT_S) == 0, said["last"].read_text()
    assert minutes(store) == SMALL.counted(48_000)
    assert sorted(found(log)) == list(range(1, 48_000, 2))
    assert {"cut off", "503", "slow", "cut upload"} <= faults.seen.keys(), faults.seen
    assert in_dataset() == list(range(1, 48_000, 2))

    with ms.view("machines", store=store) as view:
        seen = view.scan().select("machine", "seen").rows()
    assert {"two", "three"} <= {machine for machine, _ in seen} <= {"one", "two", "three"}
    assert all(machine == folders for machine, folders in seen), seen
    for name in ("driver-one", "driver-two"):
        kept = {path.name for path in (machines.root / name / "app/apps/ads").iterdir()}
        assert not kept & {"runs", "frames", "views.db"}


LARGE = {
    "MILLSTREAM_CACHE_BYTES": str(STATE_BYTES // 4),
    "CACHE_DISK": "",
    "WATERMARK": "1 hour",  # the records take less: all of the state is held to the end
}
WORDS = 512  # of a note: a row of state has a little more than 4 KiB then


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machines", [LARGE], indirect=True)
def test_large_state_on_such_machines_is_whole_after_all_that_fails(
    no_spark, machines, tmp_path, s3, postgres_server
):
    log, store = os.environ["LOG"], os.environ["STORE"]
    rows = STATE_BYTES // 4096 // 8 * 8
    size, large = Size(max(VIEWS_PER_MINUTE, rows // 50), WORDS), LargeState(machines, tmp_path)
    machines.given["ROWS_PER_BATCH"] = str(max(400, rows // 16))
    # in four passes over the time, so that the runs of a slot are folded
    for first in range(4):
        send(log, "shown", size.shown, range(first, rows, 4))
    large.report(f"{rows:,} records of about 4 KiB sent")
    large.run("loading", s3, postgres_server, spare="three")
    held, there = state_bytes("ads"), bucket_bytes()
    names = sum(map(len, manifests("ads")))
    large.report(f"{held:,} bytes of state, {there:,} in the bucket, {names:,} of manifests")
    assert STATE_BYTES <= held <= there
    assert minutes(store) == {}

    send(log, "clicks", size.click, range(1, rows, 2))
    large.run("looking up", s3, postgres_server, spare="one")
    assert minutes(store) == size.counted(rows)
    wanted = list(range(1, rows, 2))
    assert sorted(found(log)) == wanted
    assert in_dataset() == wanted
    check_ledger("ads", store)
    check_bucket(machines, tmp_path / "swept", "ads")
    large.report(f"{bucket_bytes():,} bytes in the bucket")


@dataclass
class LargeState:
    """Runs of the app that end well after all has failed; what they took is printed, as figures."""

    machines: Machines
    folder: Path
    began_s: float = field(default_factory=time.monotonic)

    def run(self, what, s3, postgres_server, *, spare):
        """Run a driver that is killed in its fourth batch, under it an executor; then one that meets all else."""
        said = {name: self.folder / f"{what}, {name}" for name in ("killed", "last")}
        before = max((int(line.split()[1]) for line in self.batches()), default=-1)
        killed = self.machines.driver("driver-one", said["killed"], "SIGKILL", str(before + 4))
        wait_for(said["killed"], f"batch {before + 1} ", killed, LONG_WAIT_S)
        end(self.machines.workers.pop(0))
        self.machines.workers.append(self.machines.worker(spare))
        assert killed.wait(LONG_WAIT_S) == -signal.SIGKILL, said["killed"].read_text()
        faults = Faults()
        s3.decide = faults.decide
        last = self.machines.driver("driver-two", said["last"])
        wait_for(said["last"], f"batch {before + 4} ", last, LONG_WAIT_S)
        postgres_server.kill()
        postgres_server.start()
        assert last.wait(LONG_WAIT_S) == 0, said["last"].read_text()
        s3.decide = lambda _method, _path: None
        assert {"cut off", "503", "slow", "cut upload"} <= faults.seen.keys(), faults.seen
        self.report(f"{what} done, with faults of S3: {dict(faults.seen)}")

    def batches(self):
        return [
            line
            for path in self.folder.glob("*, *")
            for line in path.read_text().splitlines()
            if line.startswith("batch ")
        ]

    def report(self, what):
        """Print what was reached, after how long, and the CPU seconds of processes that have ended."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, took_s = used.ru_utime + used.ru_stime, time.monotonic() - self.began_s
        print(f"{what} after {took_s:.0f} s, {cpu_s:.0f} CPU seconds of processes that have ended")


@LOGS
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_ads_demo_on_such_machines_is_equal_to_the_batch_computation(
    no_spark, machines, tmp_path, s3, postgres_server
):
    log, store, program = os.environ["LOG"], os.environ["STORE"], published_on_machines.__file__
    said = {name: tmp_path / name for name in ("killed", "last", "swept")}
    feed_ads(log)
    killed = machines.driver("driver-one", said["killed"], "ads", "SIGKILL", "2", program=program)
    wait_for(said["killed"], "batch 0 ", killed, LONG_WAIT_S)
    end(machines.workers[0])
    machines.worker("three")
    assert killed.wait(LONG_WAIT_S) == -signal.SIGKILL, said["killed"].read_text()
    faults = Faults()
    s3.decide = faults.decide
    last = machines.driver("driver-two", said["last"], "ads", program=program)
    wait_for(said["last"], "batch ", last, LONG_WAIT_S)
    postgres_server.kill()
    postgres_server.start()
    assert last.wait(LONG_WAIT_S) == 0, said["last"].read_text()
    assert {"cut off", "503"} <= faults.seen.keys(), faults.seen

    ads = published_on_machines.ADS
    with ms.connect(log) as opened:
        wanted = ads_expected.expected_results(opened, ads.clients, ads.stop_rule)
        for name, rows in wanted.topics.items():
            assert ads_expected.difference(topic_rows(opened, name, rows), rows).is_empty(), name
    with published_on_machines.open_store(APP, store) as opened:
        for name, rows in wanted.views.items():
            assert rows.height > 0, name
            assert ads_expected.difference(opened.scan(name), rows).is_empty(), name
    check_ledger(APP, store)
    check_bucket(machines, said["swept"], APP, "ads", program=program)


@LOGS
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_cases_of_the_semantics_have_their_answers_on_such_machines(
    no_spark, machines, tmp_path, s3
):
    program = published_on_machines.__file__
    said = {name: tmp_path / name for name in ("first", "swept")}
    published_on_machines.send_cases(os.environ["LOG"])
    faults = Faults()
    s3.decide = faults.decide
    first = machines.driver("driver-one", said["first"], "cases", program=program)
    wait_for(said["first"], "batch 0 ", first, LONG_WAIT_S)
    end(machines.workers[0])
    machines.worker("three")
    assert first.wait(LONG_WAIT_S) == 0, said["first"].read_text()
    answers = sum(len(trial.case.expected) for trial in published_on_machines.TRIALS)
    assert f"answers equal: {answers} of" in said["first"].read_text()


def feed_ads(log):
    """Write the demo's records, late, out of order and doubled as the demo does."""
    records, pause = published_on_machines.ADS.disorder(), threading.Event()
    with ms.connect(log) as opened:
        create_topic(opened)
        with FeedThread(log, records, 1e9) as feeding:
            feeding.start()
            while remaining(records, create_topic(opened)).height:
                feeding.check()
                pause.wait(0.1)


def check_ledger(app, store):
    """Make sure that each record that a step has read is in one of its exits."""
    with published_on_machines.open_store(app, store) as opened:
        ledger = opened.ledger(app)
    exits = ("emitted", "held", "late", "dead", "filtered", "duplicate")
    assert ledger
    assert all(line["read"] == sum(line[name] for name in exits) for line in ledger)


def check_bucket(machines, said, app, *what, program=on_machines.__file__):
    """Make sure that after one more run, which sweeps, the bucket has what manifests name and nothing else."""
    swept = machines.driver("driver-one", said, *what, program=program)
    assert swept.wait(LONG_WAIT_S) == 0, said.read_text()
    named = {object_name(name) for each in manifests(app) for name in _run_names(each)}
    there = list(ObjectClient(os.environ["STATE"]).names())
    assert {name.rpartition("/")[2] for name in there if "/runs/" in name} == named
    assert sum("/runs/" not in name for name in there) == 1, there  # the mark of the newest run


def manifests(app):
    with published_on_machines.open_store(app, os.environ["STORE"]) as store:
        return list(store.state_manifests(app, "main").values())


def state_bytes(app):
    """Return the size of all runs that the committed manifests name."""
    operators = [message for each in manifests(app) for message in json.loads(each).values()]
    return sum(
        run[3] for message in operators for family in message["runs"].values() for run in family
    )


def bucket_bytes():
    return sum(size for _, size in ObjectClient(os.environ["STATE"]).objects())
