"""ShareFetch and ShareAcknowledge: members acquire records, and acknowledge them.

A request is handled in this order: check its share session epoch; apply its acknowledgements; acquire
records. Both are durable before the response; if that fails, the acknowledgements are rejected, and the
acquisition is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from millstream.broker.call import Call
from millstream.broker.groups.coordinator import check_group_id
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, code_of
from millstream.broker.protocol.wire import Message
from millstream.broker.requests.list_offsets import partition_code
from millstream.broker.share.partition import (
    Acknowledgement,
    AcknowledgeType,
    NotAcquiredError,
    RecordSpan,
)
from millstream.broker.share.partition_manager import LoadedSharePartition
from millstream.broker.share.record_ranges import FetchedInterval, FoundBatch, read_interval
from millstream.broker.share.session import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    ShareSession,
    TopicIdPartition,
)
from millstream.broker.share.settings import ShareGroupSettings
from millstream.errors import CorruptBatchError, MillstreamError, OffsetOutOfRangeError
from millstream.record import TopicPartition

_READ_BYTES = 128 * 1024  # at first; doubled while that was not enough
_RECORD_LIMIT_MODE = 1  # the share acquire mode in which max_records is a strict limit
_ACKNOWLEDGE_TYPES = frozenset(one.value for one in AcknowledgeType)


@dataclass(eq=False, slots=True)
class SharePartitionResponse:
    """The response for one partition."""

    topic_partition: TopicIdPartition
    share: LoadedSharePartition | None = None
    code: ErrorCode = ErrorCode.NONE
    message: str | None = None
    acknowledges: bool = False
    acknowledge_code: ErrorCode = ErrorCode.NONE
    acknowledge_message: str | None = None
    batches: list[FoundBatch] = field(default_factory=list)
    acquired: list[RecordSpan] = field(default_factory=list)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Set the error of the acquisition."""
        self.code, self.message = code, message

    def fail_acknowledge(self, code: ErrorCode, message: str) -> None:
        """Set the error of the acknowledgement."""
        self.acknowledge_code, self.acknowledge_message = code, message


async def share_fetch(node: BrokerNode, call: Call) -> Message:
    """Handle a ShareFetch request."""
    request = call.request
    try:
        session = _session(node, call, may_open=True)
    except ApiError as error:
        return {"error_code": error.code, "error_message": str(error)}
    settings = await node.shares.settings(session.group)
    responses = await _apply_acknowledgements(node, session, request, settings)
    ends = request["share_session_epoch"] == FINAL_EPOCH
    if not ends and not request["is_renew_ack"]:
        session.partitions.update(dict.fromkeys(responses))
        for topic in request["forgotten_topics_data"]:
            for number in topic["partitions"]:
                session.partitions.pop(TopicIdPartition(topic["topic_id"], number), None)
        for partition in session.partitions:
            responses.setdefault(partition, SharePartitionResponse(partition))
        wanted = [responses[partition] for partition in session.partitions]
        session.rotate()
    else:
        wanted = []
    limit = max(0, min(request["max_bytes"], node.settings.response_bytes_max))
    call.held_bytes = node.responses.take(limit)
    acquisition = _ShareFetch(node, session, request, settings, call.held_bytes)
    try:
        await _acquire_or_wait(
            acquisition, wanted, [one for one in responses.values() if one.acknowledges]
        )
    except BaseException:
        acquisition.cancel(list(responses.values()))
        raise
    if ends:
        end_session(node, session)
    return {
        "acquisition_lock_timeout_ms": settings.limits.lock_duration_ms,
        "responses": _by_topic(
            [
                _partition_response(one)
                for one in responses.values()
                if one.acknowledges or one.code or one.acquired
            ]
        ),
    }


