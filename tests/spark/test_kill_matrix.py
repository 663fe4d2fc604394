"""Driver and workers killed at every named point, with every kind of output: nothing lost or doubled."""

import os
import subprocess
import sys
from pathlib import Path

import every_join
import pytest
from crash_points import COMMIT_POINTS, RESTART_POINTS, STAGE_POINTS, WORKER_POINTS
from every_sink import calls_of_functions, held, pipeline, rows, send, wanted

from millstream import testing

HERE = Path(__file__).parent
SOURCE = Path(testing.__file__).parents[2]
EVENTS = rows(900)


def run(folder, url, points, number, module="every_sink"):
    """Run the app, dying at the points; give the exit code and what it said."""
    (folder / "marks").mkdir(exist_ok=True)
    program = [sys.executable, HERE / "crash_points.py", folder, url or ""]
    ended = subprocess.run(
        [*program, ",".join(points), str(number), "SIGKILL", "topics"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
            "CRASH_PIPELINE": module,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, -9), ended.stdout + ended.stderr
    return ended.returncode, ended.stdout


def check(folder, url):
    now = held(folder, url)
    assert now.outputs == wanted(folder, EVENTS, url=url)
    assert (now.read, now.balanced) == (len(EVENTS), True)
    shown = [path for path in (folder / "apps").rglob("*") if path.is_file()]
    assert not any(b"p%40ss" in path.read_bytes() for path in shown)  # of the database's address


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_workers_that_die_at_any_point_of_a_stage_change_nothing(tmp_path, url):
    send(tmp_path, EVENTS)
    code, said = run(tmp_path, url, WORKER_POINTS, 2)  # a worker's death is Spark's to mend
    assert (code, said) == (0, "ended caught-up\n")
    died = {mark.name.rsplit("-", 1)[0] for mark in (tmp_path / "marks").glob("*-2")}
    assert died == {point.replace(" ", "-") for point in WORKER_POINTS}
    check(tmp_path, url)
    calls = calls_of_functions(tmp_path)
    assert len(calls) == len(set(calls))


@pytest.mark.thorough
@pytest.mark.timeout(1500)  # ten times a JVM
def test_a_driver_that_dies_at_every_point_changes_nothing(spark, tmp_path, url):
    """Each run mends what the one before it left, and dies in the next batch.

    The three points of a restart come after a death that left the outputs one batch apart, and
    before the next: no run gets past them without having been killed there.
    """
    send(tmp_path, EVENTS)
    points = [point for point in COMMIT_POINTS if url or "database" not in point]
    third = points.index("driver after dataset") + 1
    points = [*STAGE_POINTS, *points[:third], *RESTART_POINTS, *points[third:]]
    for place, point in enumerate(points):
        number = 1 if place == 0 or point in RESTART_POINTS else 2
        assert run(tmp_path, url, [point], number)[0] == -9, point
        if place > 0:
            now = held(tmp_path, url)
            assert (now.doubled(), now.balanced) == ([], True), point
    pipeline(tmp_path, url).run(until="caught-up")
    check(tmp_path, url)
    calls = calls_of_functions(tmp_path)
    repeated = len(calls) - len(set(calls))
    assert 1 <= repeated <= len(points)  # at most once for each time that the driver died


@pytest.mark.long
@pytest.mark.timeout(1500)  # nine times a JVM
def test_joins_and_tables_are_the_same_in_every_place_after_a_driver_died_at_every_point(
    spark, tmp_path
):
    every_join.send(tmp_path)
    points = [point for point in COMMIT_POINTS if point.split()[-1] not in ("database", "function")]
    points = [*STAGE_POINTS, *points, RESTART_POINTS[-1]]
    for place, point in enumerate(points):
        number = 1 if place == 0 or point in RESTART_POINTS else 2
        assert run(tmp_path, None, [point], number, "every_join")[0] == -9, point
        if place > 0:
            assert every_join.held(tmp_path).balanced, point
    every_join.pipeline(tmp_path).run(until="caught-up")
    now, meant = every_join.held(tmp_path), every_join.wanted(tmp_path)
    assert (now.read, now.balanced) == (sum(map(len, every_join.rows().values())), True)
    for name, places in now.results.items():
        (bag,) = {frozenset(bag.items()) for bag in places.values()}
        assert name == "looked_up" or bag == meant[name].items(), name
