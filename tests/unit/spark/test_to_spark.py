"""A stream that is given to Spark keeps no state of ours."""

from dataclasses import dataclass
from datetime import datetime

import pytest

import millstream as ms
from millstream.spark import job


@dataclass
class Event:
    ad: str
    at: datetime


@pytest.fixture
def events(tmp_path, monkeypatch):
    def start(*_, **__):
        raise AssertionError("Spark was started")

    monkeypatch.setattr(job, "start_session", start)
    app = ms.App("given", log=tmp_path)
    return app.topic("events", Event, partitions=1).stream(time="at")


@pytest.mark.parametrize("step", ["window", "dedup"])
def test_a_stream_with_state_is_refused_before_anything_is_created(events, tmp_path, step):
    stream = {
        "window": lambda: events.window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count()),
        "dedup": lambda: events.dedup("ad", within="1 minute"),
    }[step]()
    with pytest.raises(ms.ConfigError, match=r"keep state .*Write the stream with \.to"):
        stream.to_spark()
    assert not list(tmp_path.iterdir())
