"""A batch that was committed long ago becomes a test: the state before it is computed again, as it was."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from edited_app import EDIT, SOURCE, EditedApp, events
from state_content import state_content

import millstream as ms
from millstream.engine.rescale import rescale
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.rescale import rescale_manifests
from millstream.kernels.state.keyhash import Buckets
from millstream.ops.deploy import deploy
from millstream.ops.incident import capture_incident
from millstream.testing import replay_incident
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.store_location import open_state_store

# Windows of windows, an as-of join with a table, and state that goes by order.
RICH = (
    SOURCE
    + """
rates = clicks.stream(time="at", watermark=rule, name="rates").select("ad", "at", was="cost")
stream.join_asof(rates.table("ad").drop("at"), "ad").view("priced", key=["ad", "at"])
stream.dedup(["ad", "cost"], within="20 seconds").view("once", key="at")
stream.window(ms.session("7 seconds"), by="ad", name="visits").agg(n=ms.count()).view("visits")
"""
)


def state_of(app):
    """Return the number of the batch that comes next, and what the state before it holds."""
    with open_state_store(app.state_store, readonly=True) as store:
        number = store.last_batch_id(app.name) + 1
    return number, state_content(app.state_store, app.name, app.folder / "runs")


def packed_state(folder, app):
    return state_content(folder / "state" / "views.db", app.name, folder / "state" / "runs")


def run_in_steps(edited, app, steps, dice, first=0):
    """Append and run, step by step, in batches of random sizes; return the states that were seen on the way."""
    known = {}
    for seed in range(steps):
        count = dice.randrange(20, 60)
        edited.append(events(count, seed, first=first))
        first += count
        edited.rows_per_batch = dice.choice((17, 40, 1000))
        edited.run(app)
        number, held = state_of(app)
        known[number] = held
    return known


@pytest.mark.parametrize("partitions", [1, 4])
def test_the_state_before_a_batch_is_that_which_was_there(tmp_path, partitions):
    edited = EditedApp(tmp_path, partitions, source=RICH)
    edited.create()
    app = edited.write()
    known = run_in_steps(edited, app, 4, random.Random(partitions))
    numbers = sorted(known)[:-1]
    assert len(numbers) == 3
    for number in numbers:
        seen = []
        folder = tmp_path / f"incident-{number}"
        done = capture_incident(app, edited.file, folder, number, seen.append)
        assert done.committed
        assert done.failure is None
        assert packed_state(folder, app) == known[number]
        assert len(seen) == number  # from the beginning, with what is left
        assert [one.left for one in seen] == sorted((one.left for one in seen), reverse=True)
        assert seen[-1].left == 0
    rows = replay_incident(folder, edited.file)
    assert rows["dear"].height > 0


FRAGILE = SOURCE.replace(
    "    weight = pl.col",
    "    if frame.filter(pl.col('cost') > LIMIT).height:\n        raise ValueError('too dear')\n    weight = pl.col",
).replace("FACTOR = 2", "FACTOR = 2\nLIMIT = 50")


def test_a_bug_that_one_batch_has_met_is_a_test_that_fails_until_it_is_mended(tmp_path, call):
    edited = EditedApp(tmp_path, 4, source=FRAGILE)
    edited.create()
    app = edited.write()
    dear = [{**row, "cost": 99} if n == 7 else row for n, row in enumerate(events(30, 2, first=40))]
    for rows in (events(40, 1), dear, events(30, 3, first=70)):
        edited.append(rows)
        edited.run(app)
    tests = {}
    for number in range(3):
        folder = tmp_path / f"incident-{number}"
        capture_incident(app, edited.file, folder, number)
        tests[number] = folder
        assert "was committed" in (folder / f"test_incident_ads_{number}.py").read_text()
    for number in (0, 2):
        replay_incident(tests[number], tests[number] / "code" / "app.py")
    code = tests[1] / "code" / "app.py"
    with pytest.raises(UserCodeError, match=r"step 'weigh' fails on clicks/3/11.*too dear"):
        replay_incident(tests[1], code)
    code.write_text(code.read_text().replace("LIMIT = 50", "LIMIT = 100"))
    rows = replay_incident(tests[1], code)
    assert rows["per_kind"].height > 0
    for number, said in (
        (0, "It was committed, and its code fails on no row"),
        (1, "It fails here, too: UserCodeError"),
    ):
        answer = call(
            "capture-incident",
            str(edited.file),
            "--batch",
            str(number),
            "--to",
            str(tmp_path / f"by-command-{number}"),
        )
        assert said in answer.out, answer.err


def test_after_a_deployment_it_is_computed_from_what_that_put_in_place(tmp_path):
    edited = EditedApp(tmp_path, 4, source=RICH)
    edited.create()
    app = edited.write()
    run_in_steps(edited, app, 2, random.Random(1))
    before, _ = state_of(app)
    app = edited.write(*EDIT)
    deploy(app)
    first, put_in_place = state_of(app)
    assert first == before
    known = {first: put_in_place} | run_in_steps(edited, app, 3, random.Random(2), first=200)
    for number in sorted(known)[:-1]:
        seen = []
        folder = tmp_path / f"incident-{number}"
        capture_incident(app, edited.file, folder, number, seen.append)
        assert packed_state(folder, app) == known[number]
        assert len(seen) == number - first
    last = max(known) - 1
    with pytest.raises(
        ConfigError, match=f"Batches {first} to {last} can be captured, and batch {last + 1}"
    ):
        capture_incident(app, edited.file, tmp_path / "no", first - 1)
    shutil.rmtree(app.folder / "previous")
    with pytest.raises(ConfigError, match=f"Only batch {last + 1}, which comes next"):
        capture_incident(app, edited.file, tmp_path / "no", last)
    assert not (tmp_path / "no").exists()


def test_what_cannot_be_computed_again_is_refused(tmp_path):
    edited = EditedApp(tmp_path, 4)
    edited.create()
    app = edited.write()
    run_in_steps(edited, app, 3, random.Random(3))
    last = state_of(app)[0] - 1

    def refused(match, app=app, number=last):
        with pytest.raises(ConfigError, match=match):
            capture_incident(app, edited.file, tmp_path / "no", number)
        assert not (tmp_path / "no").exists()

    refused("is not declared as it ran: step 'per_kind'", edited.write(EDIT[1]))
    app = edited.write()
    with open_state_store(app.state_store) as store:
        line = next(line for line in store.ledger(app.name) if line["step"] == "clicks")
        changed = json.dumps({**line, "read": line["read"] + 1})
        store._write(
            lambda db: db.execute(
                "UPDATE _ledger SET line = ? WHERE batch_id = 0 AND line LIKE '%\"clicks\"%'",
                (changed,),
            )
        )
    refused(f"'clicks' counted {line['read'] + 1} read in batch 0, and {line['read']} now")
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 1, 3)
    refused(rf"no longer holds clicks/1 \[0, 3\).*Only batch {last + 1}")


def test_state_that_asks_a_service_is_not_computed_again(tmp_path):
    edited = EditedApp(tmp_path, 1, source=SOURCE + ENRICHED)
    edited.create()
    app = edited.write()
    edited.append(events(10, 1))
    edited.run(app)
    with pytest.raises(ConfigError, match="asks a service"):
        capture_incident(app, edited.file, tmp_path / "no", 0)


ENRICHED = """

