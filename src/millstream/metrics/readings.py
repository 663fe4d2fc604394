"""Readings: the figures of one moment, as far as the table of metrics defines them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from millstream.metrics.definitions import METRICS, PREFIX
from millstream.metrics.histogram import DurationHistogram

_Value = tuple[tuple[str, ...], float]


class Readings(Collector):
    """Collects figures; a name or label that is not in the table is a defect."""

    def __init__(self) -> None:
        self._values: dict[str, list[_Value]] = {}
        self._histograms: dict[str, DurationHistogram] = {}

    def add(self, metric: str, value: float, **labels: object) -> None:
        """Add one figure, with a value for each label of its metric. ``metric`` is its name without the prefix."""
        definition = METRICS[PREFIX + metric]
        assert definition.kind != "histogram", metric
        assert labels.keys() == set(definition.labels), f"labels of {metric}: {sorted(labels)}"
        texts = tuple(str(labels[name]) for name in definition.labels)
        self._values.setdefault(definition.name, []).append((texts, value))

    def add_histogram(self, metric: str, histogram: DurationHistogram) -> None:
        """Add a histogram, of a metric without labels."""
        definition = METRICS[PREFIX + metric]
        assert definition.kind == "histogram", metric
        self._histograms[definition.name] = histogram

    def values(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the figures of a metric, by its whole name: labels and value of each."""
        labels = METRICS[name].labels
        return [
            (dict(zip(labels, texts, strict=True)), value)
            for texts, value in self._values.get(name, ())
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the figures as the library writes them, in the order of the table."""
        for name, definition in METRICS.items():
            if name in self._histograms:
                found = self._histograms[name]
                family = HistogramMetricFamily(name, definition.help)
                family.add_metric((), buckets=found.buckets(), sum_value=found.sum_s)
                yield family
            elif name in self._values:
                kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
                values: CounterMetricFamily | GaugeMetricFamily = kind(
                    name, definition.help, labels=definition.labels
                )
                for labels, value in self._values[name]:
                    values.add_metric(labels, value)
                yield values
