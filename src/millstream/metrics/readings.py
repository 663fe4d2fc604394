"""Readings: the figures of one moment, as far as the table of metrics defines them, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isfinite, isnan

from millstream.metrics.definitions import METRICS, PREFIX, MetricDefinition
from millstream.metrics.histogram import DurationHistogram

_Value = tuple[tuple[str, ...], float]


class Readings:
    """Collects figures; a name or label that is not in the table is a defect."""

    def __init__(self) -> None:
        self._values: dict[str, list[_Value]] = {}
        self._histograms: dict[str, DurationHistogram] = {}

    def add(self, metric: str, value: float, **labels: object) -> None:
        """Add one figure, with a value for each label of its metric. ``metric`` is its name without the prefix."""
        definition = METRICS[PREFIX + metric]
        assert definition.kind != "histogram", metric
        names = definition.labels
        assert len(labels) == len(names), f"labels of {metric}: {sorted(labels)}"
        texts = tuple([str(labels[name]) for name in names])
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

    def text(self) -> str:
        """Return the figures as Prometheus reads them, in the order of the table.

        The library's own writer takes several times as long, as it checks each name of each sample; here the names are
        those of the table, which a test has checked.

        Source: prometheus.io, "Exposition formats", text-based format 0.0.4.
        """
        lines: list[str] = []
        for definition in METRICS.values():
            lines += self._lines(definition)
        return "".join(lines)

    def _lines(self, definition: MetricDefinition) -> Iterator[str]:
        name = definition.name
        if name not in self._histograms and name not in self._values:
            return
        yield _header(definition)
        if name in self._histograms:
            found = self._histograms[name]
            for bound, count in found.buckets():
                yield f'{name}_bucket{{le="{bound}"}} {_number(count)}\n'
            yield f"{name}_count {_number(count)}\n{name}_sum {_number(found.sum_s)}\n"
            return
        for texts, value in self._values[name]:
            yield f"{name}{_labels(definition.labels, texts)} {_number(value)}\n"


@lru_cache(len(METRICS))
def _header(definition: MetricDefinition) -> str:
    name = definition.name
    return f"# HELP {name} {_escaped(definition.help)}\n# TYPE {name} {definition.kind}\n"


@lru_cache(1 << 14)  # of most servers all: they are the same with each scrape
def _labels(names: tuple[str, ...], texts: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = [
        f'{name}="{_escaped(text, quoted=True)}"' for name, text in zip(names, texts, strict=True)
    ]
    return f"{{{','.join(pairs)}}}"


def _escaped(text: str, *, quoted: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quoted else escaped


def _number(value: float) -> str:
    if isfinite(value):
        return repr(float(value))
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
