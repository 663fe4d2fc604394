"""A test of the contract uses the fixture ``backend`` or, mostly, ``log``. Apache Kafka has its own
folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker.broker_process import InProcess
from contract.logs import DIFFERENCES, Broker, Folder, Joined, Owners, wipe

from millstream.client import EventLog


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One for all tests: a client that sends takes half a second to begin, and is kept."""
    if importlib.util.find_spec("confluent_kafka") is None:
        pytest.skip("the extra `kafka` is not installed here")
    with InProcess(tmp_path_factory.mktemp("broker") / "data", rebalance_delay_ms=0) as running:
        backend = Broker(running)
        with backend.connect():
            yield backend


@pytest.fixture(scope="session")
def owners() -> Iterator[Owners]:
    """One process for all tests, which owns the folder of each for as long as it lasts."""
    with Owners() as started:
        yield started


@pytest.fixture(params=["folder", "joined", "broker"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder | Broker]:
    reason = DIFFERENCES[request.param].get(request.node.originalname)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    if request.param == "folder":
        yield Folder(tmp_path / "data")
        return
    if request.param == "joined":
        owners = request.getfixturevalue("owners")
        yield Joined(tmp_path / "data", owners)
        owners.leave(tmp_path / "data")
        return
    broker = request.getfixturevalue("broker")
    yield broker
    with broker.connect() as log:
        wipe(log)


@pytest.fixture
def log(backend: Folder | Broker) -> Iterator[EventLog]:
    with backend.connect() as opened:
        yield opened
