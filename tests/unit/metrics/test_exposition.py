"""The text of /metrics, what it costs, and what is said of health."""

from __future__ import annotations

import http.client
import itertools
import socket
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_text import figures
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

import millstream as ms
from millstream.errors import ConfigError, CorruptionError
from millstream.log import group_commit
from millstream.metrics import exposition
from millstream.metrics.definitions import METRICS
from millstream.metrics.exposition import AGE_MAX_S, Exposition
from millstream.metrics.histogram import BOUNDS_S, DurationHistogram, SyncTimes
from millstream.metrics.readings import Readings
from millstream.metrics.server import serve_metrics

AWKWARD = 'a"b\\c\nd é 🙂'


def text_of(*sources, **options):
    named = {f"s{number}": source for number, source in enumerate(sources)}
    return Exposition(named, cpu_share_max=1, **options).text().decode()


def test_every_metric_of_the_table_can_be_read_back():
    histogram = DurationHistogram()
    histogram.add(0.3)

    def read(readings):
        for metric in METRICS.values():
            short = metric.name.removeprefix("millstream_")
            if metric.kind == "histogram":
                readings.add_histogram(short, histogram)
            elif metric.source != "process":
                readings.add(short, 7.5, **dict.fromkeys(metric.labels, AWKWARD))

    text = text_of(read)
    found = figures(text)
    for metric in METRICS.values():
        labels = tuple(f"{name}={AWKWARD}" for name in sorted(metric.labels))
        if metric.kind != "histogram" and metric.source != "process":
            assert found[metric.name, *labels] == 7.5
        family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        assert f"# TYPE {family}" in text
    assert found["millstream_log_sync_seconds_count",] == 1


SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([one for one in METRICS.values() if one.kind != "histogram"]),
        st.lists(st.text(max_size=6) | st.just(AWKWARD), min_size=3, max_size=3),
        st.floats() | st.integers(-(2**60), 2**60),
    ),
    max_size=30,
)


@given(SAMPLES, st.lists(st.floats(0, 20)))
def test_the_text_says_what_the_library_itself_would_write(samples, durations_s):
    readings, histogram = Readings(), DurationHistogram()
    for metric, texts, value in samples:
        labels = dict(zip(metric.labels, texts, strict=False))
        readings.add(metric.name.removeprefix("millstream_"), value, **labels)
    for duration_s in durations_s:
        histogram.add(duration_s)
    readings.add_histogram("log_sync_seconds", histogram)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(samples, histogram))
    assert families(readings.text()) == families(generate_latest(registry).decode())


class Families(Collector):
    """The same figures, as the library is given them."""

    def __init__(self, samples, histogram):
        self.samples, self.histogram = samples, histogram

    def collect(self):
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for metric in METRICS.values():
            if metric.kind == "histogram":
                family = HistogramMetricFamily(metric.name, metric.help)
                family.add_metric(
                    (), buckets=self.histogram.buckets(), sum_value=self.histogram.sum_s
                )
                yield family
            elif found := [one for one in self.samples if one[0] is metric]:
                family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
                for _, texts, value in found:
                    family.add_metric(texts[: len(metric.labels)], value)
                yield family


def families(text):
    """What the library reads: name, kind, help and samples of each metric. NaN is no number that equals another."""
    return [
        (
            one.name,
            one.type,
            one.documentation,
            [(s.name, sorted(s.labels.items()), repr(s.value)) for s in one.samples],
        )
        for one in text_string_to_metric_families(text)
    ]


@pytest.mark.parametrize(
    ("metric", "labels"),
    [("no_such", {}), ("app_running", {}), ("app_running", {"app": 1, "x": 2})],
)
def test_what_is_not_in_the_table_is_a_defect(metric, labels):
    with pytest.raises((KeyError, AssertionError)):
        Readings().add(metric, 1, **labels)


@given(st.lists(st.floats(0, 20) | st.sampled_from(BOUNDS_S)))
def test_a_histogram_counts_how_many_were_within_each_bound(durations_s):
    histogram = DurationHistogram()
    for duration_s in durations_s:
        histogram.add(duration_s)
    counted = dict(histogram.buckets())
    assert counted.pop("+Inf") == len(durations_s)
    for bound, count in counted.items():
        assert count == len([one for one in durations_s if one <= float(bound)])


def test_a_source_that_fails_is_said_to_and_hides_nothing():
    def fails(_):
        raise CorruptionError("torn")

    found = figures(text_of(fails, lambda readings: readings.add("app_running", 1, app="a")))
    assert found["millstream_metrics_failed", "source=s0"] == 1
    assert found["millstream_metrics_failed", "source=s1"] == 0
    assert found["millstream_app_running", "app=a"] == 1


