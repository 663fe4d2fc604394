"""What has published answers, as programs for a cluster whose machines share no disk: the ads demo, and the cases of the semantics.

``python published_on_machines.py MASTER FOLDER HOST ads|cases [SIGNAL BATCH]`` runs one until it has caught up, as
`on_machines.py` does. The cases are compared by the driver, as functions of ``foreach`` are called there.
"""

from __future__ import annotations

import os
import signal
import sys

import polars as pl
from cases.case import ForeachCalls, app_of, check_all, trials_of
from cases.on_spark import WITHOUT_RUNNING_TIME
from on_machines import leave_all_to_executors, run, send_signal_before_commit

import millstream as ms
from millstream.demo.ads_input import AdsInput
from millstream.demo.ads_pipeline import APP, declare
from millstream.kernels.routing import LEDGER_COUNTS, LEDGER_NOTES
from millstream.testing.inputs import items_of
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.store_location import open_state_store, parse_state_store

ADS = AdsInput()  # the week, as the demo has it
SEED = 3
TRIALS = trials_of(WITHOUT_RUNNING_TIME, [4])


def places(folder):
    """Return where everything of an app is, as arguments of ms.App."""
    state, store = os.environ["STATE"], os.environ["STORE"]
    return {"log": os.environ["LOG"], "state": state, "store": store, "local": folder}


def ads(folder):
    app = ms.App(APP, **places(folder), buckets=4)
    declare(app, ADS.clients, ADS.stop_rule)
    return app


def open_store(app, url):
    return open_state_store(parse_state_store(url, app, what="the store"), readonly=True)


class Stored:
    """The outputs of a run, as those of testing.run, read from a state store."""

    def __init__(self, app, store):
        self._app, self._store = app, store

    def __getitem__(self, view):
        return self._store.scan(view)

    @property
    def dead(self):
        return self[DEAD_LETTERS_VIEW]

    @property
    def ledger(self):
        columns = ["batch_id", "step", *LEDGER_COUNTS, *LEDGER_NOTES]
        types = {name: pl.String if name == "step" else pl.Int64 for name in columns}
        return pl.DataFrame(self._store.ledger(self._app), schema=types)


def send_cases(log):
    """Send the events of all cases, each to its topic."""
    app = app_of(TRIALS, ForeachCalls())
    with ms.connect(log) as opened:
        for trial in TRIALS:
            opened.create_topic(trial.name, partitions=trial.partitions)
        with opened.producer() as producer:
            for trial in TRIALS:
                topic = app.topics[trial.name]
                for item in items_of(topic, trial.items(), trial.partitions, SEED):
                    producer.send(
                        trial.name,
                        item.value,
                        key=item.key,
                        partition=item.partition,
                        timestamp_ms=item.at_ms,
                        headers=item.headers or None,
                    )


def main(master, folder, host, what, *ending):
    leave_all_to_executors()
    if ending:
        send_signal_before_commit(getattr(signal, ending[0]), int(ending[1]))
    if what == "ads":
        run(ads(folder), master, host, 12_000)
        return
    calls = ForeachCalls()
    report = run(app_of(TRIALS, calls, buckets=4, **places(folder)), master, host, 250)
    with open_store("cases", os.environ["STORE"]) as store:
        check_all(TRIALS, Stored("cases", store), calls)
    answers = sum(len(trial.case.expected) for trial in TRIALS)
    print("answers equal:", answers, "of", report.read, "records", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
