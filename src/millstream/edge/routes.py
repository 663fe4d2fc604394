"""The addresses of the edge, and what each answers.

============================  =====================================================================
``POST /topics/NAME``         append events; answered when they are durable
``GET /topics/NAME/events``   records as server-sent events
``GET /topics``               the topics there are
``GET /status``               what was taken, refused, lost
============================  =====================================================================

What parameters mean is in ``words.py``. An error says by its status what to do: 400, 404, 408, 413, 415
correct the request, 410 begin elsewhere, 429 slow down, 503 try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from millstream.answering import error_answer, event_answer, json_answer
from millstream.client.reading import Reader
from millstream.edge.admission import Admission, Ticket
from millstream.edge.appending import Appender, Outcome
from millstream.edge.counts import Counts
from millstream.edge.incoming import FORMS, Asked, Body, Event, Limits, read_body
from millstream.edge.streams import Streams
from millstream.edge.watching import Watching
from millstream.edge.words import (
    asked_of,
    form_of,
    idempotency_key_of,
    last_event_id,
    positions_of,
    stream_of,
)
from millstream.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MillstreamError,
    OffsetOutOfRangeError,
    OverloadError,
    RecordTooLargeError,
    RetriableError,
    TopicRecreatedError,
    UnknownTopicError,
)
from millstream.record import TopicInfo

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BODY_S = 30.0  # how long a body may take to come
_IN_LOOP_BYTES = 4096  # a body up to this is read where it is; a larger one in a thread
_THREADS = 16
_LINES_TOLD = 100
_STATUS: Sequence[tuple[type[MillstreamError], int]] = (
    (UnknownTopicError, 404),
    (OffsetOutOfRangeError, 410),
    (TopicRecreatedError, 410),
    (RecordTooLargeError, 413),
    (OverloadError, 429),
    (ConfigError, 400),
    (RetriableError, 503),
    (MillstreamError, 500),
)


class _Refusal(Exception):
    """A request that is answered with an error before anything of it was appended."""

    def __init__(self, kind: str, message: str, status: int, **more: Any) -> None:
        super().__init__(message)
        self.answer = error_answer(kind, message, status, appended=0, **more)


class Edge:
    """Answers requests.

    Args:
        appender: None where nothing may be appended.
        open_reader: Makes a reader of the log, for one thread at a time.
        statsd_counts: Tells what the listener for datagrams has counted; None where there is none.
        quick: Whether sending never waits, so that it can be done in the event loop.
        subscribers_max: How many streams may be open.
        on_failure: Called with what means that nothing will be appended any more.
    """

    def __init__(
        self,
        *,
        appender: Appender | None,
        open_reader: Callable[[], Reader],
        admission: Admission,
        limits: Limits,
        counts: Counts,
        statsd_counts: Callable[[], dict[str, int] | None],
        quick: bool,
        heartbeat_s: float,
        subscribers_max: int,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self._appender = appender
        self._open_reader = open_reader
        self._admission = admission
        self._limits = limits
        self._counts = counts
        self._statsd_counts = statsd_counts
        self._quick = quick
        self._subscribers_max = subscribers_max
        self._on_failure = on_failure
        self._watching = Watching(open_reader)
        self._streams = Streams(self._watching, heartbeat_s)
        self._threads = CapacityLimiter(_THREADS)
        self._loop: asyncio.AbstractEventLoop | None = None

    def application(self) -> Starlette:
        """Return the edge as an ASGI application."""
        return Starlette(
            routes=[
                Route("/topics", self.topics, methods=["GET"]),
                Route("/topics/{topic}", self.append, methods=["POST"]),
                Route("/topics/{topic}/events", self.events, methods=["GET"]),
                Route("/status", self.status, methods=["GET"]),
            ],
            exception_handlers={
                _Refusal: _refusal,
                MillstreamError: _failed,
                HTTPException: _unknown,
                Exception: _broken,
            },
        )

    def close(self) -> None:
        """Let streams end, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._watching.close)

    # -- events come in -----------------------------------------------------------------------

    async def append(self, request: Request) -> Response:
        appender = self._appender
        if appender is None:
            raise _Refusal("ReadOnly", "This server was started with --read-only.", 403)
        self._counts.requests += 1
        topic = request.path_params["topic"]
        asked = self._asked(request)
        key = idempotency_key_of(request.headers)
        with self._admission.ticket() as ticket:
            try:
                body = await self._body(request, ticket)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            if asked.form == "lines":
                ticket.hold(len(body), min(body.count(b"\n"), self._limits.lines_max) + 1)
            found = await self._judged(body, asked)
            del body
            if key is not None:
                outcome = await self._append_once(appender, topic, key, found.events, asked)
            else:
                outcome = await self._append(appender, topic, found.events, asked)
        self._counts.events += outcome.appended
        return self._told(topic, asked, outcome, found)

    def _asked(self, request: Request) -> Asked:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise _Refusal(
                "EncodingRefused",
                f"The Content-Encoding is {encoding!r}; send the body as it is.",
                415,
            )
        content_type = request.headers.get("content-type", "")
        form = form_of(content_type)
        if form is None:
            raise _Refusal(
                "TypeRefused",
                f"The Content-Type is {content_type!r}; say what the body is: {', '.join(FORMS)}, in "
                "UTF-8 where it is text.",
                415,
            )
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ]
        return asked_of(form, request.query_params.multi_items(), headers)

    async def _body(self, request: Request, ticket: Ticket) -> bytes:
        """Return the body, once there is room for it and all of it has come."""
        most = self._limits.body_bytes_max
        said = request.headers.get("content-length", "")
        size = int(said) if said.isdigit() else 0
        if size > most:
            raise _too_large(size, most)
        ticket.hold(size)
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S), aclosing(request.stream()) as stream:
                async for chunk in stream:
                    body += chunk
                    if len(body) > most:
                        raise _too_large(len(body), most)
                    ticket.hold(len(body))
        except TimeoutError:
            raise _Refusal(
                "BodyTooSlow", f"The body had not come after {_BODY_S:g} s; send it again.", 408
            ) from None
        return bytes(body)

    async def _judged(self, body: bytes, asked: Asked) -> Body:
        """Return the events of a body, where it is to be appended.

        Raises:
            _Refusal: it is not; the answer says which lines, and why.
        """
        if len(body) <= _IN_LOOP_BYTES:
            found = read_body(body, asked, self._limits)
        else:
            found = await self._in_thread(lambda: read_body(body, asked, self._limits))
        if found.too_many:
            raise _Refusal(
                "TooManyLines",
                f"The body has more than {self._limits.lines_max:,} events; nothing of it was appended: "
                "send them in several requests.",
                413,
            )
        if found.faults and (not asked.skip_bad or not found.events):
            self._counts.bad_events += len(found.faults)
            raise _Refusal("BadEvents", _complaint(found, asked), 400, **_told_faults(found))
        if not found.events:
            raise _Refusal("NoEvents", "The body has no event; send one or more.", 400)
        return found

    async def _append(
        self, appender: Appender, topic: str, events: Sequence[Event], asked: Asked
    ) -> Outcome:
        if self._quick and len(events) == 1:
            futures, refused = appender.send(topic, events, asked)
        else:
            futures, refused = await self._in_thread(lambda: appender.send(topic, events, asked))
        if refused is not None and not futures:
            self._look_at(refused)
            raise refused
        outcome = Outcome()
        for event, future in zip(events, futures, strict=False):
            try:
                # Most are told with the one before them, and wait for nothing.
                place = future.result() if future.done() else await asyncio.wrap_future(future)
            except MillstreamError as error:
                outcome.fail(event.line, error)
            else:
                outcome.note(place)
        for event in events[len(futures) :]:
            assert refused is not None, "what was not sent was refused"
            outcome.fail(event.line, refused)
        return outcome

    async def _append_once(
        self, appender: Appender, topic: str, key: str, events: Sequence[Event], asked: Asked
    ) -> Outcome:
        def append() -> Outcome:
            return appender.append_once(topic, key, events, asked)

        try:
            outcome = await self._in_thread(append)
        except MillstreamError as error:
            self._look_at(error)
            raise
        self._counts.duplicates += outcome.duplicate
        return outcome

    def _told(self, topic: str, asked: Asked, outcome: Outcome, found: Body) -> Response:
        """Return the answer that says what became of each event."""
        told: dict[str, Any] = {"topic": topic, "appended": outcome.appended}
        if outcome.duplicate:
            told["duplicate"] = True
        if outcome.place is not None:
            if asked.form != "lines":
                told |= outcome.place._asdict()
            ends = {str(number): end for number, end in sorted(outcome.ends.items())}
            told["position"] = {topic: ends}
        if found.faults:
            self._counts.bad_events += len(found.faults)
            told |= _told_faults(found)
        error = outcome.failure
        if error is None:
            return json_answer(told)
        self._look_at(error)
        self._counts.not_appended += len(outcome.failed_lines)
        told["not_appended"] = len(outcome.failed_lines)
        told["lines_not_appended"] = outcome.failed_lines[:_LINES_TOLD]
        return error_answer(type(error).__name__, str(error), _status(error), **told)

    def _look_at(self, error: MillstreamError) -> None:
        """End the server where nothing can be appended any more."""
        if isinstance(error, CorruptionError | FencedError):
            self._on_failure(error)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._threads)

    # -- records go out -----------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        self._loop = asyncio.get_running_loop()
        topic = request.path_params["topic"]
        begin, partitions = stream_of(request.query_params.multi_items())
        begin = last_event_id(request.headers.get("last-event-id")) or begin
        if self._watching.followers >= self._subscribers_max:
            return error_answer(
                "TooManyStreams",
                f"{self._subscribers_max} streams are open, which is the limit; come back later.",
                503,
            )
        found = await self._streams.run(lambda: self._found(topic, begin, partitions))
        self._counts.streams += 1
        return event_answer(self._followed(*found, grows=not partitions))

    def _found(
        self, topic: str, begin: str, partitions: Sequence[int]
    ) -> tuple[Reader, TopicInfo, dict[int, int]]:
        """Return a reader of the topic as it is now, and where a stream of it begins."""
        reader = self._open_reader()
        topic_id = reader.topic_id(topic)
        reader = reader.pinned({topic: topic_id})
        at = positions_of(reader, topic, begin, partitions)
        return reader, TopicInfo(topic, topic_id, len(at)), at

    async def _followed(
        self, reader: Reader, topic: TopicInfo, at: dict[int, int], *, grows: bool
    ) -> AsyncIterator[bytes]:
        async with aclosing(self._streams.events(reader, topic, at, grows=grows)) as events:  # type: ignore[type-var]
            async for text in events:
                self._counts.streamed_bytes += len(text)
                yield text

    # -- what there is ------------------------------------------------------------------------

    async def topics(self, _: Request) -> Response:
        reader = self._open_reader()

        def read() -> list[dict[str, Any]]:
            return [
                {
                    "topic": name,
                    "partitions": [
                        {"partition": number, "start": start, "end": end}
                        for number, (start, end) in enumerate(reader.offsets(name))
                    ],
                }
                for name in sorted(reader.topics())
            ]

        return json_answer({"topics": await self._streams.run(read)})

    async def status(self, _: Request) -> Response:
        return json_answer(
            {
                "http": {
                    **asdict(self._counts),
                    "refused_for_load": self._admission.refused,
                    "appending": self._admission.requests,
                    "appending_bytes": self._admission.held_bytes,
                    "streams_open": self._watching.followers,
                },
                "statsd": self._statsd_counts(),
            }
        )


