"""A log with topics, and an edge in this process: real sockets."""

from __future__ import annotations

import pytest
from edge_client import serving_edge

import millstream as ms


@pytest.fixture
def folder(tmp_path):
    with ms.connect(tmp_path / "data") as log:
        log.create_topic("clicks", partitions=2)
        log.create_topic("one")
        log.create_topic("metrics")
        log.create_topic("dead")
    return tmp_path / "data"


@pytest.fixture
def edge_on():
    return serving_edge


@pytest.fixture
def edge(folder, edge_on):
    with edge_on(folder) as up:
        yield up


@pytest.fixture
def values(folder):
    """Return what reads the values of a topic, in the order of partitions and offsets."""

    def read(topic):
        with ms.connect(folder) as log:
            count = len(log.offsets(topic))
            return [
                value
                for number in range(count)
                for value in log.read(topic, number)["value"].to_pylist()
            ]

    return read
