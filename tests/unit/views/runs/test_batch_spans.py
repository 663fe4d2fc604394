"""Spans, phases and log lines of batches."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millstream.views.commit.batch_history import PhaseTimer
from millstream.views.runs import batch_spans, log_fields
from millstream.views.runs.batch_figures import BatchFigures
from millstream.views.runs.batch_spans import emit_batch_spans
from millstream.views.runs.log_fields import JsonFormatter, set_log_fields


class Clock:
    """A clock that goes on by so many seconds with each look."""

    def __init__(self, *steps):
        self.steps, self.now_s = list(steps), 100.0

    def __call__(self):
        self.now_s += self.steps.pop(0)
        return self.now_s


@pytest.fixture
def spans(monkeypatch):
    """The spans that a program's own provider gets."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


def timed():
    """Measure a batch: planned at 100, called at 101, read in 2 s, committed in 4 s after a second."""
    timer = PhaseTimer(Clock(1, 2, 1, 4))
    timer.begin(1000.0)
    with timer.phase("read"):
        pass
    with timer.phase("commit"):
        pass
    return timer


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_provider_that_fails_fails_no_batch_and_hides_no_error(monkeypatch, caplog):
    class Broken:
        def start_span(self, *_args, **_named):
            raise ValueError("of the program's own")

    monkeypatch.setattr(batch_spans, "_tracer", Broken)
    emit_batch_spans({"app": "shop"}, timed().phases, RuntimeError("the batch's"))
    assert "could not be emitted" in caplog.text


def test_a_batch_is_a_span_with_a_child_for_each_phase(spans):
    emit_batch_spans({"app": "shop", "batch_id": 3}, timed().phases)
    *children, batch = spans()
    assert batch.name == "millstream batch"
    assert dict(batch.attributes) == {"millstream.app": "shop", "millstream.batch_id": 3}
    assert seconds(batch) == pytest.approx(8)
    assert {span.name: round(seconds(span)) for span in children} == {
        "millstream plan": 1,
        "millstream read": 2,
        "millstream commit": 4,
    }
    assert {span.parent.span_id for span in children} == {batch.context.span_id}
    assert batch.status.is_ok or batch.status.is_unset


def test_the_span_of_a_batch_that_failed_says_so(spans):
    emit_batch_spans({"app": "shop"}, timed().phases, KeyError("secret"))
    batch = spans()[-1]
    assert not batch.status.is_ok
    assert batch.status.description == "KeyError"


def test_without_opentelemetry_nothing_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    emit_batch_spans({"app": "shop"}, timed().phases)
    assert batch_spans._tracer() is None


def test_a_phase_that_fails_is_measured_too():
    timer = PhaseTimer(Clock(1, 2))
    timer.begin(1000.0)
    with pytest.raises(KeyError), timer.phase("read"):
        raise KeyError
    assert [(one.name, one.ended_s - one.began_s) for one in timer.phases] == [
        ("plan", 1),
        ("read", 2),
    ]


def test_costs_are_added_up_and_the_commit_is_counted_with_the_next_batch():
    figures, timer = BatchFigures(), PhaseTimer(Clock(1, 2, 1, 4, 1, 2))
    timer.begin(1000.0)
    with timer.phase("read"):
        pass
    figures.add_phases(timer.took_ms, timer.commit_before_ms)
    figures.add_requests({"puts": 2, "cache_hits": 1})
    first = figures.to_status()
    assert first == {
        "phase_s": {"plan": 1, "read": 2},
        "object_store": {"puts": 2, "cache_hits": 1},
    }
    with timer.phase("commit"):
        pass
    timer.begin(1000.0)
    with timer.phase("read"):
        pass
    figures.add_phases(timer.took_ms, timer.commit_before_ms)
    figures.add_requests({"puts": 1})
    assert figures.to_status() == {
        "phase_s": {"plan": 2, "read": 4, "commit": 4},
        "object_store": {"puts": 3, "cache_hits": 1},
    }
    assert BatchFigures.from_status({"costs": first}).to_status() == first
    assert BatchFigures.from_status({}).to_status() == {"phase_s": {}, "object_store": {}}


def test_a_log_line_is_json_with_the_run_that_it_is_of(monkeypatch):
    monkeypatch.setattr(log_fields, "_fields", {})
    set_log_fields(app="shop", job="main", run=2)
    set_log_fields(batch_id=7)
    try:
        raise KeyError("x")
    except KeyError:
        record = logging.LogRecord(
            "millstream.a", logging.WARNING, "a.py", 1, "lost %d\n", (3,), sys.exc_info()
        )
    record.created = 0.0
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert "KeyError" in line.pop("error")
    assert line == {
        "at": "1970-01-01T00:00:00.000Z",
        "level": "warning",
        "logger": "millstream.a",
        "message": "lost 3\n",
        "app": "shop",
        "job": "main",
        "run": 2,
        "batch_id": 7,
    }
