"""A run of an app that is killed or stopped, by a signal, at named points of its batches.

``python crash_points.py FOLDER URL POINT[,POINT...] NUMBER SIGNAL TOPICS [LOG]`` runs the app of
:mod:`every_sink`, or of the module that ``CRASH_PIPELINE`` names, on the engine of MILLSTREAM_ENGINE, over the folder or over the log of that address. The NUMBER-th time that it comes to each POINT, SIGNAL goes to the driver, or to the
Python worker that came there. What it changes of the program is only that: where it ends.
"""

import importlib
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

from millstream.engine.plan_log import PlanLog
from millstream.engine.stages import executor
from millstream.errors import FencedError, MillstreamError
from millstream.views.commit.committer import BatchCommitter
from millstream.views.schema import Fence
from millstream.views.sink import SinkBatch
from millstream.views.sinks.dataset import DatasetSink
from millstream.views.sinks.foreach import ForeachSink
from millstream.views.sinks.postgres import PostgresSink
from millstream.views.sinks.topics import TopicsSink
from millstream.views.state_store.store import StateStore

WORKER_POINTS = ("worker before stage", "worker in stage", "worker after stage")
# The driver dies while a worker is there: the stage's runs may be on disk or not.
STAGE_POINTS = ("driver before stage", "driver after stage")
RESTART_POINTS = (
    "driver before taking a run number",
    "driver after taking a run number",
    "driver after all know the run",
)
COMMIT_POINTS = (
    "driver before commit",
    "driver after topics",
    "driver after database",
    "driver after dataset",
    "driver after function",
    "driver in commit",
    "driver after commit",
)
# Of the engine "local", which plans batches itself; it has no workers, and dies in its stages.
PLAN_POINTS = (
    "driver before plan",
    "driver in plan",
    "driver after plan",
    "driver in stage",
    "driver before mark",
)
TRANSACTION_POINT = "driver in transaction"  # over kafka://: records are sent, nothing is committed
OTHERS = {
    "topics": TopicsSink,
    "database": PostgresSink,
    "dataset": DatasetSink,
    "function": ForeachSink,
}


def come_to(point):
    """End here, if this is a point to end at, and the time for it."""
    marks, points, number, which, driver = os.environ["CRASH"].split("|")
    if point in points.split(",") and _is_the_time(Path(marks), point, int(number)):
        target = int(driver) if point.startswith("driver") else os.getpid()
        if target != os.getpid():
            os.kill(target, getattr(signal, which))
        else:  # sent to the process, it may be taken by another thread, and this one goes on meanwhile
            signal.pthread_kill(threading.get_ident(), getattr(signal, which))


def _is_the_time(marks, point, number):
    """Count the times at the point, over all processes; true exactly once."""
    for count in range(1, number + 1):
        try:
            (marks / f"{point.replace(' ', '-')}-{count}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return count == number
    return False


class DyingRunner(executor.StageRunner):
    """A stage runner that comes to points; which of them count is in the environment."""

    def run_task(self, work):
        come_to("worker before stage")
        come_to("driver before stage")
        done = super().run_task(work)
        come_to("worker after stage")
        come_to("driver after stage")
        return done

    def run(self, work, files):
        for done in super().run(work, files):
            come_to("driver in stage")
            come_to("worker in stage")  # the runs of a bucket are made, and nobody knows of them
            yield done


def wrap(owner, name, *, before=None, after=None):
    real = getattr(owner, name)

    def dying(*args, **kwargs):
        come_to(before)
        result = real(*args, **kwargs)
        come_to(after)
        return result

    setattr(owner, name, dying)


def knock_everywhere(commit):
    """Wrap the commit: a run that is refused tries every output by itself before it gives up."""

    def knocking(committer, batch_id, outcome, status, *told, **kept):
        try:
            return commit(committer, batch_id, outcome, status, *told, **kept)
        except FencedError:
            fence = Fence(committer.plan.app, committer._job, committer.run, batch_id)
            part = SinkBatch(outcome.rows, outcome.position)
            for name, kind in OTHERS.items():
                for target in committer.sinks:
                    if isinstance(target, kind) and target.participates(part):
                        say(name, lambda target=target: target.commit(fence, part))
            changes = committer._view_changes(outcome)
            say(
                "views",
                lambda: committer.state_store.commit(fence, changes, position={}, status=status),
            )
            raise

    return knocking


def say(name, attempt):
    try:
        attempt()
    except FencedError:
        print(name, "refused", flush=True)
    else:
        print(name, "took it", flush=True)


def main(folder, url, points, number, which, topics, log=None):
    program = importlib.import_module(os.environ.get("CRASH_PIPELINE", "every_sink"))
    os.environ["CRASH"] = f"{folder}/marks|{points}|{number}|{which}|{os.getpid()}"
    executor.StageRunner = DyingRunner
    if any("stage" in point for point in points.split(",")):
        executor.DRIVER_BYTES_MAX = -1  # all in workers
    else:
        turns = itertools.cycle([True, False])
        executor.StageExecutor._is_small = lambda _stages, _work: next(turns)
    wrap(StateStore, "begin_run", before=RESTART_POINTS[0], after=RESTART_POINTS[1])
    BatchCommitter.commit = knock_everywhere(BatchCommitter.commit)
    wrap(BatchCommitter, "begin_run", after=RESTART_POINTS[2])
    wrap(BatchCommitter, "commit", before="driver before commit", after="driver after commit")
    for name, target in OTHERS.items():
        wrap(target, "commit", after=f"driver after {name}")
    wrap(StateStore, "_apply", after="driver in commit")
    wrap(PlanLog, "add", before=PLAN_POINTS[0], after=PLAN_POINTS[2])
    wrap(PlanLog, "_text", after=PLAN_POINTS[1])  # a draft is there, and empty
    wrap(PlanLog, "mark_committed", before=PLAN_POINTS[4])
    if log is not None:
        from millstream.client.kafka.transaction import KafkaTransactionManager

        wrap(KafkaTransactionManager, "commit", before=TRANSACTION_POINT)
    app = program.pipeline(folder, url or None, topics=topics == "topics", log=log)
    try:
        report = app.run(until="caught-up", rows_per_batch=program.BATCH)
    except MillstreamError as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("ended", report.reason, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["crash_points"] = sys.modules["__main__"]
    DyingRunner.__module__ = "crash_points"
    main(*sys.argv[1:])