async def share_acknowledge(node: BrokerNode, call: Call) -> Message:
    """Handle a ShareAcknowledge request."""
    request = call.request
    try:
        session = _session(node, call, may_open=False)
    except ApiError as error:
        return {"error_code": error.code, "error_message": str(error)}
    settings = await node.shares.settings(session.group)
    responses = await _apply_acknowledgements(node, session, request, settings)
    await _persist(node, [one for one in responses.values() if one.acknowledges])
    if request["share_session_epoch"] == FINAL_EPOCH:
        end_session(node, session)
    return {
        "acquisition_lock_timeout_ms": settings.limits.lock_duration_ms,
        "responses": _by_topic(
            [
                (
                    one.topic_partition.topic_id,
                    {
                        "partition_index": one.topic_partition.partition,
                        "error_code": one.acknowledge_code,
                        "error_message": one.acknowledge_message,
                    },
                )
                for one in responses.values()
            ]
        ),
    }


def end_session(node: BrokerNode, session: ShareSession) -> None:
    """Close a session; what its member has acquired is available again."""
    if not session.closed:
        node.share_sessions.end(session.group, session.member)
        node.shares.release(session.group, session.member)


def _session(node: BrokerNode, call: Call, *, may_open: bool) -> ShareSession:
    request = call.request
    group, member, session_epoch = (
        request["group_id"],
        request["member_id"],
        request["share_session_epoch"],
    )
    check_group_id(group or "")
    if not member:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the request names no member")
    if session_epoch == INITIAL_EPOCH:
        if not may_open:
            raise ApiError(
                ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                "a share session is opened by a ShareFetch with session epoch 0; fetch first",
            )
        return node.share_sessions.begin(group, member, call.connection)
    return node.share_sessions.next_request(group, member, session_epoch)


def _topic_partitions(topics: Sequence[Message]) -> list[TopicIdPartition]:
    return [
        TopicIdPartition(topic["topic_id"], one["partition_index"])
        for topic in topics
        for one in topic["partitions"]
    ]


async def _load_share_partition(
    node: BrokerNode, group: str, response: SharePartitionResponse
) -> bool:
    """Load the share partition of a response; return whether it exists."""
    wanted = response.topic_partition.topic_id.hex()
    info = next((one for one in node.log.writer.topics().values() if one.topic_id == wanted), None)
    if info is None:
        response.fail(ErrorCode.UNKNOWN_TOPIC_ID, f"no topic has the id {wanted}")
        return False
    try:
        name = TopicPartition(info.name, response.topic_partition.partition)
        response.share = await node.shares.load(group, name)
    except MillstreamError as error:
        response.fail(partition_code(error), str(error))
        return False
    return True


# -- acknowledging ----------------------------------------------------------------------------


async def _apply_acknowledgements(
    node: BrokerNode,
    session: ShareSession,
    request: Message,
    settings: ShareGroupSettings,
) -> dict[TopicIdPartition, SharePartitionResponse]:
    """Apply the acknowledgements of a request; return the responses. Nothing is durable yet."""
    responses = {
        partition: SharePartitionResponse(partition)
        for partition in _topic_partitions(request["topics"])
    }
    for topic in request["topics"]:
        for one in topic["partitions"]:
            batches = one["acknowledgement_batches"]
            if not batches:
                continue
            response = responses[TopicIdPartition(topic["topic_id"], one["partition_index"])]
            response.acknowledges = True
            if not await _load_share_partition(node, session.group, response):
                response.fail_acknowledge(response.code, response.message or "")
                continue
            assert response.share is not None, "it was loaded"
            share = response.share
            try:
                acknowledgements = _parse_acknowledgements(
                    batches, renew=settings.renew_enabled and request["is_renew_ack"]
                )
                share.partition.acknowledge(
                    session.member,
                    acknowledgements,
                    limits=settings.limits,
                    now_ms=node.shares.now_ms(),
                )
            except NotAcquiredError as error:
                response.fail_acknowledge(ErrorCode.INVALID_RECORD_STATE, str(error))
            except ApiError as error:
                response.fail_acknowledge(error.code, str(error))
            else:
                share.wake_fetches()
                node.shares.schedule_lock_expiry(share)
    return responses


