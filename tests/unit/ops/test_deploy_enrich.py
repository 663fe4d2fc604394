"""Apps that ask a service: what they were told is kept, carried on, or given up by consent."""

from __future__ import annotations

from collections import Counter

import pytest
from edited_app import EditedApp, events, plan_batch

from millstream.errors import ConfigError, UserCodeError
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.incident import capture_incident
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.testing import replay_incident
from millstream.views.runs.failure import record_failure

APP = """
from datetime import datetime
from pathlib import Path

import polars as pl

import millstream as ms

FACTOR = 2
LIMIT = 1000


def named(keys):
    with Path(ASKED).open("a") as asked:
        asked.writelines(f"{ad}\\n" for ad in keys["ad"])
    return keys.with_columns(name=pl.lit(Path(ANSWER).read_text()))


def limited(rows):
    if (rows["cost"] > LIMIT).any():
        raise ValueError("too much")
    return rows


app = ms.App("ads", log=LOG, buckets=2, on_error="stop")
fields = {"ad": str, "kind": str, "cost": int, "at": datetime}
stream = app.topic("clicks", fields).stream(time="at", lateness="1 day")
asked = stream.enrich(named, on="ad", schema={"name": str}, cache="1 day", name="asked")
asked.map_frames(limited, name="limited").view("named", key="at")
names = asked.window(ms.tumbling("1 hour"), by="name", name="names").emit("update").agg(n=ms.count())
names.view("names")
kinds = stream.select("kind", cost=pl.col("cost") * FACTOR).window(ms.tumbling("1 hour"), by="kind", name="kinds")
kinds.emit("update").agg(cost=ms.sum("cost")).view("kinds")
"""


class Service:
    """A service whose answer is a text in a file, and which notes what it was asked."""

    def __init__(self, folder):
        self.answer, self.asked = folder / "answer", folder / "asked"
        self.answer.write_text("old")
        self.asked.touch()

    def calls(self):
        """Return how often each key was asked since the last call."""
        found = Counter(self.asked.read_text().split())
        self.asked.write_text("")
        return found

    def source(self):
        return APP.replace("ASKED", repr(str(self.asked))).replace("ANSWER", repr(str(self.answer)))


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path)


@pytest.fixture
def edited(tmp_path, service):
    made = EditedApp(tmp_path, 2, source=service.source())
    made.create()
    made.append(events(40, 5))
    made.run(made.write())
    assert service.calls() == Counter(["a0", "a1", "a2", "a3"])
    service.answer.write_text("new")
    return made


def names(edited, app):
    return {(name, n) for _, _, name, n in edited.views(app)["names"]}


def test_answers_stay_where_the_edit_is_on_another_path(edited, service):
    app = edited.write(("FACTOR = 2", "FACTOR = 3"))
    plan = plan_change(app)
    assert plan.asking == ()
    assert deploy(app).switched
    edited.append(events(20, 6, first=40))
    edited.run(app)
    assert names(edited, app) == {("old", 60)}  # from the cache, which is state that is kept
    assert service.calls() == Counter()


COUNTED = ("agg(n=ms.count())", "agg(n=ms.count(pl.col('cost') >= 0))")


def test_a_step_that_would_ask_again_needs_consent(edited, service, call):
    app = edited.write(COUNTED)
    plan = plan_change(app)
    assert (plan.asking, plan.exit_code) == (("asked",), 3)
    assert plan.to_dict()["asks_again"] == ["asked"]
    assert "'asked' asks its service again" in call("plan", str(edited.file)).out
    for work in (deploy, compare):
        with pytest.raises(ConfigError, match=r"asks a service again, in 'asked'.*--ask-again"):
            work(app)
    refused = call("deploy", str(edited.file))
    assert (refused.code, service.calls()) == (2, Counter())
    assert names(edited, app) == {("old", 40)}
    assert call("compare", str(edited.file), "--ask-again").code == 0
    assert call("deploy", str(edited.file), "--ask-again").code == 0
    assert service.calls() == Counter(["a0", "a1", "a2", "a3"])  # once for both
    assert names(edited, app) == {("new", 40)}
    back = edited.write()
    assert rollback(back).records == 0  # what was kept goes on, with its answers
    assert names(edited, back) == {("old", 40)}
    assert service.calls() == Counter()


def test_a_step_that_asks_as_before_below_what_changed_needs_consent(edited, service):
    app = edited.write(("stream.enrich(", 'stream.filter(pl.col("cost") >= 0).enrich('))
    plan = plan_change(app)
    assert plan.asking == ("asked",)
    with pytest.raises(ConfigError, match=r"asks a service again, in 'asked'.*--ask-again"):
        deploy(app)
    assert service.calls() == Counter()
    assert deploy(app, ask_again=True).switched
    assert names(edited, app) == {("new", 40)}


def test_a_step_that_is_another_one_asks_without_consent(edited, service):
    app = edited.write(('cache="1 day"', 'cache="2 days"'))
    assert plan_change(app).asking == ()
    assert deploy(app).switched
    assert names(edited, app) == {("new", 40)}


def test_a_captured_batch_has_the_answers_that_it_was_given(edited, service, tmp_path):
    rows = [{**row, "ad": "b1", "cost": 5000} for row in events(4, 8, first=40)]
    edited.append(rows)
    app = edited.write()
    batch_id = plan_batch(edited, app)
    with pytest.raises(UserCodeError, match="too much"), record_failure(app.folder):
        edited.run(app)
    assert service.calls() == Counter(["b1"])
    folder = tmp_path / "incident"
    capture_incident(app, edited.file, folder, batch_id)
    service.answer.unlink()  # whoever asks now fails
    with pytest.raises(UserCodeError, match="too much"):
        replay_incident(folder, edited.file)
    code = folder / "code" / "app.py"
    code.write_text(code.read_text().replace("LIMIT = 1000", "LIMIT = 9000"))
    found = replay_incident(folder, code)
    assert {*found["named"]["name"]} == {"new"}
    assert found["named"].height == 4
    assert service.calls() == Counter()


def test_an_earlier_batch_of_an_app_that_asks_is_refused(edited, tmp_path):
    with pytest.raises(
        ConfigError, match=r"'asked' of ads asks a service.*only the batch that comes next"
    ):
        capture_incident(edited.write(), edited.file, tmp_path / "incident", 0)
