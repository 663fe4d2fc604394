"""Reads the text of /metrics with the library's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def figures(text):
    """Return the figures of a text: (name, "label=value", …) with labels in order → value."""
    return {
        (
            sample.name,
            *(f"{name}={value}" for name, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