def _too_large(size: int, most: int) -> _Refusal:
    return _Refusal(
        "BodyTooLarge",
        f"The body has {size:,} bytes or more, and may have {most:,}; nothing of it was appended: send "
        "it in several requests.",
        413,
    )


def _complaint(found: Body, asked: Asked) -> str:
    first = found.faults[0]
    which = f"Line {first.line}" if asked.form == "lines" else "The event"
    others = len(found.faults) - 1
    also = f", and {others} more lines are bad" if others else ""
    way = ", or say bad=skip to have the other lines appended" if found.events else ""
    return f"{which} {first.reason}{also}. Nothing of this request was appended: mend it{way}."


def _told_faults(found: Body) -> dict[str, Any]:
    return {
        "bad": len(found.faults),
        "bad_lines": [fault.told() for fault in found.faults[:_LINES_TOLD]],
    }


def _status(error: MillstreamError) -> int:
    return next(code for kind, code in _STATUS if isinstance(error, kind))


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, _Refusal)
    return error.answer


async def _failed(_: Request, error: Exception) -> Response:
    """Answer with an error of ours: its class, its message, and a status that says what to do."""
    assert isinstance(error, MillstreamError)
    more = {}
    if isinstance(error, OffsetOutOfRangeError):
        more = {"start": error.start, "end": error.end}
    return error_answer(type(error).__name__, str(error), _status(error), **more)


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer what has no address here."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = (
        f"There is nothing to {what} here. There are POST /topics/NAME, GET /topics/NAME/events, "
        "GET /topics and GET /status."
    )
    return error_answer("UnknownAddress", message, error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    _log.error("%s failed", request.url.path, exc_info=error)
    return error_answer(
        "Defect", f"The server failed ({type(error).__name__}); its log says where.", 500
    )
