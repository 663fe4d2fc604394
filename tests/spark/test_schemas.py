"""Schemas, formats and dead letters on Spark: what travels to the workers, and what comes of it."""

from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl
import pydantic
import pytest

import millstream as ms
from millstream.errors import BadRecordError

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


@dataclass
class Click:
    ad: int


def model_of_its_own():
    class Word(pydantic.BaseModel):
        """Not to be imported by any worker: it travels by value."""

        word: str

        @pydantic.field_validator("word")
        @classmethod
        def _loud(cls, word: str) -> str:
            if not word.isalpha():
                raise ValueError("letters only")
            return word.upper()

    return Word


def test_a_model_with_validators_avro_and_bytes_run_side_by_side(spark, tmp_path):
    avro = {"type": "record", "name": "N", "fields": [{"name": "n", "type": "long"}]}
    app = ms.App("formats", log=tmp_path)
    place = ("partition", "offset")
    words = app.topic("words", model_of_its_own(), metadata=place, partitions=1)
    words.stream().view("words", key=place)
    numbers = app.topic("numbers", format="avro", avro_schema=avro, metadata=place, partitions=1)
    numbers.stream().view("numbers", key=place)
    meta = (*place, "timestamp", "headers")
    app.topic("raw", format="bytes", metadata=meta, partitions=1).stream().view("raw", key=place)
    with ms.connect(tmp_path) as log, log.producer() as producer:
        for topic in ("words", "numbers", "raw"):
            log.create_topic(topic)
        producer.send("words", {"word": "hi"})
        producer.send("words", {"word": "4"}, key="k", headers={"trace": "17"})
        producer.send("numbers", b"\x0e")
        producer.send("numbers", b"\x0e\x0e")
        stamp_ms = int(AT.timestamp() * 1000)
        producer.send("raw", b"\xff", key="k", headers={"a": b"\xfe"}, timestamp_ms=stamp_ms)
    report = app.run(until="caught-up")
    assert report.dead == 2

    def rows(view):
        with ms.view(view, log=tmp_path) as opened:
            return opened.scan()

    assert rows("words")["word"].to_list() == ["HI"]
    assert rows("numbers")["n"].to_list() == [7]
    raw = rows("raw").row(0, named=True)
    assert (raw["value"], raw["key"], raw["timestamp"]) == (b"\xff", b"k", AT)
    dead = rows("dead_letters").filter(pl.col("topic") == "words").row(0, named=True)
    assert dead["reason"] == "field 'word' is \"4\": value error, letters only"
    assert (dead["key"], dead["headers"]) == (b"k", '[["trace", "17"]]')
    with ms.connect(tmp_path) as log:  # the run forwarded them at its end
        forwarded = list(log.consumer("formats.dead", start="earliest", follow=False))
    assert {record.value for record in forwarded} == {b'{"word":"4"}', b"\x0e\x0e"}


def test_a_topic_that_stops_lets_nothing_of_the_batch_in_and_goes_on_once_mended(spark, tmp_path):
    def app_with(bad):
        app = ms.App("stopping", log=tmp_path)
        topic = app.topic("clicks", Click, metadata=("offset",), partitions=1, bad=bad)
        topic.stream().view("seen", key="offset")
        return app

    with ms.connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("clicks")
        for value in ({"ad": 1}, b"oops", {"ad": 2}):
            producer.send("clicks", value)
    with pytest.raises(BadRecordError, match="clicks/0/1 cannot be decoded"):
        app_with("stop").run(until="caught-up")
    with ms.view("seen", log=tmp_path) as opened:
        assert opened.scan().is_empty()
    report = app_with("skip").run(until="caught-up")
    assert (report.read, report.dead) == (3, 1)
    with ms.view("seen", log=tmp_path) as opened:
        assert opened.scan()["ad"].to_list() == [1, 2]
    with ms.view("dead_letters", log=tmp_path) as opened:
        assert opened.scan().is_empty()
