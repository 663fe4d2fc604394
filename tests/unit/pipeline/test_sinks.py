"""Where streams end: what is refused when it is declared, and what comes out of each end."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError


@dataclass
class Event:
    at: dt.datetime
    ad: int
    kind: str
    cost: Decimal
    tags: list[str]
    key: str | None = None


def stream_of(app, name="events"):
    return app.topic(name, Event, key="ad").stream(time="at")


@pytest.fixture
def stream():
    return stream_of(ms.App("ends", log="unused"))


def nothing(rows, context):
    pass


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_a_topic_that_the_app_reads_cannot_be_written_to(stream):
    with refused("writes to the topic 'events' and reads it"):
        stream.to("events")
    other = stream.app.topic("other", Event)
    stream.to("other")
    with refused("writes to the topic 'other' and reads it"):
        other.stream(time="at").view("others", key="ad")
    assert [output.name for output in stream.app.outputs] == ["to(other)"]


def test_mistakes_of_a_topic_show_where_they_are_made(stream):
    with refused("topic name 'a b'"):
        stream.to("a b")
    with refused(r"key of to\('t'\) names 'adx'.*Did you mean 'ad'"):
        stream.to("t", key="adx")
    with refused("'tags'.*cannot be a key"):
        stream.to("t", key="tags")
    with refused(r"value 'nope'.*at, ad, kind"):
        stream.to("t", value=["ad", "nope"])
    with refused(r"value 'ad', a column of Int64.*value=\['ad'\]"):
        stream.to("t", value="ad")
    with refused('Choose "delete", "compact"'):
        stream.to("t", cleanup="never")
    with refused("compacted and has no key"):
        stream.to("t", cleanup="compact")
    with refused("partitions=0"):
        stream.to("t", partitions=0)


def test_mistakes_of_other_ends_show_where_they_are_made(stream):
    with refused("partition_by names 'adx'"):
        stream.dataset("out", partition_by="adx")
    stream.dataset("out")
    with refused("declared twice"):
        stream.dataset("x/../out")
    with refused("foreach was given 7"):
        stream.foreach(7, name="seven")
    with refused("without a name"):
        stream.foreach(lambda rows, context: None)
    stream.foreach(nothing)
    with refused(r"foreach\(nothing\) is declared twice"):
        stream.foreach(nothing)
    stream.foreach(nothing, name="again")
    signed = stream.with_columns(_diff=pl.lit(1))
    for end in (
        lambda: signed.to("t"),
        lambda: signed.dataset("d"),
        lambda: signed.foreach(nothing, name="n"),
    ):
        with refused("column '_diff'"):
            end()


@pytest.mark.parametrize(
    "path",
    [
        Path("s3://bucket/out"),
        "s3:/bucket/out",
        " s3://bob:hunter2@bucket/out",
        "s3a:/bob:hunter2@b",
    ],
)
def test_a_url_that_lost_a_slash_is_no_folder(stream, path):
    with refused(r"begins like a URL.*as text") as caught:
        stream.dataset(path)
    assert "hunter2" not in str(caught.value)
    stream.dataset("./s3:/a folder of that name")


def test_a_url_with_a_password_is_refused_before_it_is_shown(stream):
    signed = stream.with_columns(_diff=pl.lit(1))
    with refused("environment") as caught:
        signed.dataset("s3://bob:hunter2@bucket/out")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("store", "match"),
    [
        ("mysql://u:hunter2@h/db", "begins with mysql://"),
        ("somewhere", "'somewhere'"),
        ("postgres:bob:hunter2@h/db", "begins with no postgresql://"),
        ("host=h password=hunter2", "begins with no postgresql://"),
        ("postgresql://u:hunter2@h:port/db", "cannot be read"),
        ("postgresql://u:hunter2/@[h/db", "cannot be read"),
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(stream, store, match):
    with refused(match) as caught:
        stream.view("v", key="ad", store=store)
    assert "hunter2" not in str(caught.value)
    with refused(match) as caught:
        ms.App("ends", log="unused", views=store)
    assert "hunter2" not in str(caught.value)


def test_an_address_is_shown_nowhere():
    app = ms.App("ends", log="unused", views="postgresql://bob:hunter2@h/db")
    stream = stream_of(app)
    stream.view("v", key="ad")
    stream.view("w", key="ad", store="postgresql://bob:hunter2@other/db")
    stream.view("x", key="ad", store="sqlite")
    plan = app.plan()
    assert [sink.spec.store is None for sink in plan.sinks] == [False, False, True]
    for shown in (repr(app), repr(plan), repr(app.outputs), str(stream)):
        assert "hunter2" not in shown
    with refused("100 characters; PostgreSQL takes 63"):
        stream.view("v" * 100, key="ad")


def test_an_app_without_an_output_is_told_of_them_all(stream):
    with refused(r"\.view\(name\), \.to\(topic\), \.dataset\(path\) or \.foreach"):
        stream.app.plan()


def event(second, ad=1, kind="c", key=None):
    at = f"2026-01-01T00:00:{second:02}.25Z"
    return {"at": at, "ad": ad, "kind": kind, "cost": "0.5", "tags": ["x"], "key": key}


def test_a_topic_gets_json_with_key_and_event_time():
    app = ms.App("ends", log="unused")
    stream = stream_of(app)
    stream.to("all", key="ad", partitions=1)
    stream.filter(pl.col("kind") == "c").to("some", value=["key", "cost"], partitions=1)
    stream.to("raw", key="kind", value="key", partitions=1)
    out = testing.run(app, {"events": [event(1, key="a"), event(2, 7, "i")]}, partitions=1)
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    one, two = (at + dt.timedelta(seconds=s, milliseconds=250) for s in (1, 2))
    assert out.topic("all").rows() == [
        (0, 0, "1", one, "2026-01-01T00:00:01.250Z", 1, "c", "0.500000000", ["x"], "a"),
        (0, 1, "7", two, "2026-01-01T00:00:02.250Z", 7, "i", "0.500000000", ["x"], None),
    ]
    assert out.topic("all").columns[:4] == ["partition", "offset", "key", "timestamp"]
    assert out.topic("all").columns[-1] == "value.key"
    assert out.topic("some").rows() == [(0, 0, None, one, "a", "0.500000000")]
    assert out.topic("raw")["key", "value"].rows() == [("c", b"a"), ("i", None)]
    with refused("does not write to a topic 'none'. It writes to all, raw, some"):
        out.topic("none")


def test_only_the_fields_that_an_end_needs_are_decoded():
    app = ms.App("ends", log="unused")
    stream_of(app).to("t", key="ad", value=["kind"])
    assert {field.name for field in app.plan().sources[0].fields} == {"at", "ad", "kind"}


def test_every_end_gets_the_same_rows_in_however_many_batches():
    def pipeline(calls):
        app = ms.App("ends", log="unused", views="postgresql://nobody@nowhere/never")
        stream = stream_of(app)
        counted = stream.window(ms.tumbling("10 seconds"), by="ad").agg(n=ms.count())
        counted.view("v").to("t", key="ad", partitions=3).dataset("some/out", partition_by="ad")

        def note(rows, context):
            calls.append((context.batch_id, context.key, rows))

        counted.foreach(note)
        return app

    events = [event(i, i % 5) for i in range(60)]
    answers = []
    for batches in (1, 4, 9):
        calls = []
        out = testing.run(pipeline(calls), {"events": events}, batches=batches, partitions=1)
        view = out["v"].sort("window_start", "ad")
        called = pl.concat([rows for _, _, rows in calls]).sort("window_start", "ad")
        assert out.dataset("out").sort("window_start", "ad").equals(view)
        assert out.dataset("dataset(out)").height == view.height
        assert called.equals(view)
        assert sorted(out.topic("t")["ad", "n"].rows()) == sorted(view["ad", "n"].rows())
        assert len({key for _, key, _ in calls}) == len(calls)
        assert all(rows.height for _, _, rows in calls)
        answers.append(view)
        with refused(r"no dataset 'v'|does not write a dataset 'v'"):
            out.dataset("v")
    assert answers[0].height == 25
    assert all(answer.equals(answers[0]) for answer in answers)


def test_a_function_that_fails_stops_the_run_with_its_own_place():
    app = ms.App("ends", log="unused")

    def send(rows, context):
        raise OSError("the mail server is away")

    stream_of(app).foreach(send, name="mail")
    with pytest.raises(
        UserCodeError, match=r"foreach\(mail\).*test_sinks\.py:\d+: OSError: the mail"
    ):
        testing.run(app, {"events": [event(1)]})


@pytest.mark.parametrize("view", ["clicks", "per_ad"])
def test_a_view_that_is_called_as_its_topic_is_counted_by_itself(view):
    app = ms.App("ads", log="unused")
    app.topic("clicks", {"ad": str}).stream().view(view, key="ad")
    out = testing.run(app, {"clicks": [{"ad": str(number)} for number in range(5)]})
    assert out.ledger["read"].to_list() == [5, 5]
    assert out.ledger["step"].to_list()[0] == "clicks"
    assert out[view].height == 5
