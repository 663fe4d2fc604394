"""Apps whose runs of state are at a URL: the same answers as in a folder, restarts, kills, resets."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import azure_server
import pytest
from s3_server import SECRET, Fault
from state_app import declare, minutes, send

from millstream import testing
from millstream.engine.stages import run_files
from millstream.engine.stages.executor import _run_names
from millstream.engine.stages.run_files import object_name
from millstream.errors import ConfigError
from millstream.object_store.client import ObjectClient
from millstream.ops.reset import find_footprint, reset
from millstream.views.state_store.sqlite_store import SqliteStateStore

HERE = Path(__file__).parent
SOURCE = Path(testing.__file__).parents[2]


def named(folder):
    with SqliteStateStore(folder / "apps/counts/views.db", readonly=True) as store:
        state = store.state_manifests("counts", "main")
        return {object_name(name) for each in state.values() for name in _run_names(each)}


LONG = pytest.mark.long


ONLY_LONG = [pytest.param(name, marks=LONG) for name in ("file", "azure", "google", "hdfs")]


@pytest.fixture(params=[*ONLY_LONG, "s3"])
def url(request, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    if request.param == "file":
        return f"file://{tmp_path}/state"
    return request.getfixturevalue(f"{request.param}_url")


def objects(url):
    if url.startswith("file"):
        root = Path(url.removeprefix("file://"))
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return sorted(ObjectClient(url).names())


@pytest.mark.timeout(900)
def test_an_app_runs_goes_on_and_is_reset_and_leaves_nothing(
    no_spark, tmp_path, url, in_workers, monkeypatch
):
    monkeypatch.setattr(run_files, "OWN_FILE_BYTES_MIN", 4 << 10)  # in the driver
    local, remote = tmp_path / "local", tmp_path / "remote"
    seen = []
    for first, end in ((0, 800), (800, 2000)):
        for folder, state in ((local, None), (remote, url)):
            send(folder, first, end)
            app = declare(folder, state)
            report = app.run(until="caught-up", on_progress=seen.append, rows_per_batch=500)
            assert report.read == end - first
        assert minutes(local) == minutes(remote)
    assert len(minutes(remote)) > 100
    assert not list((remote / "apps/counts").glob("runs/*"))
    there = objects(url)
    (prefix,) = {name.rpartition("/runs/")[0] for name in there if "/runs/" in name}
    runs = {name.rpartition("/")[2] for name in there if "/runs/" in name}
    assert named(remote) <= runs
    assert [name for name in there if "/started/" in name] == [f"{prefix}/started/000000000002"]
    if not url.startswith("file"):
        requests = [each.object_store for each in seen if each.object_store]
        assert all(each["puts"] <= 6 and each["bytes_up"] > 0 for each in requests)
        assert not any("retries" in each for each in requests)
    with pytest.raises(ConfigError, match="Give the state= that it was made with"):
        declare(remote).run(until="caught-up")
    with pytest.raises(ConfigError, match="Give the state= that it was made with"):
        declare(local, url).run(until="caught-up")
    kept = [path for path in (remote / "apps").rglob("*") if path.is_file()]
    secrets = (SECRET.encode(), azure_server.KEY.encode())
    assert not any(secret in path.read_bytes() for path in kept for secret in secrets)
    found = find_footprint("counts", remote, remote)
    assert found.objects.count == len(there)
    reset(found)
    assert objects(url) == []
    assert declare(remote, url).run(until="caught-up").read == 2000
    assert minutes(remote) == minutes(local)


KILLED = """
import os, sys
from pathlib import Path
from state_app import declare
from millstream.object_store.client import ObjectClient
from millstream.engine.stages import executor
executor.DRIVER_BYTES_MAX = -1 if sys.argv[3] == "workers" else 1 << 40
app = declare(Path(sys.argv[1]), sys.argv[2])
batches = []
app.run(until="caught-up", rows_per_batch=300, on_progress=lambda p: (batches.append(p), len(batches) == int(sys.argv[4]) and os.kill(os.getpid(), 9)))
"""


def faulty():
    """Decide on faults by the number of a request: uploads that are torn or whose answers are lost, downloads, 503s."""
    numbers = itertools.count(1)

    def decide(method, _path):
        number = next(numbers)
        if number % 4 == 0:
            return Fault({"PUT": "cut upload", "GET": "cut download"}.get(method, "503"))
        if number % 5 == 0:
            return Fault("lost answer" if method == "PUT" else "503")
        return None

    return decide


@pytest.fixture(params=[*ONLY_LONG, pytest.param("s3", marks=pytest.mark.thorough)])
def faulty_url(request, tmp_path, monkeypatch):
    """A URL of a store whose requests fail now and then, if there are any."""
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    if request.param == "file":
        return f"file://{tmp_path}/state"
    server = request.getfixturevalue(request.param)
    for proxy in (server.names, server.data) if request.param == "hdfs" else (server,):
        proxy.decide = faulty()
    return request.getfixturevalue(f"{request.param}_url")


@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_goes_on_with_the_state_that_it_had(no_spark, tmp_path, faulty_url):
    send(tmp_path / "remote", 0, 3000)
    send(tmp_path / "local", 0, 3000)
    for where, batch in (("workers", 2), ("driver", 1), ("workers", 1)):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, tmp_path / "remote", faulty_url, where, str(batch)],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE), str(HERE.parent)])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert killed.returncode == -9, killed.stdout + killed.stderr
        assert not any(each in killed.stdout + killed.stderr for each in (SECRET, azure_server.KEY))
    for folder, state in (("remote", faulty_url), ("local", None)):
        report = declare(tmp_path / folder, state).run(until="caught-up")
        assert report.reason == "caught-up"
    assert minutes(tmp_path / "remote") == minutes(tmp_path / "local")
    # One more run has nothing to read, and sweeps: what is left is named, besides the mark of the newest run.
    declare(tmp_path / "remote", faulty_url).run(until="caught-up")
    there = objects(faulty_url)
    left = {name.rpartition("/")[2] for name in there if "/runs/" in name}
    assert left == named(tmp_path / "remote")
    assert sum("/runs/" not in name for name in there) == 1, there
