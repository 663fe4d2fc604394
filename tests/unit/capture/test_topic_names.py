"""Captures, tables and topics whose names clash are refused before anything is written."""

import sqlite3
from contextlib import closing

import pytest

import millstream as ms
from millstream.client import connect
from millstream.errors import ConfigError


def database(path, *tables):
    with closing(sqlite3.connect(path)) as session:
        for table in tables:
            session.execute(f'CREATE TABLE "{table}" (id INTEGER PRIMARY KEY)')
            session.execute(f'INSERT INTO "{table}" VALUES (1)')
        session.commit()
    return f"sqlite:///{path}"


def test_tables_that_would_have_one_topic_are_named_before_anything_is_written(tmp_path):
    url = database(tmp_path / "shop.db", "a b", "a_b", "a-b", "c$", "c§", "plain")
    capture = ms.capture(url, to=tmp_path / "log")
    with pytest.raises(ConfigError, match="cannot all have topics of their own") as told:
        capture.check()
    text = str(told.value)
    assert "main.a_b would have the topic 'shop.main.a_b', which main.a b has" in text
    assert "main.c§ would have the topic 'shop.main.c_', which main.c$ has" in text
    assert "a-b" not in text
    assert "plain" not in text
    with pytest.raises(ConfigError, match="cannot all have topics of their own"):
        capture.run(until="caught-up")
    with connect(tmp_path / "log") as log:
        assert not any(topic.startswith("shop.main") for topic in log.topics())


@pytest.mark.parametrize(
    "name",
    ["outbox", "outbox.event", "shop.transaction", "shop.progress", "shop-signal", "x.outbox.dead"],
)
def test_a_name_whose_topics_others_have_is_refused(tmp_path, name):
    url = database(tmp_path / "shop.db", "t")
    with pytest.raises(ConfigError, match=r"those of (events of an outbox|another capture)"):
        ms.capture(url, to=tmp_path / "log", name=name)
    with pytest.raises(ConfigError, match="--name"):
        ms.capture(database(tmp_path / "outbox.db", "t"), to=tmp_path / "log")


@pytest.mark.parametrize("name", ["outboxes", "transaction", "progress", "shop.signal"])
def test_names_that_only_look_like_it_are_taken(tmp_path, name):
    url = database(tmp_path / "shop.db", "t")
    capture = ms.capture(url, to=tmp_path / "log", name=name)
    capture.run(until="caught-up")
    with connect(tmp_path / "log") as log:
        assert f"{name}.main.t" in log.topics()
