"""Opens an address: :func:`connect` returns the log, :func:`open_reader` a reader of its records.

This is the one place that chooses between a folder and brokers; ``client.address`` tells the addresses
apart. ``client.kafka`` is imported only for an address of brokers.
"""

from __future__ import annotations

from pathlib import Path

from millstream.client.address import SCHEME, is_kafka, kafka_address
from millstream.client.default_log import default_log
from millstream.client.folder.log import FolderLog
from millstream.client.folder.reader import folder_reader
from millstream.client.kafka.extra import kafka_module
from millstream.client.log import EventLog
from millstream.client.reader import Reader
from millstream.errors import ConfigError
from millstream.log.reader import Isolation


def connect(address: Path | str | None = None) -> EventLog:
    """Return the event log at an address: a folder, or ``kafka://host:port[,host:port][?options]``.

    Without an address it is the one in the environment variable MILLSTREAM_LOG, or else ``./data``.

    The folder is created when something is first written to it. Reading needs no ownership. The first
    call that writes makes this process the folder's owner until ``close``. If another process owns the
    folder, this one connects to it and writes through it, and takes over when the owner closes the log
    or dies. Several connections of one process to a folder share its ownership.

    Behind ``kafka://`` is Millstream's broker, or Apache Kafka: docs/kafka.md describes the options and
    the differences.

    Raises:
        ConfigError: the address is neither, or has an option that does not exist. (Writing, later on,
            raises FolderOwnedError when the folder's owner accepts no connections.)
        EnvironmentProblem: confluent-kafka, the extra ``kafka``, is not installed.
        BrokerUnavailableError: no broker responds.
    """
    address = default_log() if address is None else address
    text = str(address)
    if is_kafka(text):
        log: EventLog = kafka_module("log").KafkaLog(kafka_address(text))
        return log
    if "://" in text:
        scheme = text.partition("://")[0]
        raise ConfigError(
            f"the address begins with {scheme}://; give the path of a folder, such as './data', or "
            f"{SCHEME}host:port"
        )
    folder = Path(address)
    if not text or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"{text!r} is not a folder; give the path of a folder, such as './data', or "
            f"{SCHEME}host:port"
        )
    return FolderLog(folder)


def open_reader(address: Path | str, isolation: Isolation = "read_committed") -> Reader:
    """Return a reader of the log at an address: a folder, or ``kafka://``.

    Raises:
        ConfigError: the address is not possible.
        EnvironmentProblem: it leads to brokers, and the extra ``kafka`` is not installed.
    """
    if is_kafka(address):
        reader: Reader = kafka_module("reader").kafka_reader(str(address), isolation)
        return reader
    return folder_reader(address, isolation)
