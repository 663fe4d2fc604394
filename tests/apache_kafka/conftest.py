"""One node of Apache Kafka for all tests of this folder; each finds it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract.logs import DIFFERENCES, Kafka, wipe

from millstream.client import EventLog
from millstream.testing.kafka import ApacheKafka, why_not

pytest.register_assert_rewrite("contract.test_log_contract")


@pytest.fixture(scope="session")
def node() -> Iterator[ApacheKafka]:
    pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
    missing = why_not()
    if missing:
        pytest.skip(f"no Apache Kafka: {missing}")
    with ApacheKafka() as running:
        yield running


@pytest.fixture(scope="session")
def held(node: ApacheKafka) -> Iterator[Kafka]:
    """Keep a connection open: a client that sends takes half a second to begin, and is kept by it."""
    backend = Kafka(node.address)
    with backend.connect():
        yield backend


@pytest.fixture
def backend(request: pytest.FixtureRequest, held: Kafka) -> Iterator[Kafka]:
    reason = DIFFERENCES["kafka"].get(request.node.originalname)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    yield held
    with held.connect() as log:
        wipe(log)


@pytest.fixture
def log(backend: Kafka) -> Iterator[EventLog]:
    with backend.connect() as opened:
        yield opened
