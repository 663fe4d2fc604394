"""Loads the modules that need confluent-kafka, with a remedy if it is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millstream.errors import EnvironmentProblem


def kafka_module(name: str) -> Any:
    """Return a module of this package.

    Raises:
        EnvironmentProblem: confluent-kafka is not installed.
    """
    try:
        return import_module(f"millstream.client.kafka.{name}")
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "confluent_kafka":
            raise
        raise EnvironmentProblem(
            f'no module named {missing.name!r}: kafka:// needs pip install "millstream[kafka]"'
        ) from missing
