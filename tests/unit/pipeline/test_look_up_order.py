"""Topics of tables that rows are looked up in are read before the topics of the rows."""

from datetime import datetime

import pytest

import millstream as ms


@pytest.fixture
def app(tmp_path):
    return ms.App("orders", log=tmp_path)


def stream(app, name):
    fields = {"id": str, "other": str, "at": datetime}
    return app.topic(name, fields, key="id").stream(time="at")


def table(app, name):
    return app.table(name, {"id": str, f"n_{name}": int}, key="id")


def levels(app):
    return {source.topic: source.looked_up for source in app.plan().sources}


def test_the_table_of_a_table_comes_first(app):
    users = stream(app, "users").lookup(table(app, "places"), on={"other": "id"})
    stream(app, "clicks").lookup(users.table(key="id"), on="id").to("out")
    assert levels(app) == {"clicks": 0, "users": 1, "places": 2}


def test_tables_of_look_ups_one_after_the_other_come_side_by_side(app):
    joined = table(app, "b").join(table(app, "c"), "id")
    stream(app, "clicks").lookup(table(app, "a"), on="id").lookup(joined, on="id").to("out")
    stream(app, "others").to("elsewhere")
    assert levels(app) == {"a": 1, "b": 1, "c": 1, "clicks": 0, "others": 0}


def test_rows_that_are_looked_up_in_their_own_topic_come_after_their_other_tables(app):
    clicks = stream(app, "clicks")
    clicks.lookup(table(app, "a"), on="id").to("out")
    clicks.lookup(clicks.table(key="id"), on="id").to("again")
    assert levels(app) == {"a": 1, "clicks": 0}


def test_topics_that_need_each_other_first_come_side_by_side(app):
    one, two = stream(app, "one"), stream(app, "two")
    one.lookup(two.table(key="id"), on="id").to("out")
    looked_up = two.lookup(one.table(key="id"), on="id")
    looked_up.lookup(table(app, "a"), on="id").to("more")
    stream(app, "three").lookup(two.table(key="id"), on="id").to("last")
    assert levels(app) == {"one": 1, "two": 1, "three": 0, "a": 2}
