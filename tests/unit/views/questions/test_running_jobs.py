"""A job that commits, folds and removes runs while it is asked; one that is killed; and a state store in a database."""

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.question_model import (
    ADS,
    STEPS,
    Expected,
    answered_rows,
    draw_records,
    question_app,
    write_records,
)

from millstream.client import connect
from millstream.engine.local_run import LocalRun
from millstream.kernels.rescale import rescale_manifests
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.store_location import open_state_store

LONG = "5 minutes"
ROOT = Path(__file__).parents[4]


def written(folder, seed, partitions, count):
    records = draw_records(seed, count, partitions)
    write_records(folder, records, partitions)
    return records


def run(app, folder, rows_per_batch, ends=None):
    job = LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=rows_per_batch)
    job.run(ends)


def is_right(records, partitions, answer, names):
    expected = Expected(records, answer.position, partitions)
    for name in names:
        assert answered_rows(name, answer.value[name]) == expected.rows(name), name


@pytest.mark.long
def test_many_ask_while_batches_commit_and_runs_are_removed(tmp_path):
    records = written(tmp_path, 11, 2, 120)
    app = question_app(tmp_path)
    run(app, tmp_path, 4, {"clicks": [2, 2], "people-topic": [0, 0]})
    done, failed, asked = threading.Event(), [], []

    def ask(number):
        dice = random.Random(number)
        mine = question_app(tmp_path)  # as in another process: its own connections, and runs
        try:
            while not done.is_set():
                if dice.random() < 0.4:
                    names = dice.sample([*STEPS], 4)
                    is_right(records, 2, mine.ask("everything", names=names, deadline=LONG), names)
                else:
                    ad = dice.choice(ADS)
                    answer = mine.ask("minutes", ad=ad, deadline=LONG)
                    expected = Expected(records, answer.position, 2).rows("minutes")
                    of_ad = [row for row in expected if row["ad"] == ad]
                    assert answered_rows("minutes", answer.rows) == of_ad
                asked.append(answer_number(mine))
        except BaseException as error:
            failed.append(error)
            raise

    def answer_number(mine):
        return mine.ask("minutes", ad=0, deadline=LONG).batch_id

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        run(app, tmp_path, 12)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert len(set(asked)) > 1, "answers were of several batches"


def test_a_function_whose_runs_are_removed_is_called_again_with_the_newer_state(tmp_path):
    records = written(tmp_path, 12, 1, 120)
    app = question_app(tmp_path)
    run(app, tmp_path, 20, {"clicks": [30], "people-topic": [3]})
    asking, calls = question_app(tmp_path), []

    @asking.question("interrupted")
    def interrupted(state):
        calls.append(state.batch_id)
        if len(calls) == 1:
            run(app, tmp_path, 10)  # the job folds its runs, and removes what it replaced
        return {name: state.rows(name) for name in STEPS}

    answer = asking.ask("interrupted", deadline=LONG)
    assert len(calls) == 2
    assert answer.batch_id == calls[1] > calls[0]
    assert answer.position["clicks"] == {"0": 120}
    is_right(records, 1, answer, [*STEPS])


def test_what_was_just_written_can_be_asked_for(tmp_path):
    written(tmp_path, 13, 1, 30)
    app = question_app(tmp_path)
    run(app, tmp_path, 100)
    before = app.ask("people", user="zoe").rows
    with connect(tmp_path) as log, log.producer() as producer:
        sent = producer.send(
            "people-topic", {"user": "zoe", "city": "Bern"}, key="zoe", partition=0
        )
        offset = sent.result().offset
    job = threading.Thread(target=run, args=(app, tmp_path, 100))
    job.start()
    wanted = {"people-topic": {"0": offset + 1}}
    after = app.ask("people", user="zoe", at_least=wanted, deadline=LONG).rows
    job.join()
    assert before.is_empty()
    assert after.to_dicts() == [{"user": "zoe", "city": "Bern"}]


