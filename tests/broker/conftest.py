"""Fixtures for tests with real clients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker.running import InProcess

with warnings.catch_warnings():  # kafka-python warns of its own deprecated calls when imported
    warnings.simplefilter("ignore")
    import kafka
    import kafka.admin  # noqa: F401


@pytest.fixture(autouse=True)
def quiet() -> None:
    """kafka-python and aiokafka tell at length of connections that come and go."""
    for name in ("kafka", "aiokafka"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def broker(folder: Path) -> Iterator[InProcess]:
    with InProcess(folder, rebalance_delay_ms=0) as running:
        yield running