def _parse_acknowledgements(batches: Sequence[Message], *, renew: bool) -> list[Acknowledgement]:
    """Return the acknowledgements in a request, one for each run of offsets of the same type.

    Raises:
        ApiError: they are invalid.
    """
    acknowledgements = []
    for batch in batches:
        first, last, kinds = (
            batch["first_offset"],
            batch["last_offset"],
            batch["acknowledge_types"],
        )
        if not 0 <= first <= last or len(kinds) not in (1, last - first + 1):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"{len(kinds)} acknowledge types for offsets {first} to {last}",
            )
        for kind in set(kinds):
            if kind not in _ACKNOWLEDGE_TYPES or (
                kind == AcknowledgeType.RENEW.value and not renew
            ):
                raise ApiError(
                    ErrorCode.INVALID_REQUEST, f"acknowledge type {kind} is not accepted"
                )
        if len(kinds) == 1:
            acknowledgements.append(Acknowledgement(first, last + 1, AcknowledgeType(kinds[0])))
            continue
        at = first
        for kind, run in groupby(kinds):
            size = sum(1 for _ in run)
            acknowledgements.append(Acknowledgement(at, at + size, AcknowledgeType(kind)))
            at += size
    return acknowledgements


async def _persist(node: BrokerNode, responses: Sequence[SharePartitionResponse]) -> None:
    """Return when acknowledgements and acquisitions are durable; else set the error."""
    shares = [one.share for one in responses if one.share is not None]
    if not shares:
        return
    error = await node.shares.persist(shares)
    if error is None:
        return
    for one in responses:
        if one.acknowledges and not one.acknowledge_code:
            one.fail_acknowledge(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
        one.fail(ErrorCode.KAFKA_STORAGE_ERROR, str(error))


# -- acquiring --------------------------------------------------------------------------------


class _ShareFetch:
    """Collects what one fetch acquires in its partitions."""

    def __init__(
        self,
        node: BrokerNode,
        session: ShareSession,
        request: Message,
        settings: ShareGroupSettings,
        bytes_max: int,
    ) -> None:
        self.node = node
        self.session = session
        self.settings = settings
        self.count_max = max(request["max_records"], 0)
        self.record_limit = request["share_acquire_mode"] == _RECORD_LIMIT_MODE
        self.wait_s = max(request["max_wait_ms"], 0) / 1000
        self.bytes_left = bytes_max
        self.count = 0
        self.redelivers = False  # it has a record that failed before: it acquires nothing more

    @property
    def full(self) -> bool:
        """Whether nothing more may be acquired."""
        return self.redelivers or self.count >= self.count_max or self.bytes_left <= 0

    def cancel(self, responses: Sequence[SharePartitionResponse]) -> None:
        """Cancel what was acquired: it is not sent."""
        for one in responses:
            if one.share is not None and one.acquired:
                one.share.partition.cancel_acquisition(self.session.member, one.acquired)
                one.share.wake_fetches()
            one.acquired, one.batches = [], []

    async def acquire(self, response: SharePartitionResponse) -> None:
        """Acquire available records of one partition."""
        share = response.share
        assert share is not None, "it was loaded"
        async with share.reading:
            bytes_max = _READ_BYTES
            while not self.full and not self.session.closed:
                start = share.partition.next_fetch_offset(self.settings.limits)
                if start is None:
                    return
                try:
                    found = await self._read(share, start, min(bytes_max, self.bytes_left))
                except OffsetOutOfRangeError as error:
                    if start >= error.start:
                        raise
                    share.partition.advance_start(error.start)
                    continue
                if found.end == start or self.session.closed:
                    return
                self._acquire_records(response, share, found)
                bytes_max *= 2
                if share.partition.next_fetch_offset(self.settings.limits) == start:
                    return

    async def _read(
        self, share: LoadedSharePartition, start: int, bytes_max: int
    ) -> FetchedInterval:
        reader = self.node.log.reader
        return await self.node.log.run_read(
            lambda: read_interval(
                reader(),
                share.name,
                start,
                isolation=self.settings.isolation,
                bytes_max=bytes_max,
                first_whole=not self.count,
            )
        )

    def _acquire_records(
        self, response: SharePartitionResponse, share: LoadedSharePartition, found: FetchedInterval
    ) -> None:
        acquired = share.partition.acquire(
            self.session.member,
            found.ranges,
            (found.start, found.end),
            count_max=self.count_max,
            limits=self.settings.limits,
            now_ms=self.node.shares.now_ms(),
            count_before=self.count,
            record_limit=self.record_limit,
        )
        batches = [one for one in found.batches if _contains_acquired(one, acquired)]
        self.node.shares.schedule_lock_expiry(share)
        response.acquired += acquired
        response.batches += batches
        self.count += sum(one.end - one.first for one in acquired)
        self.bytes_left -= sum(len(one.data) for one in batches)
        self.redelivers |= any(one.delivery_count > 1 for one in acquired)


def _contains_acquired(batch: FoundBatch, acquired: Sequence[RecordSpan]) -> bool:
    return any(
        first < one.end and one.first < end for first, end in batch.ranges for one in acquired
    )


async def _acquire_or_wait(
    acquisition: _ShareFetch,
    wanted: Sequence[SharePartitionResponse],
    acknowledging: Sequence[SharePartitionResponse],
) -> None:
    """Acquire available records; if there are none, wait for some."""
    node, session = acquisition.node, acquisition.session
    deadline_s = node.loop.time() + acquisition.wait_s
    loaded = [
        one for one in wanted if one.share or await _load_share_partition(node, session.group, one)
    ]
    with _wait_event(node, loaded) as event:
        while True:
            event.clear()
            for one in loaded:
                try:
                    await acquisition.acquire(one)
                except MillstreamError as error:
                    _set_error(one, error)
            changed = [one for one in loaded if one.share is not None]
            await _persist(node, list(dict.fromkeys([*acknowledging, *changed])))
            acknowledging = []
            if any(one.code for one in loaded) or session.closed:
                acquisition.cancel([one for one in loaded if one.code or session.closed])
            left_s = deadline_s - node.loop.time()
            over = (
                acquisition.count or acquisition.full or left_s <= 0 or session.closed or not loaded
            )
            if over or any(one.code for one in wanted):
                return
            try:
                async with asyncio.timeout(left_s):
                    await event.wait()
            except TimeoutError:
                return


@contextmanager
def _wait_event(
    node: BrokerNode, responses: Sequence[SharePartitionResponse]
) -> Iterator[asyncio.Event]:
    """Yield an event that is set when records are appended, or become available again."""
    shares = [one.share for one in responses if one.share is not None]
    with node.watch.watching([share.name for share in shares]) as event, ExitStack() as leaving:
        for share in shares:
            share.waiting.add(event)
            leaving.callback(share.waiting.discard, event)
        yield event


def _set_error(response: SharePartitionResponse, error: MillstreamError) -> None:
    code = ErrorCode.CORRUPT_MESSAGE if isinstance(error, CorruptBatchError) else code_of(error)
    if code == ErrorCode.INVALID_REQUEST:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    response.fail(code, str(error))


# -- responses --------------------------------------------------------------------------------


def _partition_response(one: SharePartitionResponse) -> tuple[bytes, Message]:
    return one.topic_partition.topic_id, {
        "partition_index": one.topic_partition.partition,
        "error_code": one.code,
        "error_message": one.message,
        "acknowledge_error_code": one.acknowledge_code,
        "acknowledge_error_message": one.acknowledge_message,
        "records": b"".join(batch.data for batch in one.batches),
        "acquired_records": [
            {
                "first_offset": span.first,
                "last_offset": span.end - 1,
                "delivery_count": span.delivery_count,
            }
            for span in one.acquired
        ],
    }


def _by_topic(responses: Sequence[tuple[bytes, Message]]) -> list[Message]:
    topics: dict[bytes, list[Message]] = {}
    for topic_id, response in responses:
        topics.setdefault(topic_id, []).append(response)
    return [{"topic_id": key, "partitions": partitions} for key, partitions in topics.items()]
