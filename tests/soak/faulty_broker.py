"""A broker with injected defects, for tests of the soak, which must find them.

    python -m soak.faulty_broker DEFECT[,DEFECT] broker DIR [options of `millstream broker`]

The defects patch the broker's code in this process; the package does not know of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from millstream.broker import dispatch
from millstream.broker.call import Call
from millstream.broker.node import BrokerNode
from millstream.broker.protocol import messages, messages_groups, messages_transactions
from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.protocol.wire import Message
from millstream.broker.records import appender
from millstream.broker.records.appender import Appender
from millstream.broker.requests import committed_offsets, transactions
from millstream.broker.requests import fetch as fetch_module
from millstream.cli.main import main
from millstream.log.batch import NO_PRODUCER, TRANSACTIONAL
from millstream.log.group_commit import PendingAppend

_EVERY = 20  # so that most of its work is right
_numbers = count(1)


def _now(every: int = _EVERY) -> bool:
    return next(_numbers) % every == 0


def loses_records() -> None:
    """Acknowledges a batch that it has not appended."""
    validate = Appender._validate

    def lose(
        self: Appender, arrival: appender.ProducedBatch, delivery: appender._ProduceRequest
    ) -> None:
        validate(self, arrival, delivery)
        if arrival.code == ErrorCode.NONE and _now():
            _, append = delivery.pending.pop()
            arrival.offset = append.partition.log_end_offset
            arrival.log_start = append.partition.log_start

    Appender._validate = lose


def doubles_records() -> None:
    """Appends a batch twice."""
    validate = Appender._validate

    def double(
        self: Appender, arrival: appender.ProducedBatch, delivery: appender._ProduceRequest
    ) -> None:
        validate(self, arrival, delivery)
        if arrival.code == ErrorCode.NONE and delivery.pending:
            _, append = delivery.pending[-1]
            if not append.batch.attributes & TRANSACTIONAL and _now():
                again = replace(append.batch, producer=NO_PRODUCER)
                ignored = appender.ProducedBatch(arrival.name, None)
                delivery.pending.append(
                    (ignored, PendingAppend(append.name, again, append.partition))
                )

    Appender._validate = double


def shows_aborted() -> None:
    """Does not report aborted transactions to committed readers."""
    good = fetch_module._partition_response

    def response(one: fetch_module.PartitionFetch, isolation: fetch_module.Isolation) -> Message:
        return {**good(one, isolation), "aborted_transactions": []}

    fetch_module._partition_response = response


def shows_open() -> None:
    """Returns uncommitted records to every reader."""

    async def fetch(node: BrokerNode, call: Call) -> Message:
        call.request["isolation_level"] = 0
        return await fetch_module.fetch(node, call)

    _instead(messages.FETCH, fetch)


def forgets_offsets() -> None:
    """Acknowledges offsets of groups without storing them; those of a transaction, too."""

    async def commit(node: BrokerNode, call: Call) -> Message:
        if _now(every=2):  # the next one would make up for it
            return {"topics": committed_offsets.partition_responses(call.request["topics"], {})}
        return await committed_offsets.offset_commit(node, call)

    async def in_transaction(node: BrokerNode, call: Call) -> Message:
        if _now(every=2):  # the next one would make up for it
            return {"topics": committed_offsets.partition_responses(call.request["topics"], {})}
        return await transactions.txn_offset_commit(node, call)

    _instead(messages_groups.OFFSET_COMMIT, commit)
    _instead(messages_transactions.TXN_OFFSET_COMMIT, in_transaction)


def commits_offsets_alone() -> None:
    """Stores the offsets of a transaction at once, whether it is committed or not."""

    async def in_transaction(node: BrokerNode, call: Call) -> Message:
        offsets, _ = committed_offsets.split_committable(node, call.request["topics"])
        await node.offset_writer.commit(call.request["group_id"], offsets)
        return {"topics": committed_offsets.partition_responses(call.request["topics"], {})}

    _instead(messages_transactions.TXN_OFFSET_COMMIT, in_transaction)


def _instead(api: object, handler: Callable[..., object]) -> None:
    dispatch.HANDLERS[api] = handler


DEFECTS = {
    one.__name__: one
    for one in (
        loses_records,
        doubles_records,
        shows_aborted,
        shows_open,
        forgets_offsets,
        commits_offsets_alone,
    )
}

if __name__ == "__main__":
    for name in sys.argv.pop(1).split(","):
        DEFECTS[name]()
    main()
