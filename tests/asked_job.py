"""Runs the app of question_model in small batches, marked as a run, until it is killed: a job that is asked meanwhile."""

import sys
import time
from pathlib import Path

from tests.question_model import question_app

from millstream.engine.local_run import LocalRun
from millstream.views.runs.control_files import hold_run_lock

folder, rows_per_batch, batches = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
app = question_app(folder)


def committed(progress):
    print(progress.batch_id, flush=True)
    while progress.batch_id + 1 >= batches:
        time.sleep(0.05)


app.folder.mkdir(parents=True, exist_ok=True)
with hold_run_lock(app.folder, 1):
    run = LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=rows_per_batch)
    run.run(on_batch=committed)
