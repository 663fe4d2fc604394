"""An app that answers requests, and what the answers must be: computed anew from all clicks up to a position.

Run as a program, it kills itself at a point of a batch's commit: ENGINE FOLDER POINT BATCH.
"""

import json
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path

import polars as pl

import millstream as ms
from millstream import testing
from millstream.engine.stages.journal_files import JournalFiles
from millstream.testing import Row
from millstream.views.sinks.topics import TopicsSink
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.store_location import open_state_store

USERS = ["ann", "bob", "cid", "dan", "eva"]
REQUEST = {"id": int | None, "user": str, "users": list[str], "how": str}
POINTS = {  # what is called at a point, and whether the process dies before it
    "before the journal": (JournalFiles, "write", True),
    "after the journal": (JournalFiles, "write", False),
    "before the topic": (TopicsSink, "commit", True),
    "after the topic": (TopicsSink, "commit", False),
    "before the state store": (SqliteStateStore, "commit", True),
    "after the state store": (SqliteStateStore, "commit", False),
}
OUTPUTS = {
    "answer(totals)": "totals-answers",
    "answer(twice)": "twice-answers",
    "answer(spent)": "spent-answers",
}


def request_app(log, **options):
    """Declare the app. A function's outcome is another one at every call, if the request says so."""
    app = ms.App("answering", log=log, dead_max=1, **options)
    clicks = app.topic("clicks", {"user": str, "cost": int}, key="user").stream()
    sums = clicks.group_by("user", name="totals").agg(n=ms.count(), cost=ms.sum("cost"))
    sums.view("of_users")
    sums.filter(pl.col("n") > 1).with_columns(twice=pl.col("cost") * 2).view("twice")
    requests = app.topic("requests", REQUEST, key="id").stream()
    requests.answer("totals", id="id", to="totals-answers", deadline="5 minutes")
    requests.answer("twice", id="id", to="twice-answers", deadline="5 minutes")
    requests.answer("spent", id="id", to="spent-answers", deadline="5 minutes")

    @app.question("spent")
    def spent(state, users, how="sum"):
        if how == "fails" or (how == "chance" and random.random() < 0.5):
            raise ValueError("this one fails")
        if how == "unknown step":
            return state.rows("total", users)
        if how == "bad key":
            return state.rows("totals", [7])
        return int(state.rows("totals", users)["cost"].sum())

    return app


def draw(seed, clicks, requests, partitions):
    """Draw rows by topic, each with its partition."""
    dice = random.Random(seed)
    hows = ["sum", "sum", "fails", "chance", "chance", "unknown step", "bad key"]
    return {
        "clicks": [
            Row(
                {"user": dice.choice(USERS), "cost": dice.randint(1, 30)},
                partition=dice.randrange(partitions),
            )
            for _ in range(clicks)
        ],
        "requests": [
            Row(
                {
                    "id": None if dice.random() < 0.1 else number,
                    "user": dice.choice([*USERS, "nobody"]),
                    "users": dice.sample(USERS, dice.randint(0, 4)),
                    "how": dice.choice(hows),
                },
                partition=dice.randrange(partitions),
            )
            for number in range(requests)
        ],
    }


def check_all(drawn, partitions, answers, dead, ledger):
    """Compare answers and dead letters with what is right. ``answers``: by topic, the values of its records."""
    by_partition = defaultdict(list)
    for row in drawn["clicks"]:
        by_partition[row.partition].append(row.values)
    requests = {row.values["id"]: row.values for row in drawn["requests"]}
    without_id = sum(row.values["id"] is None for row in drawn["requests"])
    for step, topic in OUTPUTS.items():
        letters = dead.filter(step=step)
        refused = [json.loads(value)["id"] for value in letters["value"]]
        found = [json.loads(value) for value in answers[topic]]
        outcomes = Counter([*refused, *(one["request"] for one in found)])
        assert outcomes == Counter(row.values["id"] for row in drawn["requests"]), step
        assert refused.count(None) == without_id
        for place in letters.select("topic", "partition", "offset", "value").to_dicts():
            here = [row.values for row in drawn["requests"] if row.partition == place["partition"]]
            assert place["topic"] == "requests"
            assert here[place["offset"]] == json.loads(place["value"])
        for one in found:
            request = requests[one["request"]]
            assert one["answer"] == expected(topic, request, clicks_at(by_partition, one))
        line = ledger[step]
        assert line == (len(drawn["requests"]), len(found), len(refused))
        hows = {requests[one["request"]]["how"] for one in found}
        assert topic != "spent-answers" or hows <= {"sum", "chance"}


def clicks_at(by_partition, answer):
    at = answer["position"].get("clicks", {})
    return [
        click
        for partition, clicks in by_partition.items()
        for click in clicks[: at.get(str(partition), 0)]
    ]


def expected(topic, request, clicks):
    if topic == "spent-answers":
        return sum(click["cost"] for click in clicks if click["user"] in request["users"])
    costs = [click["cost"] for click in clicks if click["user"] == request["user"]]
    row = {"user": request["user"], "n": len(costs), "cost": sum(costs)}
    if topic == "twice-answers":
        return [{**row, "twice": sum(costs) * 2}] if len(costs) > 1 else []
    return [row] if costs else []


def counts(ledger):
    """Return read, emitted and dead by step."""
    sums = ledger.group_by("step").agg(pl.col("read", "emitted", "dead").sum())
    return {step: tuple(line) for step, *line in sums.rows() if step in OUTPUTS}


def check_kit(folder, seed, partitions, batches, crash, engine="kernel"):
    drawn = draw(seed, 60, 40, partitions)
    result = testing.run(
        request_app(folder),
        drawn,
        partitions=partitions,
        batches=batches,
        seed=seed,
        crash=crash,
        engine=engine,
    )
    answers = {
        topic: [bytes(value) for value in result.topic(topic)["value"]]
        for topic in OUTPUTS.values()
    }
    check_all(drawn, partitions, answers, result.dead, counts(result.ledger))


def check_log(app, folder, drawn, partitions):
    with ms.connect(folder) as log:
        answers = {
            topic: [
                bytes(value)
                for number in range(log.topics()[topic].partitions)
                for value in log.read(topic, number)["value"].to_pylist()
            ]
            for topic in OUTPUTS.values()
        }
    with open_state_store(app.state_store, readonly=True) as store:
        dead, ledger = store.scan("dead_letters"), pl.DataFrame(store.ledger("answering"))
    check_all(drawn, partitions, answers, dead, counts(ledger))


def send(folder, drawn, partitions):
    with ms.connect(folder) as log:
        for topic in drawn:
            log.create_topic(topic, partitions=partitions)
        with log.producer() as producer:
            for topic, rows in drawn.items():
                for row in rows:
                    producer.send(topic, row.values, partition=row.partition)


def die_at(point, batch):
    """Have this process killed at a point of its batch of that number, counted from 0."""
    owner, name, before = POINTS[point]
    called, seen = getattr(owner, name), []

    def dying(*args, **options):
        seen.append(None)
        if before and len(seen) > batch:
            os.kill(os.getpid(), signal.SIGKILL)
        found = called(*args, **options)
        if len(seen) > batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dying)


if __name__ == "__main__":
    engine, folder, point, number = sys.argv[1:]
    die_at(point, int(number))
    request_app(Path(folder)).run(engine=engine, until="caught-up", rows_per_batch=20)
