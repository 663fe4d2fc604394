"""An app on Apache Hadoop YARN: `millstream run app.py --master yarn`, with its environment shipped.

The machines have nothing of Millstream's, and don't see the driver's folders: an executor's Python and its packages are in the
archive that docs/cluster.md says how to make, and its JVM's jars in another. Only the interpreter is everywhere, as there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyspark
import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from broker.broker_process import AsProcess
from clusters import end
from mount_namespaces import may_unshare
from s3_server import find_binary
from yarn_cluster import HADOOP, MACHINES, ROOT, YarnCluster

import millstream as ms

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
WAIT_S = 600
EXTRAS = ("--extra", "spark", "--extra", "kafka", "--extra", "s3")
PROGRAM = Path(__file__).with_name("on_yarn.py")


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
def cluster(tmp_path):
    if reason := HADOOP.why_not():
        pytest.skip(reason)
    if not may_unshare():
        pytest.skip("this user may not make mount namespaces (unshare): run it as root on Linux")
    with ExitStack() as opened:
        yield YarnCluster(tmp_path / "yarn", opened)


@pytest.fixture
def state(cluster, request):
    """Where runs of state are: in S3, or without a server in what stands for HDFS."""
    if find_binary() is None:
        return f"file://{cluster.shared}/state"
    return request.getfixturevalue("s3_url")


@pytest.fixture
def driver(cluster, tmp_path, database, state):
    """The folder that a user starts the app from, and its environment; events go to the log."""
    pack_environment(tmp_path, cluster.shared / "environment.tar.gz")
    pack_jars(cluster.shared / "jars.zip")
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "environment").symlink_to(sys.prefix)
    passed = [name for name in os.environ if name.startswith("AWS_")]
    settings = {
        "spark.archives": f"file://{cluster.shared}/environment.tar.gz#environment",
        "spark.yarn.archive": f"file://{cluster.shared}/jars.zip",
        "spark.yarn.stagingDir": f"file://{cluster.shared}/staging",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.instances": "2",
        "spark.executor.cores": "1",
        "spark.executor.memory": "768m",
        "spark.yarn.am.memory": "512m",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        # a machine that runs other tests may take long to start a Python
        "spark.python.authenticate.socketTimeout": "180s",
        "spark.executorEnv.MILLSTREAM_CACHE": "./cache",
        **{f"spark.executorEnv.{name}": os.environ[name] for name in passed},
    }
    text = "".join(f"{name} {value}\n" for name, value in settings.items())
    (folder / "spark.properties").write_text(text)
    shutil.copy(PROGRAM, folder / "app.py")
    with AsProcess(tmp_path / "log") as broker:
        environment = {
            **os.environ,
            "JAVA_HOME": str(cluster.java.home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "HADOOP_CONF_DIR": str(cluster.settings),
            "PYSPARK_PYTHON": "./environment/bin/python",
            "PGUSER": unquote(urlsplit(database).username),
            "PGPASSWORD": unquote(urlsplit(database).password),
            "LOG": f"kafka://{broker.address}",
            "STATE": state,
            "STORE": database,
            "DRIVERS_FOLDERS": f"{ROOT / 'src'}:{folder}",
        }
        yield folder, environment


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


def run(driver, name):
    """Start the app as a user would; what it says goes to a file."""
    folder, environment = driver
    said = folder / f"{name}.out"
    command = [
        sys.executable,
        "-m",
        "millstream",
        "run",
        "app.py",
        "--master",
        "yarn",
        "--cores",
        "2",
    ]
    options = ["--until", "caught-up", "--json", "--properties-file", "spark.properties"]
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options, "--conf", f"spark.driver.extraJavaOptions=-Drun={name}"],
            cwd=folder,
            env=environment | {"LOCAL": str(folder / name)},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return process, said


def finished(process, said, cluster):
    try:
        assert process.wait(WAIT_S) == 0
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        logs = "".join(
            path.read_text()[-3000:] for path in said.parent.glob(f"{said.stem}/**/spark.log")
        )
        raise AssertionError(said.read_text()[-3000:] + logs) from failure
    finally:
        end(process)


def test_an_app_runs_on_yarn_in_the_environment_that_it_ships_and_survives_executors(
    no_spark, cluster, driver
):
    log, store = driver[1]["LOG"], driver[1]["STORE"]
    send(log, 0, 40_000)
    finished(*run(driver, "first"), cluster)
    with ms.view("minutes", store=store) as view:
        rows = view.scan().select("window_start", "ad", "n").rows()
    assert {(at, ad): n for at, ad, n in rows} == counted(40_000)
    with ms.view("machines", store=store) as view:
        places = set(view.scan().select("machine", "prefix", "millstream", "seen").rows())
    on_executors = {(host, "environment", "True", "") for host in MACHINES.values()}
    assert places <= on_executors, places

    # another driver, of an empty folder; executors of a machine die as soon as it has some
    send(log, 40_000, 120_000)
    process, said = run(driver, "second")
    pause = threading.Event()
    while not cluster.kill_executor("one") and not cluster.kill_executor("two"):
        assert process.poll() is None, said.read_text()
        pause.wait(0.2)
    finished(process, said, cluster)
    with ms.view("minutes", store=store) as view:
        rows = view.scan().select("window_start", "ad", "n").rows()
    assert {(at, ad): n for at, ad, n in rows} == counted(120_000)
