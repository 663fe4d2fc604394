"""Checks that topics whose transactions are applied whole keep all of their records."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.client.reader import Reader
from millstream.errors import ConfigError
from millstream.kernels.decode.debezium_records import DebeziumFormat, TransactionFormat
from millstream.kernels.plan import JobPlan


def check_not_compacted(plan: JobPlan, log: Reader) -> None:
    """Make sure that no topic of tables that change by transactions is compacted.

    The END of a transaction counts its records. One that compaction has removed would be missed, and all later
    transactions would wait for it.

    Raises:
        ConfigError: one is.
    """
    for topic in compacted_topics_of_transactions(plan, log):
        raise ConfigError(
            f"The topic {topic!r} is compacted, and the app applies whole transactions of it: a record that "
            "compaction removed would be waited for without end. Set its cleanup.policy to delete before anything "
            "is compacted; or capture anew, into topics that are not; or read it without transactions, "
            'envelope="debezium", record by record.'
        )


def compacted_topics_of_transactions(plan: JobPlan, log: Reader) -> Iterator[str]:
    """Yield the topics that a plan applies whole transactions of, and that are compacted."""
    for source in plan.sources:
        values = source.values
        whole = isinstance(values, DebeziumFormat) and values.transactions
        if (whole or isinstance(values, TransactionFormat)) and is_compacted(log, source.topic):
            yield source.topic


def is_compacted(log: Reader, topic: str) -> bool:
    """Return whether compaction removes records of a topic."""
    return "compact" in log.settings(topic)["cleanup.policy"]
