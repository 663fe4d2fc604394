"""An app on Apache Hadoop YARN: `millstream run app.py --master yarn`, with its environment shipped.

In one test the machines have nothing of Millstream's, and don't see the driver's folders: an executor's Python and its packages are in the
archive that docs/cluster.md says how to make, and its JVM's jars in another. Only the interpreter is everywhere, as there. In another the cluster
is divided into queues, and executors come when there is work, and go when there is none. In one more YARN and HDFS want Kerberos.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyspark
import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from broker.broker_process import AsProcess
from clusters import end
from hdfs_server import HADOOP as HDFS
from hdfs_server import hdfs
from kerberos_server import HOST, REALM, Kdc
from kerberos_server import why_not as why_no_kerberos
from mount_namespaces import may_unshare
from s3_server import find_binary
from yarn_cluster import HADOOP, MACHINES, ROOT, YarnCluster

import millstream as ms
from millstream.object_store.kerberos import proof

pytestmark = pytest.mark.timeout(1800)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
WAIT_S = 600
COMMON = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "768m",
    "spark.yarn.am.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    # a machine that runs other tests may take long to start a Python
    "spark.python.authenticate.socketTimeout": "180s",
    # YARN has Spark's page filter who asks, while it starts; on a busy machine that ends Spark (ConcurrentModificationException)
    "spark.ui.enabled": "false",
}
EXTRAS = ("--extra", "spark", "--extra", "kafka", "--extra", "s3")
PROGRAM = Path(__file__).with_name("on_yarn.py")
ELASTIC = Path(__file__).with_name("elastic_on_yarn.py")
# as docs/cluster.md has it, but for the times, which are minutes there
COME_AND_GO = {
    "spark.yarn.queue": "streams",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.dynamicAllocation.shuffleTracking.timeout": "2s",
}
BURST = 24_000


def uv(*arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev.py"), "uv", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def pack_environment(folder, archive):
    """Make an environment with what the lock file names, and pack it without Spark's jars."""
    environment, listing = folder / "environment", folder / "requirements.txt"
    packages = ("--no-default-groups", "--no-emit-project", "--output-file", listing)
    uv("export", "--frozen", "--quiet", *EXTRAS, *packages)
    uv("build", "--wheel", "--quiet", "--out-dir", folder / "wheel")
    (wheel,) = (folder / "wheel").glob("*.whl")
    uv("venv", "--quiet", environment)
    python = environment / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, "--requirements", listing, wheel)
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(
            environment, ".", filter=lambda each: None if "/pyspark/jars" in each.name else each
        )


