"""More than a GiB of rows that one task makes, on a cluster whose driver has less memory than that."""

import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import large_frames
import polars as pl
import pytest
from clusters import Cluster

import millstream as ms

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_task_may_make_more_rows_than_the_driver_has_memory(tmp_path):
    large_frames.send(tmp_path)
    with ExitStack() as opened:
        cluster = Cluster(tmp_path, opened)
        driver = subprocess.Popen(
            [sys.executable, large_frames.__file__, cluster.master, str(tmp_path)],
            env={**cluster.environment, "PYTHONPATH": os.pathsep.join(_paths())},
            stdout=subprocess.PIPE,
            text=True,
        )
        heaps = set()
        while driver.poll() is None:
            heaps |= _heaps(driver.pid)
            with suppress(subprocess.TimeoutExpired):
                driver.wait(1)
        said, _ = driver.communicate()
    assert driver.returncode == 0
    # 128 MiB has the JVM that tells how to start the driver's
    assert heaps - {"-Xmx128m"} == {"-Xmx512m"}
    assert int(said.split()[-1]) < 512 << 10  # KiB
    rows = ms.dataset(tmp_path / "rows").scan()
    length = pl.col("text").str.len_bytes()
    found = rows.select(pl.len(), length.sum().alias("bytes"), length.min().alias("least"))
    count = large_frames.EVENTS * large_frames.ROWS
    assert found.collect().row(0) == (
        count,
        count * large_frames.TEXT_BYTES,
        large_frames.TEXT_BYTES,
    )
    assert rows.select("id", "n").unique().collect().height == count


def _heaps(pid):
    """Return the sizes of heap that the JVMs were started with that a process has started."""
    found = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in children.read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                found |= {word for word in words if word.startswith("-Xmx")} | _heaps(child)
    return found


def _paths():
    here = Path(large_frames.__file__).parent
    return [str(here.parents[1] / "src"), str(here)]
