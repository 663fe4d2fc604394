"""A run of an app that is killed, by SIGKILL, at named points of its batches.

``python crashing.py FOLDER POINT[,POINT...] NUMBER`` runs the app of :mod:`test_kill_matrix` and
dies, or lets one of its Python workers die, the NUMBER-th time that it comes to each POINT. What it
changes of the program is only that: where to die.
"""

import os
import signal
import sys
from pathlib import Path

from millstream.spark import stage_runner
from millstream.views.commit import Targets
from millstream.views.store import ViewStore

WORKER_POINTS = ("worker before stage", "worker in stage", "worker after stage")
DRIVER_POINTS = (
    "driver before taking a run number",
    "driver after taking a run number",
    "driver before commit",
    "driver in commit",
    "driver after commit",
)


def come_to(point):
    """Die, if this is a point to die at, and the time for it."""
    marks, points, number = os.environ["CRASH"].split("|")
    if point in points.split(",") and _is_the_time(Path(marks), point, int(number)):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_the_time(marks, point, number):
    """Count the times at the point, over all processes; true exactly once."""
    for count in range(1, number + 1):
        try:
            (marks / f"{point.replace(' ', '-')}-{count}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return count == number
    return False


class DyingRunner(stage_runner.StageRunner):
    """A stage runner whose process dies at a point; how it is told is in the environment."""

    def run(self, bucket, rows, manifest, parts):
        come_to("worker before stage")
        out = list(super().run(bucket, rows, manifest, parts))
        for done, row in enumerate(out):
            if done == 1:
                come_to("worker in stage")
            yield row
        come_to("worker after stage")


def wrap(owner, name, *, before=None, after=None):
    real = getattr(owner, name)

    def dying(*args, **kwargs):
        come_to(before)
        result = real(*args, **kwargs)
        come_to(after)
        return result

    setattr(owner, name, dying)


def main(folder):
    from test_kill_matrix import pipeline

    stage_runner.StageRunner = DyingRunner
    wrap(ViewStore, "begin_run", before=DRIVER_POINTS[0], after=DRIVER_POINTS[1])
    wrap(Targets, "commit", before="driver before commit", after="driver after commit")
    wrap(ViewStore, "_apply", after="driver in commit")
    report = pipeline(folder).run(until="caught-up", rows_per_batch=150)
    print("ended", report.reason, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["crashing"] = sys.modules["__main__"]
    DyingRunner.__module__ = "crashing"
    main(sys.argv[1])
