"""What a session takes of the machine, and what it sets; no JVM is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.engine import machine
from millstream.spark.runtime import session
from millstream.spark.runtime.java import Java

JAVA = Java(Path("/java"), Path("/java/bin/java"), "17.0.1", "JAVA_HOME")


@pytest.mark.parametrize(
    ("memory", "heap"), [(1024, 768), (4096, 1024), (8192, 2048), (16384, 4096), (262144, 4096)]
)
def test_the_jvm_takes_a_quarter_of_the_memory_within_bounds(memory: int, heap: int) -> None:
    assert session.driver_memory_mib(memory) == heap


def test_a_containers_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}
    monkeypatch.setattr(machine, "_control_group", limits.__getitem__)
    assert machine.cores_available() == 1
    assert machine.memory_mib() == 1024
    limits.update({"cpu.max": "max 100000\n", "memory.max": "max\n"})
    assert machine.cores_available() >= 1
    assert machine.memory_mib() > 0


def test_what_a_killed_session_left_is_deleted_and_a_living_ones_is_not(tmp_path: Path) -> None:
    left = tmp_path / "scratch" / "left"
    left.mkdir(parents=True)
    (left / "state.sst").write_text("many gigabytes")
    first = session._Scratch(tmp_path / "scratch")
    assert not left.exists()
    second = session._Scratch(tmp_path / "scratch")
    assert first.path.is_dir()
    for scratch in (first, second):
        scratch.delete()
        assert not scratch.path.exists()
        assert not scratch.sockets.exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_sockets_stand_in_a_folder_that_only_the_user_can_enter(tmp_path: Path) -> None:
    scratch = session._Scratch(tmp_path / "scratch")
    assert scratch.sockets.stat().st_mode & 0o077 == 0
    scratch.delete()


def test_a_long_log_is_put_aside(tmp_path: Path) -> None:
    log = session._open_log(tmp_path)
    log.write_bytes(b"short")
    assert session._open_log(tmp_path).read_bytes() == b"short"
    log.write_bytes(bytes((16 << 20) + 1))
    assert not session._open_log(tmp_path).exists()
    assert (tmp_path / "spark.log.1").stat().st_size == (16 << 20) + 1


def test_importing_the_session_does_not_import_pyspark() -> None:
    # The doctor looks at cores and memory through it where PySpark is missing.
    program = "import sys, millstream.spark.runtime.session; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_on_a_cluster_only_what_is_right_on_many_machines_is_set(tmp_path: Path) -> None:
    asked = session._SessionRequest(cores=6, master="spark://somewhere:7077", settings={})
    cluster = session._settings("app", asked, None)
    assert cluster["spark.master"] == "spark://somewhere:7077"
    assert cluster["spark.sql.shuffle.partitions"] == "6"
    scratch = session._Scratch(tmp_path / "scratch")
    local = session._settings("app", session._SessionRequest(3, None, {}), scratch)
    scratch.delete()
    assert local["spark.master"] == "local[3,4]"
    only_here = {name for name in local if name not in cluster}
    assert "spark.sql.streaming.checkpointFileManagerClass" in only_here
    assert "spark.python.unix.domain.socket.enabled" in only_here
    assert {name for name in only_here if name.startswith(("spark.driver.", "spark.local."))} == {
        "spark.driver.memory",
        "spark.driver.host",
        "spark.driver.bindAddress",
        "spark.local.dir",
    }


def test_the_users_settings_win_and_java_options_are_added_to_ours(tmp_path: Path) -> None:
    scratch = session._Scratch(tmp_path / "scratch")
    options = "spark.driver.extraJavaOptions"
    asked = session._SessionRequest(
        2, None, {"spark.sql.shuffle.partitions": "5", options: "-Xint"}
    )
    settings = session._settings("app", asked, scratch)
    scratch.delete()
    assert settings["spark.sql.shuffle.partitions"] == "5"
    assert settings[options].startswith("-Djava.io.tmpdir=")
    assert settings[options].endswith(" -Xint")


@pytest.mark.parametrize("local", [True, False])
def test_the_environment_of_the_jvm_names_this_python(
    *, local: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/cluster/python")
    scratch = session._Scratch(tmp_path) if local else None
    made = session._environment({**os.environ, "SPARK_HOME": "/old/spark"}, scratch, JAVA)
    assert made["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert made["PYSPARK_PYTHON"] == (scratch.python if scratch else "/cluster/python")
    assert (made["SPARK_HOME"] == "/old/spark") is not local
    if scratch is not None:
        assert (Path(made["SPARK_HOME"]) / "bin" / "spark-submit").is_file()
        scratch.delete()
    assert ("POLARS_MAX_THREADS" in made) is (local or "POLARS_MAX_THREADS" in os.environ)