def pack_jars(archive):
    """Pack Spark's jars as spark.yarn.archive wants them."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
        for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar"):
            packed.write(jar, jar.name)


@pytest.fixture
def opened():
    if reason := HADOOP.why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def cluster(opened, tmp_path):
    if not may_unshare():
        pytest.skip("this user may not make mount namespaces (unshare): run it as root on Linux")
    return YarnCluster(tmp_path / "yarn", opened)


@pytest.fixture
def state(cluster, request):
    """Where runs of state are: in S3, or without a server in what stands for HDFS."""
    if find_binary() is None:
        return f"file://{cluster.shared}/state"
    return request.getfixturevalue("s3_url")


class User:
    """Somebody who runs the app on a cluster: a folder to start it from, an environment, and a broker with events."""

    def __init__(self, cluster, folder, settings, *, program=PROGRAM, **environment):
        self.folder = folder / "driver"
        self.folder.mkdir()
        shutil.copy(program, self.folder / "app.py")
        passed = [name for name in os.environ if name.startswith("AWS_")]
        given = (
            COMMON | settings | {f"spark.executorEnv.{name}": os.environ[name] for name in passed}
        )
        text = "".join(f"{name} {value}\n" for name, value in given.items())
        (self.folder / "spark.properties").write_text(text)
        broker = cluster.opened.enter_context(AsProcess(folder / "log"))
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(cluster.java.home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "HADOOP_CONF_DIR": str(cluster.settings),
            "LOG": f"kafka://{broker.address}",
            "DRIVERS_FOLDERS": f"{ROOT / 'src'}:{self.folder}",
            **environment,
        }

    def start(self, name, *options):
        """Start the app; what it says goes to a file, what it keeps to a folder of that name."""
        said = self.folder / f"{name}.out"
        command = [sys.executable, "-m", "millstream", "run", "app.py", "--master", "yarn"]
        options = options or ("--until", "caught-up", "--conf", "spark.executor.instances=2")
        given = ["--cores", "2", "--json", "--properties-file", "spark.properties"]
        with said.open("wb") as out:
            process = subprocess.Popen(
                [*command, *options, *given],
                cwd=self.folder,
                env=self.environment | {"LOCAL": str(self.folder / name)},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return process, said

    def view(self, name, *columns):
        """Return the rows of a view."""
        store = self.environment["STORE"]
        place = {"store": store} if store else {"log": self.folder / "first"}
        with ms.view(name, **place) as view:
            return view.scan().select(columns).rows()

    def minutes(self):
        return {(at, ad): n for at, ad, n in self.view("minutes", "window_start", "ad", "n")}


def send(log, first, stop):
    with ms.connect(log) as opened:
        opened.create_topic("clicks", partitions=4, exist_ok=True)
        with opened.producer() as producer:
            for number in range(first, stop):
                at = NOON + timedelta(milliseconds=5 * number)
                producer.send("clicks", {"ad": number % 7, "at": at.isoformat()}, key=str(number))


def counted(events):
    """Count the events of each minute and ad."""
    counts = Counter()
    for number in range(events):
        at = NOON + timedelta(milliseconds=5 * number)
        counts[at.replace(second=0, microsecond=0), number % 7] += 1
    return dict(counts)


def finished(process, said):
    try:
        assert process.wait(WAIT_S) == 0
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        logs = "".join(
            path.read_text()[-3000:] for path in said.parent.glob(f"{said.stem}/**/spark.log")
        )
        raise AssertionError(said.read_text()[-3000:] + logs) from failure
    finally:
        end(process)


@pytest.mark.long
def test_an_app_runs_on_yarn_where_the_machines_have_the_environment(no_spark, opened, tmp_path):
    cluster = YarnCluster(tmp_path / "yarn", opened, apart=False)
    jars = {"spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*"}
    staging = {"spark.yarn.stagingDir": f"file://{cluster.shared}/staging"}
    places = {"STATE": f"file://{cluster.shared}/state", "STORE": ""}
    user = User(cluster, tmp_path, jars | staging, PYSPARK_PYTHON=sys.executable, **places)
    send(user.environment["LOG"], 0, 10_000)
    finished(*user.start("first"))
    assert user.minutes() == counted(10_000)
    assert {host for (host,) in user.view("machines", "machine")} <= {*MACHINES.values()}


@pytest.mark.long
def test_an_app_runs_on_yarn_in_the_environment_that_it_ships_and_survives_executors(
    no_spark, cluster, tmp_path, database, state
):
    pack_environment(tmp_path, cluster.shared / "environment.tar.gz")
    pack_jars(cluster.shared / "jars.zip")
    settings = {
        "spark.archives": f"file://{cluster.shared}/environment.tar.gz#environment",
        "spark.yarn.archive": f"file://{cluster.shared}/jars.zip",
        "spark.yarn.stagingDir": f"file://{cluster.shared}/staging",
        "spark.executorEnv.MILLSTREAM_CACHE": "./cache",
    }
    account = urlsplit(database)
    user = User(
        cluster,
        tmp_path,
        settings,
        PYSPARK_PYTHON="./environment/bin/python",
        PGUSER=unquote(account.username),
        PGPASSWORD=unquote(account.password),
        STATE=state,
        STORE=database,
    )
    (user.folder / "environment").symlink_to(sys.prefix)
    log = user.environment["LOG"]
    send(log, 0, 40_000)
    finished(*user.start("first"))
    assert user.minutes() == counted(40_000)
    places = set(user.view("machines", "machine", "prefix", "millstream", "seen"))
    assert places <= {(host, "environment", "True", "") for host in MACHINES.values()}, places

    # another driver, of an empty folder; executors of a machine die as soon as it has some
    send(log, 40_000, 120_000)
    process, said = user.start("second")
    pause = threading.Event()
    while not cluster.kill_executor("one") and not cluster.kill_executor("two"):
        assert process.poll() is None, said.read_text()
        pause.wait(0.2)
    finished(process, said)
    assert user.minutes() == counted(120_000)


def send_wide(log, first, stop):
    """Send clicks of 600 bytes; each comes twice."""
    with ms.connect(log) as opened:
        opened.create_topic("clicks", partitions=4, exist_ok=True)
        with opened.producer() as producer:
            for number in range(first, stop):
                at = NOON + timedelta(milliseconds=5 * number)
                one = {"id": f"e{number // 2}", "ad": number // 2 % 7, "at": at.isoformat()}
                text = random.Random(number).randbytes(300).hex()
                producer.send("clicks", one | {"text": text}, key=one["id"])


def counted_once(events):
    """Count the clicks of each minute and ad that came for the first time."""
    counts = Counter()
    for number in range(0, events, 2):
        at = NOON + timedelta(milliseconds=5 * number)
        counts[at.replace(second=0, microsecond=0), number // 2 % 7] += 1
    return {key: (n, 600 * n) for key, n in counts.items()}


def read_so_far(said):
    """Return how many events the batches that the app has told of have read."""
    lines = [line for line in said.read_text().splitlines() if line.startswith("{")]
    return sum(json.loads(line).get("read", 0) for line in lines)


def wait_until(condition, process, said):
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert process.poll() is None, said.read_text()[-3000:]
        assert time.monotonic() < deadline, said.read_text()[-3000:]
        pause.wait(0.2)


def executors_until_read(events, cluster, process, said):
    """Wait until the app has read so many events; return how many executors it had at most until then."""
    seen = []

    def has_read():
        seen.append(cluster.executors("elastic"))
        return read_so_far(said) == events

    wait_until(has_read, process, said)
    return max(seen)


@pytest.mark.long
def test_executors_of_a_queue_come_with_work_and_go_without_it(no_spark, opened, tmp_path):
    queues = {"default": 10, "streams": 90}
    cluster = YarnCluster(tmp_path / "yarn", opened, apart=False, queues=queues)
    settings = COME_AND_GO | {
        "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
        "spark.yarn.stagingDir": f"file://{cluster.shared}/staging",
    }
    places = {"STATE": f"file://{cluster.shared}/state", "STORE": ""}
    user = User(
        cluster, tmp_path, settings, program=ELASTIC, PYSPARK_PYTHON=sys.executable, **places
    )
    log = user.environment["LOG"]
    send_wide(log, 0, 10)
    process, said = user.start("first", "--until", "stopped")
    try:
        for number in range(3):
            read = (number + 1) * BURST
            send_wide(log, max(10, number * BURST), read)
            assert executors_until_read(read, cluster, process, said) >= 1
            wait_until(lambda: cluster.executors("elastic") == 0, process, said)
        assert cluster.apps()["elastic"]["queue"].rpartition(".")[2] == "streams"
        process.send_signal(signal.SIGINT)
        finished(process, said)
    finally:
        end(process)
    rows = user.view("minutes", "window_start", "ad", "n", "size")
    assert {(at, ad): (n, size) for at, ad, n, size in rows} == counted_once(3 * BURST)


@pytest.fixture
def secure_cluster(opened, tmp_path, monkeypatch):
    """A YARN and an HDFS that want Kerberos, where alice may do everything; what is to be set to reach that HDFS."""
    pytest.importorskip("gssapi", reason="the extra `kerberos` is not installed here")
    if reason := why_no_kerberos() or HDFS.why_not():
        pytest.skip(reason)
    kdc = Kdc(tmp_path / "kdc", opened)
    keytab, wanted = kdc.keytab("alice"), kdc.hdfs_settings()
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.config))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{kdc.probe}")
    options = (f"-Djava.security.krb5.conf={kdc.config}",)
    (tmp_path / "hdfs").mkdir()
    files = opened.enter_context(
        hdfs(tmp_path / "hdfs", HOST, wanted, options, partial(proof, HOST))
    )
    common = wanted | kdc.yarn_settings() | {"fs.defaultFS": files.url}
    cluster = YarnCluster(tmp_path / "yarn", opened, apart=False, common=common, options=options)
    return (
        cluster,
        keytab,
        {
            "KRB5_CONFIG": str(kdc.config),
            "MILLSTREAM_WEBHDFS": files.environment()["MILLSTREAM_WEBHDFS"],
        },
    )


def machine_with_tickets(cluster):
    """Return on which machine a container has tickets of its own; "" if none has."""
    for found in cluster.root.glob("*/local/usercache/alice/appcache/*/container_*/tickets"):
        return found.relative_to(cluster.root).parts[0]
    return ""


@pytest.mark.long
def test_an_app_runs_on_a_yarn_with_kerberos_and_survives_executors(
    no_spark, secure_cluster, tmp_path
):
    cluster, keytab, places = secure_cluster
    executors = places | {
        "MILLSTREAM_CACHE": "./cache",
        "KRB5_CLIENT_KTNAME": f"./{keytab.name}",
        "KRB5CCNAME": "FILE:./tickets",
    }
    settings = {
        "spark.kerberos.keytab": keytab,
        "spark.kerberos.principal": f"alice@{REALM}",
        "spark.files": keytab,
        "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
        **{f"spark.executorEnv.{name}": value for name, value in executors.items()},
        **{
            f"spark.{process}.extraJavaOptions": cluster.options[0]
            for process in ("driver", "executor", "yarn.am")
        },
    }
    user = User(
        cluster,
        tmp_path,
        settings,
        program=ELASTIC,
        PYSPARK_PYTHON=sys.executable,
        STATE="hdfs://namenode/user/alice/state",
        STORE="",
        KRB5_CLIENT_KTNAME=str(keytab),
        KRB5CCNAME=f"FILE:{tmp_path}/tickets",
        **places,
    )
    send_wide(user.environment["LOG"], 0, BURST)
    process, said = user.start("first")
    try:
        # an executor has taken tickets by the keytab that it was brought; it dies in the batch
        wait_until(lambda: machine_with_tickets(cluster), process, said)
        assert cluster.kill_executor(machine_with_tickets(cluster))
        finished(process, said)
    finally:
        end(process)
    assert cluster.apps()["elastic"]["user"] == "alice"
    rows = user.view("minutes", "window_start", "ad", "n", "size")
    assert {(at, ad): (n, size) for at, ad, n, size in rows} == counted_once(BURST)
