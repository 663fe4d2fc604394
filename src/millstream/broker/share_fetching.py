"""ShareFetch and ShareAcknowledge: what members are given, and what they say became of it.

A request is taken in this order: its turn in its session; what it says of records that its member has;
what it is given. What is said and given is durable before it is answered; if that fails, what was said is
refused, and what was given is taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from millstream.broker.codes import Code, Refused, code_of
from millstream.broker.coordinator import check_name
from millstream.broker.listing import partition_code
from millstream.broker.node import Call, Node
from millstream.broker.share_partition import NotAcquiredError, Saying, Span, Verdict
from millstream.broker.share_reading import FoundBatch, Stretch, read_stretch
from millstream.broker.share_sessions import FIRST_TURN, LAST_TURN, Place, Session
from millstream.broker.share_settings import GroupSettings
from millstream.broker.shares import Share
from millstream.broker.wire import Message
from millstream.errors import CorruptBatchError, MillstreamError, OffsetOutOfRangeError
from millstream.record import TopicPartition

_READ_BYTES = 128 * 1024  # at first; twice as much whenever that was not enough
_EXACTLY = 1  # the mode in which no more records are wanted than were asked for
_VERDICTS = frozenset(one.value for one in Verdict)


@dataclass(eq=False, slots=True)
class Answer:
    """What one partition is answered."""

    place: Place
    share: Share | None = None
    code: Code = Code.NONE
    message: str | None = None
    said: bool = False
    said_code: Code = Code.NONE
    said_message: str | None = None
    batches: list[FoundBatch] = field(default_factory=list)
    given: list[Span] = field(default_factory=list)

    def fail(self, code: Code, message: str) -> None:
        """Note why nothing is given."""
        self.code, self.message = code, message

    def refuse(self, code: Code, message: str) -> None:
        """Note why what was said does not hold."""
        self.said_code, self.said_message = code, message


async def share_fetch(node: Node, call: Call) -> Message:
    """Answer a ShareFetch request."""
    request = call.request
    try:
        session = _session(node, call, begins=True)
    except Refused as error:
        return {"error_code": error.code, "error_message": str(error)}
    settings = await node.shares.settings(session.group)
    answers = {place: Answer(place) for place in _places(request["topics"])}
    await _hear(node, session, request, answers, settings)
    ends = request["share_session_epoch"] == LAST_TURN
    if not ends and not request["is_renew_ack"]:
        session.places.update(dict.fromkeys(answers))
        for topic in request["forgotten_topics_data"]:
            for number in topic["partitions"]:
                session.places.pop(Place(topic["topic_id"], number), None)
        for place in session.places:
            answers.setdefault(place, Answer(place))
        wanted = [answers[place] for place in session.places]
        session.rotate()
    else:
        wanted = []
    limit = max(0, min(request["max_bytes"], node.settings.response_bytes_max))
    call.held_bytes = node.responses.take(limit)
    giving = _Giving(node, session, request, settings, call.held_bytes)
    try:
        await _give(giving, wanted, [one for one in answers.values() if one.said])
    except BaseException:
        giving.take_back(list(answers.values()))
        raise
    if ends:
        end_session(node, session)
    return {
        "acquisition_lock_timeout_ms": settings.limits.lock_ms,
        "responses": _by_topic(
            [_fetched(one) for one in answers.values() if one.said or one.code or one.given]
        ),
    }


async def share_acknowledge(node: Node, call: Call) -> Message:
    """Answer a ShareAcknowledge request."""
    request = call.request
    try:
        session = _session(node, call, begins=False)
    except Refused as error:
        return {"error_code": error.code, "error_message": str(error)}
    settings = await node.shares.settings(session.group)
    answers = {place: Answer(place) for place in _places(request["topics"])}
    await _hear(node, session, request, answers, settings)
    await _settle(node, [one for one in answers.values() if one.said])
    if request["share_session_epoch"] == LAST_TURN:
        end_session(node, session)
    return {
        "acquisition_lock_timeout_ms": settings.limits.lock_ms,
        "responses": _by_topic(
            [
                (
                    one.place.topic_id,
                    {
                        "partition_index": one.place.partition,
                        "error_code": one.said_code,
                        "error_message": one.said_message,
                    },
                )
                for one in answers.values()
            ]
        ),
    }


def end_session(node: Node, session: Session) -> None:
    """End a session; what its member has is available again."""
    if not session.closed:
        node.share_sessions.end(session.group, session.member)
        node.shares.release(session.group, session.member)


def _session(node: Node, call: Call, *, begins: bool) -> Session:
    request = call.request
    group, member, turn = request["group_id"], request["member_id"], request["share_session_epoch"]
    check_name(group or "")
    if not member:
        raise Refused(Code.INVALID_REQUEST, "the request names no member")
    if turn == FIRST_TURN:
        if not begins:
            raise Refused(
                Code.INVALID_SHARE_SESSION_EPOCH, "a session begins by fetching; fetch first"
            )
        return node.share_sessions.begin(group, member, call.connection)
    return node.share_sessions.take(group, member, turn)


def _places(topics: Sequence[Message]) -> list[Place]:
    return [
        Place(topic["topic_id"], one["partition_index"])
        for topic in topics
        for one in topic["partitions"]
    ]


async def _find(node: Node, group: str, answer: Answer) -> bool:
    """Look for the share partition of an answer; return whether it is there."""
    wanted = answer.place.topic_id.hex()
    info = next((one for one in node.writer.topics().values() if one.topic_id == wanted), None)
    if info is None:
        answer.fail(Code.UNKNOWN_TOPIC_ID, f"no topic has the id {wanted}")
        return False
    try:
        name = TopicPartition(info.name, answer.place.partition)
        answer.share = await node.shares.share(group, name)
    except MillstreamError as error:
        answer.fail(partition_code(error), str(error))
        return False
    return True


# -- what members say -------------------------------------------------------------------------


async def _hear(
    node: Node,
    session: Session,
    request: Message,
    answers: dict[Place, Answer],
    settings: GroupSettings,
) -> None:
    """Note what a request says of records; it is not durable yet."""
    for topic in request["topics"]:
        for one in topic["partitions"]:
            batches = one["acknowledgement_batches"]
            if not batches:
                continue
            answer = answers[Place(topic["topic_id"], one["partition_index"])]
            answer.said = True
            if not await _find(node, session.group, answer):
                answer.refuse(answer.code, answer.message or "")
                continue
            assert answer.share is not None, "it was found"
            share = answer.share
            try:
                sayings = _sayings(batches, renews=settings.renews and request["is_renew_ack"])
                share.partition.acknowledge(
                    session.member,
                    sayings,
                    limits=settings.limits,
                    now_ms=node.shares.now_ms(),
                )
            except NotAcquiredError as error:
                answer.refuse(Code.INVALID_RECORD_STATE, str(error))
            except Refused as error:
                answer.refuse(error.code, str(error))
            else:
                share.wake()
                node.shares.watch_locks(share)


def _sayings(batches: Sequence[Message], *, renews: bool) -> list[Saying]:
    """Return what acknowledgement batches say, each verdict with its run of offsets.

    Raises:
        Refused: they say what cannot be.
    """
    sayings = []
    for batch in batches:
        first, last, kinds = (
            batch["first_offset"],
            batch["last_offset"],
            batch["acknowledge_types"],
        )
        if not 0 <= first <= last or len(kinds) not in (1, last - first + 1):
            raise Refused(
                Code.INVALID_REQUEST, f"{len(kinds)} verdicts on offsets {first} to {last}"
            )
        for kind in set(kinds):
            if kind not in _VERDICTS or (kind == Verdict.RENEW.value and not renews):
                raise Refused(Code.INVALID_REQUEST, f"a verdict of kind {kind} is not taken")
        if len(kinds) == 1:
            sayings.append(Saying(first, last + 1, Verdict(kinds[0])))
            continue
        at = first
        for kind, run in groupby(kinds):
            size = sum(1 for _ in run)
            sayings.append(Saying(at, at + size, Verdict(kind)))
            at += size
    return sayings


async def _settle(node: Node, answers: Sequence[Answer]) -> None:
    """Return when what was said or given is durable; else it is refused, and taken back."""
    shares = [one.share for one in answers if one.share is not None]
    if not shares:
        return
    error = await node.shares.settle(shares)
    if error is None:
        return
    for one in answers:
        if one.said and not one.said_code:
            one.refuse(Code.KAFKA_STORAGE_ERROR, str(error))
        one.fail(Code.KAFKA_STORAGE_ERROR, str(error))


# -- what members are given -------------------------------------------------------------------


class _Giving:
    """What one fetch is given, as it grows over its partitions."""

    def __init__(
        self,
        node: Node,
        session: Session,
        request: Message,
        settings: GroupSettings,
        bytes_max: int,
    ) -> None:
        self.node = node
        self.session = session
        self.settings = settings
        self.count_max = max(request["max_records"], 0)
        self.exactly = request["share_acquire_mode"] == _EXACTLY
        self.wait_s = max(request["max_wait_ms"], 0) / 1000
        self.bytes_left = bytes_max
        self.count = 0
        self.careful = False  # something failed before is among it: nothing more goes with it

    @property
    def full(self) -> bool:
        """Whether nothing more is to be given."""
        return self.careful or self.count >= self.count_max or self.bytes_left <= 0

    def take_back(self, answers: Sequence[Answer]) -> None:
        """Give up what was acquired: it is not sent."""
        for one in answers:
            if one.share is not None and one.given:
                one.share.partition.withdraw(self.session.member, one.given)
                one.share.wake()
            one.given, one.batches = [], []

    async def fill(self, answer: Answer) -> None:
        """Acquire what there is in one partition."""
        share = answer.share
        assert share is not None, "it was found"
        async with share.reading:
            bytes_max = _READ_BYTES
            while not self.full and not self.session.closed:
                start = share.partition.wanted(self.settings.limits)
                if start is None:
                    return
                try:
                    found = await self._read(share, start, min(bytes_max, self.bytes_left))
                except OffsetOutOfRangeError as error:
                    if start >= error.start:
                        raise
                    share.partition.removed_below(error.start)
                    continue
                if found.reached == start or self.session.closed:
                    return
                self._acquire(answer, share, found)
                bytes_max *= 2
                if share.partition.wanted(self.settings.limits) == start:
                    return

    async def _read(self, share: Share, start: int, bytes_max: int) -> Stretch:
        reader = self.node.reader
        return await self.node.run(
            lambda: read_stretch(
                reader(),
                share.name,
                start,
                isolation=self.settings.isolation,
                bytes_max=bytes_max,
                first_whole=not self.count,
            )
        )

    def _acquire(self, answer: Answer, share: Share, found: Stretch) -> None:
        given = share.partition.acquire(
            self.session.member,
            found.ranges,
            (found.start, found.reached),
            count_max=self.count_max,
            limits=self.settings.limits,
            now_ms=self.node.shares.now_ms(),
            already=self.count,
            exactly=self.exactly,
        )
        batches = [one for one in found.batches if _brings(one, given)]
        self.node.shares.watch_locks(share)
        answer.given += given
        answer.batches += batches
        self.count += sum(one.end - one.first for one in given)
        self.bytes_left -= sum(len(one.data) for one in batches)
        self.careful |= any(one.deliveries > 1 for one in given)


def _brings(batch: FoundBatch, given: Sequence[Span]) -> bool:
    return any(first < one.end and one.first < end for first, end in batch.ranges for one in given)


async def _give(giving: _Giving, wanted: Sequence[Answer], said: Sequence[Answer]) -> None:
    """Acquire what there is, and wait for something if there is nothing."""
    node, session = giving.node, giving.session
    deadline_s = node.loop.time() + giving.wait_s
    there = [one for one in wanted if one.share or await _find(node, session.group, one)]
    with _watching(node, there) as event:
        while True:
            event.clear()
            for one in there:
                try:
                    await giving.fill(one)
                except MillstreamError as error:
                    _failed(one, error)
            changed = [one for one in there if one.share is not None]
            await _settle(node, list(dict.fromkeys([*said, *changed])))
            said = []
            if any(one.code for one in there) or session.closed:
                giving.take_back([one for one in there if one.code or session.closed])
            left_s = deadline_s - node.loop.time()
            over = giving.count or giving.full or left_s <= 0 or session.closed or not there
            if over or any(one.code for one in wanted):
                return
            try:
                async with asyncio.timeout(left_s):
                    await event.wait()
            except TimeoutError:
                return


@contextmanager
def _watching(node: Node, answers: Sequence[Answer]) -> Iterator[asyncio.Event]:
    """Give an event that is set when records come, or become available again."""
    shares = [one.share for one in answers if one.share is not None]
    with node.watch.watching([share.name for share in shares]) as event, ExitStack() as leaving:
        for share in shares:
            share.waiting.add(event)
            leaving.callback(share.waiting.discard, event)
        yield event


def _failed(answer: Answer, error: MillstreamError) -> None:
    code = Code.CORRUPT_MESSAGE if isinstance(error, CorruptBatchError) else code_of(error)
    if code == Code.INVALID_REQUEST:
        code = Code.UNKNOWN_TOPIC_OR_PARTITION
    answer.fail(code, str(error))


# -- answers ----------------------------------------------------------------------------------


def _fetched(one: Answer) -> tuple[bytes, Message]:
    return one.place.topic_id, {
        "partition_index": one.place.partition,
        "error_code": one.code,
        "error_message": one.message,
        "acknowledge_error_code": one.said_code,
        "acknowledge_error_message": one.said_message,
        "records": b"".join(batch.data for batch in one.batches),
        "acquired_records": [
            {
                "first_offset": span.first,
                "last_offset": span.end - 1,
                "delivery_count": span.deliveries,
            }
            for span in one.given
        ],
    }


def _by_topic(answers: Sequence[tuple[bytes, Message]]) -> list[Message]:
    topics: dict[bytes, list[Message]] = {}
    for topic_id, answer in answers:
        topics.setdefault(topic_id, []).append(answer)
    return [{"topic_id": key, "partitions": partitions} for key, partitions in topics.items()]