def test_a_defect_in_a_source_hides_no_other(caplog):
    def fails(_):
        raise KeyError("at")

    found = figures(text_of(fails, lambda readings: readings.add("app_running", 1, app="a")))
    assert found["millstream_metrics_failed", "source=s0"] == 1
    assert found["millstream_app_running", "app=a"] == 1
    assert "KeyError" in caplog.text


class Time:
    """A clock, and what each reading of figures costs of a CPU."""

    def __init__(self, cost_s):
        self.now_s, self.cpu_s, self.cost_s, self.reads = 0.0, 0.0, cost_s, 0

    def read(self, _):
        self.reads += 1
        self.cpu_s += self.cost_s


@given(
    st.floats(0.0001, 2.0),
    st.lists(st.floats(0, 30), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.1]),
)
def test_figures_take_their_share_of_a_cpu_at_most(cost_s, pauses_s, share):
    time = Time(cost_s)
    exposition = Exposition(
        {"s": time.read},
        cpu_share_max=share,
        clock=lambda: time.now_s,
        cpu_clock=lambda: time.cpu_s,
    )
    for pause_s in pauses_s:
        exposition.text()
        time.now_s += pause_s
    # The last reading is paid for by the time after it; one in a minute is allowed, whatever it costs.
    allowed = max(share, cost_s / AGE_MAX_S)
    assert (time.reads - 1) * cost_s <= allowed * time.now_s + 1e-6


def test_figures_that_were_expensive_once_are_not_given_out_for_an_hour():
    time = Time(30.0)
    exposition = Exposition(
        {"s": time.read}, clock=lambda: time.now_s, cpu_clock=lambda: time.cpu_s
    )
    exposition.text()
    time.now_s += AGE_MAX_S
    exposition.text()
    assert time.reads == 2


@pytest.fixture
def asked():
    """Return what asks a server of metrics, of which readiness can be set."""
    reasons = []
    exposition = Exposition(
        {"s": lambda readings: readings.add("app_running", 1, app="a")},
        [lambda: reasons[0] if reasons else None],
    )
    with serve_metrics("127.0.0.1:0", exposition) as url:
        place = urlsplit(url)

        def ask(path, **headers):
            connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            found = answer.status, answer.read().decode()
            connection.close()
            return found

        ask.reasons, ask.port = reasons, place.port
        yield ask


def test_a_process_without_http_serves_its_figures_and_health(asked):
    status, text = asked("/metrics?x=1")
    assert status == 200
    assert figures(text)["millstream_app_running", "app=a"] == 1
    assert asked("/healthz") == (200, "alive\n")
    assert asked("/readyz") == (200, "ready\n")
    asked.reasons.append("It has not started.")
    assert asked("/readyz") == (503, "It has not started.\n")
    assert asked("/healthz")[0] == 200
    assert asked("/else")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_web_page_of_another_name_reads_nothing(asked, host):
    status, text = asked("/metrics", Host=host)
    assert status == 421
    assert "millstream_" not in text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:99", "127.0.0.1"])
def test_the_names_of_this_machine_are_accepted(asked, host):
    assert asked("/metrics", Host=host)[0] == 200


def test_clients_that_send_nothing_do_not_end_the_server(asked):
    idle = [socket.create_connection(("127.0.0.1", asked.port)) for _ in range(40)]
    for one in idle:
        one.close()
    for _ in itertools.repeat(None, 100):
        try:
            assert asked("/healthz")[0] == 200
            return
        except (ConnectionError, http.client.HTTPException):  # all are taken for a moment
            continue
    raise AssertionError("it never answered again")


def test_an_address_that_is_taken_is_refused(asked):
    with (
        pytest.raises(ConfigError, match="is taken"),
        serve_metrics(f"127.0.0.1:{asked.port}", Exposition({})),
    ):
        pass


def test_syncs_of_the_logs_that_a_process_writes_are_figures_of_its_server(tmp_path, monkeypatch):
    times = SyncTimes()
    for module in (exposition, group_commit):
        monkeypatch.setattr(module, "SYNC_TIMES", times)
    server = Exposition({}, cpu_share_max=1)
    assert "log_sync_seconds" not in server.text().decode()
    for name in ("one", "two"):
        with ms.connect(tmp_path / name) as log:
            log.create_topic("t")
            before = figures(server.text().decode())["millstream_log_sync_seconds_count",]
            with log.producer() as producer:
                producer.send("t", b"x").result()
            found = figures(server.text().decode())
            assert found["millstream_log_sync_seconds_count",] > before
            assert found["millstream_log_sync_seconds_sum",] > 0