def test_the_state_of_a_killed_job_can_be_asked_and_says_that_it_does_not_run(tmp_path):
    records = written(tmp_path, 14, 2, 60)
    command = [sys.executable, "-m", "tests.asked_job", str(tmp_path), "15", "3"]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert [job.stdout.readline().strip() for _ in range(3)] == ["0", "1", "2"]
        app = question_app(tmp_path)
        while_it_runs = app.ask("everything", names=[*STEPS], deadline=LONG)
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    afterwards = app.ask("everything", names=[*STEPS], deadline=LONG)
    assert (while_it_runs.running, afterwards.running) == (True, False)
    assert afterwards.position == while_it_runs.position
    is_right(records, 2, afterwards, [*STEPS])


def test_state_whose_manifests_are_in_postgresql_is_asked(tmp_path, database):
    records = written(tmp_path, 15, 2, 60)
    app = question_app(tmp_path, store=database)
    run(app, tmp_path, 25)
    asking = question_app(tmp_path, store=database)
    answer = asking.ask("everything", names=[*STEPS], deadline=LONG)
    assert answer.running is None
    is_right(records, 2, answer, [*STEPS])
    assert asking.ask("minutes", ad=[*ADS], deadline=LONG).position == answer.position
    asking.close_questions()


@pytest.mark.parametrize("buckets", [pytest.param(1, marks=pytest.mark.long), 8])
def test_keys_are_found_however_many_buckets_there_are(tmp_path, buckets):
    records = written(tmp_path, 16, 1, 40)
    app = question_app(tmp_path, buckets=buckets)
    run(app, tmp_path, 25)
    answer = app.ask("everything", names=[*STEPS], deadline=LONG)
    is_right(records, 1, answer, [*STEPS])
    people = app.ask("people", user=["ann", "bob", "cid", "dan", "eva"]).rows
    assert answered_rows("people", people) == Expected(records, answer.position, 1).rows("people")


def test_what_a_function_has_opened_stays_until_it_has_answered(tmp_path):
    records = written(tmp_path, 17, 1, 120)
    app = question_app(tmp_path)
    run(app, tmp_path, 20, {"clicks": [30], "people-topic": [3]})
    asking, calls = question_app(tmp_path), []

    @asking.question("twice")
    def twice(state):
        calls.append(state.batch_id)
        first = {name: state.rows(name) for name in STEPS}
        if len(calls) == 1:
            run(app, tmp_path, 10)  # the job folds its runs, and removes what it replaced
            asking._service._kept_house = -1e9  # with the next question, runs are let go
            asking.ask("minutes", ad=1, deadline=LONG)
        again = {name: state.rows(name) for name in STEPS}
        assert all(again[name].equals(first[name]) for name in STEPS)
        return again

    answer = asking.ask("twice", deadline=LONG)
    assert calls == [answer.batch_id]
    is_right(records, 1, answer, [*STEPS])


def test_after_a_rescale_keys_are_found_before_the_next_run_and_in_it(tmp_path):
    records = written(tmp_path, 18, 1, 60)
    app = question_app(tmp_path, buckets=4)
    run(app, tmp_path, 25)
    wanted = {"bucket_count": 8, "hash_seed": 0, "state_buckets": 4, "partitions": 4}

    def check():
        answer = app.ask("everything", names=[*STEPS], deadline=LONG)
        is_right(records, 1, answer, [*STEPS])
        expected = Expected(records, answer.position, 1)
        for name in ("people", "totals"):
            rows = app.ask(name, user=["ann", "bob", "cid", "dan", "eva"], deadline=LONG).rows
            assert answered_rows(name, rows) == expected.rows(name)

    check()
    with open_state_store(app.state_store) as store:
        store.set_partitioning("asked", JOB, wanted, was={})  # as millstream rescale --buckets 8
        check()
        checkpoint = store._read(
            lambda db: db.execute("SELECT checkpoint_id FROM _fences").fetchone()
        )
        begun, batch_id = store.begin_run("asked", JOB, *checkpoint)
        check()
        manifests = store.state_manifests("asked", JOB)
        divided = rescale_manifests(app.plan().stages, manifests, 4, 8)
        start = RunStart("asked", JOB, begun, batch_id)
        store.replace_state(start, divided, {**wanted, "state_buckets": 0}, was=wanted)
        check()
