"""`millstream view` shows what the store holds, to people and to programs."""

from __future__ import annotations

import datetime as dt
import json

import polars as pl
import pytest

from millstream.cli.main import run
from millstream.views.reader import state_store_path
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence, ViewChange, ViewSchema


@pytest.fixture
def log(tmp_path):
    hour = dt.datetime(2019, 11, 24, 5, tzinfo=dt.UTC)
    frame = pl.DataFrame(
        {
            "start": [hour, hour, hour + dt.timedelta(hours=1)],
            "campaign": ["men", "women", "men"],
            "rate": [0.5, float("nan"), 0.25],
            "tags": [["a"], None, []],
        }
    )
    with SqliteStateStore(state_store_path(tmp_path, "ads")) as store:
        store.declare(ViewSchema.of("ctr", frame, ("start", "campaign")))
        run, batch_id = store.begin_run("ads", "main", "c")
        store.commit(
            Fence("ads", "main", run, batch_id), [ViewChange("ctr", frame)], position={}, status={}
        )
    return str(tmp_path)


@pytest.fixture
def command(capsys):
    """Return a function that runs `millstream view` and returns what it printed."""

    def call(*arguments: str, code: int = 0) -> str:
        assert run(["view", *arguments]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return call


def test_list_names_every_view_with_its_columns(command, log, tmp_path):
    assert "ctr" in command("list", "--log", log)
    assert json.loads(command("list", "--log", log, "--json")) == {
        "app": "ads",
        "view": "ctr",
        "rows": 3,
        "key": "start, campaign",
        "columns": "start datetime, campaign str, rate float, tags json",
    }
    assert "No views" in command("list", "--log", str(tmp_path / "empty"))
    assert "of an app 'x'" in command("list", "--log", log, "--app", "x", code=2)


def test_show_prints_rows_that_fit_the_conditions(command, log):
    out = command("show", "ctr", "--log", log, "--limit", "2")
    assert "2019-11-24 05:00:00Z" in out
    assert "The first 2 rows" in out
    lines = command("show", "ctr", "--log", log, "--json", "--where", "campaign=men").splitlines()
    assert [json.loads(line)["rate"] for line in lines] == [0.5, 0.25]
    where = ("--where", "start=2019-11-24T05:00:00Z", "--where", "campaign=women")
    row = json.loads(command("show", "ctr", "--log", log, "--json", *where))
    assert row == {
        "start": "2019-11-24T05:00:00Z",
        "campaign": "women",
        "rate": "nan",
        "tags": None,
    }


def test_changes_begin_after_the_number_given(command, log):
    lines = command("changes", "ctr", "--log", log, "--since", "1", "--json").splitlines()
    assert [json.loads(line)["_seq"] for line in lines] == [2, 3]
    assert "upsert" in command("changes", "ctr", "--log", log)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "crt"), "There is no view 'crt'"),
        (("show", "ctr", "--where", "campaign"), "is not COL=VALUE"),
        (("show", "ctr", "--where", "rate=much"), "'much' is not a number, such as 0.5"),
        (("changes", "ctr", "--since", "-1"), "Invalid value"),
    ],
)
def test_mistakes_are_answered_with_one_message(command, log, arguments, said):
    out = command(*arguments, "--log", log, code=2)

    assert said in out
