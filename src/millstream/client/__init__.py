"""One call to reach a log: :func:`connect`. What it returns is in ``event_log``."""

from __future__ import annotations

from pathlib import Path

from millstream.client.default_log import default_log
from millstream.client.embedded import FolderLog
from millstream.client.event_log import EventLog
from millstream.client.kafka.address import SCHEME, is_kafka, kafka_address
from millstream.client.kafka.extra import kafka_module
from millstream.errors import ConfigError

__all__ = ["EventLog", "connect"]


def connect(address: Path | str | None = None) -> EventLog:
    """Return the event log at an address: a folder, or ``kafka://host:port[,host:port][?options]``.

    Without an address it is the one in the environment variable MILLSTREAM_LOG, or else ``./data``.

    A folder is made when something is first written to it. Reading needs no right; the first call that
    writes makes this process the folder's owner until ``close``, or has it join the process that is:
    then writing goes through that one, and this one takes over when the owner closes the log or dies.
    Several connections of one process to a folder share what it is.

    Behind ``kafka://`` is Millstream's broker, or Apache Kafka: docs/kafka.md tells of the options, and
    of what differs.

    Raises:
        ConfigError: the address is neither, or has an option that there is not. (Writing, later on,
            raises FolderOwnedError when the folder's owner cannot be joined.)
        EnvironmentProblem: confluent-kafka, the extra ``kafka``, is not installed.
        BrokerAwayError: no broker answers.
    """
    address = default_log() if address is None else address
    text = str(address)
    if is_kafka(text):
        at = kafka_address(text)
        log: EventLog = kafka_module("log").KafkaLog(at)
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
