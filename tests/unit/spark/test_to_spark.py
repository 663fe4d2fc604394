"""A stream given to Spark: what its query's checkpoint depends on is the same at every start."""

from dataclasses import dataclass
from datetime import datetime

import pytest

import millstream as ms
from millstream.spark import job


@dataclass
class Event:
    ad: str
    at: datetime


class Compiled(Exception):
    """Raised in place of starting Spark."""


def test_the_labels_of_buckets_do_not_depend_on_the_cores_of_the_day(tmp_path, monkeypatch):
    with ms.connect(tmp_path) as log:
        log.create_topic("events", partitions=1)
    app = ms.App("given", log=tmp_path, buckets=6)
    events = app.topic("events", Event, partitions=1).stream(time="at")
    counted = events.window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count())
    labels = []

    def start(*_, **__):
        raise Compiled

    def spied(cores):
        described = app.job_of(counted)
        monkeypatch.setattr(job, "cores_available", lambda: cores)
        monkeypatch.setattr(job, "start_session", start)
        compiled = described.compile
        object.__setattr__(
            described, "compile", lambda given: labels.append(given) or compiled(given)
        )
        with pytest.raises(Compiled):
            job.stream_to_spark(described)

    for cores in (1, 4, 6):
        spied(cores)
    assert len(labels) == 3
    assert len(set(labels)) == 1
    assert len(labels[0]) == 6
