"""What the broker responds when the system refuses an operation on its files."""

from __future__ import annotations

import errno
import shutil

import pytest
from broker.broker_process import InProcess
from broker.raw_client import RawClient, batch, create, fetch, only, produce

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.log.batch_reader import BatchReader
from millstream.log.transactions import TransactionCoordinator
from millstream.log.writer import LogWriter


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def raw_client(broker: InProcess):
    with RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        yield client


def test_an_error_of_the_system_gets_an_error_response_and_a_log_line(
    raw_client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_client.request("Produce", 7, produce(batch(b"one")))
    code = ErrorCode.KAFKA_STORAGE_ERROR
    settings = {"resource_type": 2, "resource_name": "t", "configs": []}
    at_start = {"partition_index": 0, "timestamp": 0, "offset": 0}
    topic = {"topics": [{"name": "t", "partitions": [at_start]}]}
    for owner, name, request, path in (
        (BatchReader, "fetch", ("Fetch", 12, fetch(0)), ("responses", "partitions")),
        (BatchReader, "first_since", ("ListOffsets", 5, topic), ("topics", "partitions")),
        (LogWriter, "delete_records", ("DeleteRecords", 1, topic), ("topics", "partitions")),
        (LogWriter, "create_topic", ("CreateTopics", 4, create("new")), ("topics",)),
        (LogWriter, "delete_topic", ("DeleteTopics", 5, {"topic_names": ["t"]}), ("responses",)),
        (LogWriter, "alter_topic", ("AlterConfigs", 1, {"resources": [settings]}), ("responses",)),
        (shutil, "disk_usage", ("DescribeLogDirs", 1, {"topics": None}), ("results",)),
    ):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert only(raw_client.request(*request), *path)["error_code"] == code, request
        assert ["Too many open files" in one.message for one in caplog.records] == [True], request


def test_an_error_of_the_system_in_a_coordinator_is_retriable(
    raw_client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransactionCoordinator, "register", fail)
    request = {"transactional_id": None, "transaction_timeout_ms": 1000}
    response = raw_client.request("InitProducerId", 1, request)
    assert response["error_code"] == ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_an_error_of_the_system_that_no_response_can_have_is_logged(
    raw_client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransactionCoordinator, "transactional_producers", fail)
    filters = {"state_filters": [], "producer_id_filters": []}
    raw_client.send("ListTransactions", 0, filters)
    assert raw_client.is_closed()
    assert any("Too many open files" in one.message for one in caplog.records)
