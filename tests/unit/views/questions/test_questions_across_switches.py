"""An app is asked while it runs, is divided otherwise, is deployed, and is taken back: each answer is that of its position.

Clients have the program of before, or the edited one. Each is answered where the state is its program's, and refused where
it is the other's; never is an answer of one from the state of the other.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from contextlib import contextmanager

import pytest
from edited_app import SOURCE, EditedApp, events, per_ad, per_kind

from millstream.cli.run import find_app
from millstream.engine.rescale import rescale
from millstream.errors import ConfigError
from millstream.ops.deploy import deploy
from millstream.ops.rollback import rollback

LONG = "5 minutes"
PARTITIONS = 3
KINDS, ADS = ["click", "show"], [f"a{n}" for n in range(4)]
QUESTION = """

@app.question("both")
def both(state):
    return {"per_ad": state.rows("per_ad"), "per_kind": state.rows("per_kind")}
"""
FACTORS = {2: (), 3: (("FACTOR = 2", "FACTOR = 3"),)}


class Asked:
    """The app, its records, and clients of each program that ask all the time."""

    def __init__(self, folder):
        self.edited = EditedApp(folder, PARTITIONS, source=SOURCE + QUESTION)
        self.edited.create()
        self.records = defaultdict(list)  # by partition, in their order
        self.count = 0
        self.files = {}
        for factor, edits in FACTORS.items():
            self.edited.write(*edits)
            self.files[factor] = folder / f"factor_{factor}.py"
            self.files[factor].write_text(self.edited.file.read_text())
        self.answered, self.refused, self.problems = Counter(), Counter(), []

    def app(self, factor):
        return find_app(self.files[factor], None)

    def append(self, count):
        rows = events(count, self.count, first=self.count)
        for number, row in enumerate(rows):
            self.records[number % PARTITIONS].append(row)
        self.edited.append(rows)
        self.count += count

    def run(self, factor):
        report = self.app(factor).run(
            engine="local", until="caught-up", rows_per_batch=9, show=None
        )
        assert report.read

    def require_right(self, factor, answer):
        """Make sure that an answer is what the records up to its position give."""
        read = [
            row
            for partition, end in answer.position["clicks"].items()
            for row in self.records[int(partition)][:end]
        ]
        if answer.name == "per_kind":
            assert set(answer.rows.iter_rows()) == per_kind(read, factor)
        else:
            assert set(answer.value["per_ad"].iter_rows()) == per_ad(read)
            assert set(answer.value["per_kind"].iter_rows()) == per_kind(read, factor)

    def ask(self, app, number):
        if number % 2:
            return app.ask("both", deadline=LONG)
        return app.ask("per_kind", kind=KINDS, deadline=LONG)

    def client(self, factor, done):
        app, number = self.app(factor), 0
        try:
            while not done.wait(0.02):
                number += 1
                try:
                    self.require_right(factor, self.ask(app, number))
                    self.answered[factor] += 1
                except ConfigError as error:
                    assert "is not declared as it ran" in str(error)
                    self.refused[factor] += 1
        except BaseException as error:
            self.problems.append(error)
            raise
        finally:
            app.close_questions()

    @contextmanager
    def clients(self):
        done = threading.Event()
        threads = [threading.Thread(target=self.client, args=(one, done)) for one in FACTORS]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not self.problems

    def settle(self, factor):
        """Wait until clients of one program were answered, and those of the other one refused, several times from here on."""
        other = 5 - factor
        answered, refused = self.answered[factor] + 3, self.refused[other] + 3
        while not self.problems and (
            self.answered[factor] < answered or self.refused[other] < refused
        ):
            threading.Event().wait(0.01)

    def divide(self, buckets):
        app = self.app(2)
        assert rescale(app.name, app.folder, buckets=buckets).buckets == buckets


@pytest.mark.parametrize(
    "counts",
    [(12,), pytest.param((60, 50, 40), marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_answers_are_those_of_their_position_across_rescales_deployments_and_rollbacks(
    tmp_path, counts
):
    asked = Asked(tmp_path)
    asked.append(20)
    asked.run(2)
    with asked.clients():
        asked.settle(2)
        for number, count in enumerate(counts):
            asked.append(count)
            asked.run(2)
            asked.divide(3 + 2 * number)
            asked.settle(2)  # divided in the store, and not by a run yet
            asked.append(count)
            asked.run(2)
            asked.settle(2)
            assert deploy(asked.app(3)).switched
            asked.settle(3)
            asked.append(count)
            asked.run(3)
            asked.settle(3)
            assert rollback(asked.app(2)).switched
            asked.settle(2)
    for factor in FACTORS:
        assert asked.answered[factor] > 5
        assert asked.refused[factor] > 5
