"""Fixtures for tests with real clients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from broker.broker_process import InProcess

with warnings.catch_warnings():  # kafka-python warns of its own deprecated calls when imported
    warnings.simplefilter("ignore")
    import kafka
    import kafka.admin  # noqa: F401


@pytest.fixture(autouse=True)
def quiet() -> None:
    """kafka-python and aiokafka log every connection."""
    for name in ("kafka", "aiokafka"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True)
def record_client(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Record in the test report which client a test was run with, for docs/compatibility.py."""
    marker = request.node.get_closest_marker("client")
    if marker is None:
        return
    (name,) = marker.args
    record_property("client", name)
    with suppress(PackageNotFoundError):  # others say their version themselves
        record_property("version", version(name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def broker(folder: Path) -> Iterator[InProcess]:
    with InProcess(folder, rebalance_delay_ms=0) as running:
        yield running
