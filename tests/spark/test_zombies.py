"""A run that sleeps in the middle of a batch, and wakes up after a newer one has gone on: refused."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from every_sink import BATCH, calls_of_functions, held, pipeline, rows, send, wanted
from test_kill_matrix import HERE, SOURCE

from millstream.errors import ConfigError

EVENTS = rows(900)


@contextmanager
def asleep(folder, url, point, *, number=1, topics=False):
    """Start a run in a process of its own, and stop its driver at a point, as SIGSTOP does."""
    (folder / "marks").mkdir(exist_ok=True)
    program = [
        sys.executable,
        HERE / "crash_points.py",
        folder,
        url or "",
        point,
        str(number),
        "SIGSTOP",
    ]
    process = subprocess.Popen(
        [*program, "topics" if topics else ""],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), point
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wake(process):
    """Let it go on; give what it says in the end."""
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate()
    return said


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_run_that_wakes_up_after_a_newer_one_is_refused_by_every_output(spark, tmp_path, url):
    """The old run is refused by the view store; then it knocks at each output by itself."""
    send(tmp_path, EVENTS)
    with asleep(tmp_path, url, "driver before commit", number=4) as old:
        new = pipeline(tmp_path, url, topics=False)
        report = new.run(until="caught-up", rows_per_batch=BATCH, count=2 * BATCH)
        assert report.reason == "count"
        assert report.batches >= 2
        before, calls = held(tmp_path, url, topics=False), calls_of_functions(tmp_path)
        said = wake(old).splitlines()
    databases = ["database refused"] if url else []
    # A function cannot refuse: it is called again, and told by its key that it was before.
    assert said[:-1] == [*databases, "dataset refused", "function took it", "views refused"]
    assert said[-1].startswith("FencedError Run ")
    assert held(tmp_path, url, topics=False) == before
    assert before.doubled() == []
    assert set(calls_of_functions(tmp_path)) == set(calls)
    pipeline(tmp_path, url, topics=False).run(until="caught-up")
    now = held(tmp_path, url, topics=False)
    assert now.outputs == wanted(tmp_path, EVENTS, url=url, topics=False)
    assert (now.read, now.balanced) == (len(EVENTS), True)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_run_that_has_committed_and_sleeps_before_spark_knows_it_changes_nothing_more(
    spark, tmp_path
):
    send(tmp_path, EVENTS)
    with asleep(tmp_path, None, "driver after commit") as old:
        pipeline(tmp_path, topics=False).run(
            until="caught-up", rows_per_batch=BATCH, count=2 * BATCH
        )
        before = held(tmp_path, topics=False)
        said = wake(old)
    # Who is first to refuse it: Spark's own log, which it writes next, or the view store, asked for the next batch.
    words = (
        "FencedError A newer run of the app 'matrix' has begun",
        "FencedError Run 1 of the job",
    )
    assert said.splitlines()[-1].startswith(words), said
    assert held(tmp_path, topics=False) == before
    pipeline(tmp_path, topics=False).run(until="caught-up")
    assert held(tmp_path, topics=False).outputs == wanted(tmp_path, EVENTS, topics=False)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_run_with_topics_owns_the_log_while_it_sleeps_and_no_other_can_begin(spark, tmp_path):
    send(tmp_path, EVENTS)
    with asleep(tmp_path, None, "driver after topics", topics=True) as old:
        with pytest.raises(ConfigError, match=f"owned by process {old.pid}"):
            pipeline(tmp_path).run(until="caught-up")
        assert wake(old) == "ended caught-up\n"
    now = held(tmp_path)
    assert now.outputs == wanted(tmp_path, EVENTS)
    assert (now.read, now.balanced) == (len(EVENTS), True)