def named(keys):
    return keys.with_columns(name=pl.col("ad"))


stream.enrich(named, on="ad", schema={"name": str}, cache=None).view("named", key="at")
"""


PRICED = """
prices = app.static_table(pl.DataFrame({"ad": ["a1", "a2"], "factor": [1, 2]}), key="ad")
priced = stream.lookup(prices, "ad").select("ad", "at", paid=pl.col("cost") * pl.col("factor"))
priced.window(ms.tumbling("1 minute"), by="ad", name="paid").agg(paid=ms.sum("paid")).view("paid")
"""
QUIET = SOURCE + PRICED
QUIET = QUIET.replace('ms.watermark("1 minute")', 'ms.watermark("1 minute", idle="1 ms")')
QUIET = QUIET.replace("watermark=rule,", 'watermark=rule, name="all",')


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (('name="all"', 'name="every"'), "The source 'every' was not declared as it is"),
        (('idle="1 ms"', 'idle="1 ms", idle_advance=True'), "had another name, topic, idle or"),
        (("[1, 2]", "[1, 3]"), "had other rows"),
        (('idle="1 ms"', 'idle="1 minute"'), None),  # only the planner has applied it
    ],
)
def test_a_batch_whose_time_another_rule_made_is_refused(tmp_path, edit, refused):
    edited = EditedApp(tmp_path, 2, source=QUIET)
    edited.create()
    app = edited.write()
    for seed in (1, 2):
        edited.append(events(20, seed, first=20 * seed))
        edited.run(app)
    app = edited.write(edit)
    folder = tmp_path / "incident"
    if refused is None:
        capture_incident(app, edited.file, folder, 1)
    else:
        with pytest.raises(ConfigError, match=refused):
            capture_incident(app, edited.file, folder, 1)


def test_batches_are_refused_of_whose_records_compaction_has_taken_some_or_all(tmp_path):
    edited = EditedApp(tmp_path, 1)
    settings = {"segment.bytes": "300", "min.cleanable.dirty.ratio": "0"}
    with ms.connect(edited.log) as log:
        log.create_topic("clicks", cleanup="compact", settings=settings)
    app = edited.write()
    for first in (0, 9):
        with ms.connect(edited.log) as log, log.producer() as producer:
            for row in events(9, 1, first=first):
                value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
                producer.send("clicks", value, key=row["ad"])
                producer.flush()  # a batch is the least that a segment may have
        edited.run(app)
    with ms.connect(edited.log) as log:
        log.run_maintenance()
        offsets = log.read("clicks", 0).column("offset").to_pylist()
    left = [sum(n < 9 for n in offsets), sum(n >= 9 for n in offsets)]
    assert left[0] == 0 < left[1] < 9
    for number, said in (
        (0, "has read 9 records of clicks, and the log holds 0 of them: compaction"),
        (1, "the step 'clicks' counted 9 read in batch 0, and 0 now"),
    ):
        with pytest.raises(ConfigError, match=said):
            capture_incident(app, edited.file, tmp_path / "incident", number)


def test_state_that_was_rescaled_since_is_computed_in_the_buckets_that_it_began_with(tmp_path):
    edited = EditedApp(tmp_path, 2)
    edited.create()
    app = edited.write()
    edited.append(events(40, 1))
    edited.run(app)
    app = edited.write(*EDIT)
    deploy(app)
    held = {}
    for seed in (2, 3):
        edited.append(events(40, seed, first=40 * seed))
        edited.run(app)
        held[seed] = state_of(app)[1]
    with open_state_store(app.state_store) as store:
        was = store.program(app.name, JOB).partitioning
        now = {**was, "bucket_count": 4, "declared_buckets": 2}
        start = RunStart(app.name, JOB, store.newest_run(app.name, JOB), "local-run")
        plan = app.plan(Buckets(2, was["hash_seed"]))
        made = rescale_manifests(plan.stages, store.state_manifests(app.name, JOB), 2, 4)
        store.replace_state(start, made, now, was=was)
    rescale(app.name, app.folder, buckets=8)  # which the next run will do
    folder = tmp_path / "incident"
    with pytest.raises(ConfigError, match="was rescaled, and has not run since"):
        capture_incident(app, edited.file, folder)
    capture_incident(app, edited.file, folder, 2)
    assert packed_state(folder, app) == held[2]
    assert replay_incident(folder, edited.file)["per_ad"].height > 0
