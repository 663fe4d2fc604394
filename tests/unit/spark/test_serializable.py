"""What cannot be sent to workers is refused before Spark starts, by the name of its step."""

import threading
from datetime import datetime

import polars as pl
import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.spark.serializable import check_serializable


class Locked(ms.UserAggregate):
    result_type = pl.Int64()

    def __init__(self):
        self.lock = threading.Lock()

    def zero(self):
        return 0

    def add(self, state, value):
        return state + value

    def merge(self, one, other):
        return one + other

    def result(self, state):
        return state


def stream():
    app = ms.App("a", log="unused")
    return app, app.topic("t", {"id": str, "n": int, "at": datetime}).stream(time="at")


def closed_over():
    lock = threading.Lock()

    def hold(frame):
        with lock:
            return frame

    return hold


def test_a_function_that_holds_a_lock_is_refused_by_the_name_of_its_step():
    app, events = stream()
    events.map_frames(closed_over(), name="hold").view("v", key="id")
    with pytest.raises(ConfigError, match=r"'hold' cannot be sent .*cannot pickle '_thread.lock'"):
        check_serializable(app.plan())


def test_an_aggregate_that_holds_a_lock_is_refused_by_the_name_of_its_window():
    app, events = stream()
    windows = events.window(ms.tumbling("1 minute"), by="id")
    windows.agg(total=ms.aggregate(Locked(), "n")).view("v")
    with pytest.raises(ConfigError, match=r"cannot be sent .*_thread.lock"):
        check_serializable(app.plan())


def test_what_can_be_packed_passes():
    app, events = stream()
    events.map_frames(lambda frame: frame.with_columns(pl.col("n") + 1)).view("v", key="id")
    check_serializable(app.plan())
