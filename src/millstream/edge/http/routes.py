"""The routes of the edge, and what each responds.

============================  =====================================================================
``POST /topics/NAME``         append events; the response is sent when they are durable
``GET /topics/NAME/events``   records as server-sent events
``GET /topics``               the topics
``GET /status``               what was accepted, refused, lost
``GET /metrics``              the same for Prometheus
``GET /healthz``              whether the server lives; ``/readyz``: whether it appends
============================  =====================================================================

``request_params.py`` describes the parameters. The status of an error says what to do: 400, 404, 408, 413,
415 correct the request, 410 start elsewhere, 429 slow down, 503 try again.
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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from millstream.client.reader import Reader
from millstream.edge.http.admission import Admission, Ticket
from millstream.edge.http.appender import AppendResult, EventAppender
from millstream.edge.http.counters import HttpCounters
from millstream.edge.http.edge_metrics import add_http_figures, add_statsd_figures
from millstream.edge.http.event_streams import RecordStreams
from millstream.edge.http.request_body import (
    BODY_FORMATS,
    AppendParams,
    Event,
    RequestBody,
    RequestLimits,
    read_body,
)
from millstream.edge.http.request_params import (
    parse_append_params,
    parse_content_type,
    parse_idempotency_key,
    parse_last_event_id,
    parse_stream_params,
    resolve_positions,
)
from millstream.edge.http.topic_watcher import TopicWatcher
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
from millstream.http import (
    StatusTable,
    error_response,
    event_stream_response,
    exception_handlers,
    json_response,
    status_of,
)
from millstream.http_access import AccessRoute
from millstream.metrics.exposition import Exposition, ReadinessCheck
from millstream.metrics.readings import Readings
from millstream.metrics.routes import metric_routes
from millstream.record import TopicInfo

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BODY_S = 30.0  # how long a body may take to arrive
_IN_LOOP_BYTES = 4096  # a body up to this is parsed in the event loop; a larger one in a thread
_THREADS = 16
_LINES_REPORTED_MAX = 100
_ADDRESSES = "There are POST /topics/NAME, GET /topics/NAME/events, GET /topics and GET /status."
_STATUS: StatusTable = (
    (UnknownTopicError, 404),
    (OffsetOutOfRangeError, 410),
    (TopicRecreatedError, 410),
    (RecordTooLargeError, 413),
    (OverloadError, 429),
    (ConfigError, 400),
    (RetriableError, 503),
    (MillstreamError, 500),
)


class _RequestError(Exception):
    """A request that gets an error response before anything of it was appended."""

    def __init__(self, kind: str, message: str, status: int, **more: Any) -> None:
        super().__init__(message)
        self.response = error_response(kind, message, status, appended=0, **more)


class EdgeRoutes:
    """Handles requests.

    Args:
        appender: None where nothing may be appended.
        open_reader: Opens a reader of the log, for one thread at a time.
        statsd_counts: Returns the counters of the listener for datagrams; None where there is none.
        quick: Whether sending never waits, so that it can be done in the event loop.
        subscribers_max: How many streams may be open.
        why_not_ready: Returns why it is not ready; None if it is.
        on_failure: Called with an error after which nothing can be appended any more.
    """

    def __init__(
        self,
        *,
        appender: EventAppender | None,
        open_reader: Callable[[], Reader],
        admission: Admission,
        limits: RequestLimits,
        counts: HttpCounters,
        statsd_counts: Callable[[], dict[str, int] | None],
        quick: bool,
        heartbeat_s: float,
        subscribers_max: int,
        why_not_ready: ReadinessCheck,
        on_failure: Callable[[MillstreamError], None],
    ) -> None:
        self._appender = appender
        self._open_reader = open_reader
        self._admission = admission
        self._limits = limits
        self._counts = counts
        self._statsd_counts = statsd_counts
        self._send_in_loop = quick
        self._subscribers_max = subscribers_max
        self._on_failure = on_failure
        self._exposition = Exposition({"edge": self.read_metrics}, [why_not_ready])
        self._watcher = TopicWatcher(open_reader)
        self._streams = RecordStreams(self._watcher, heartbeat_s)
        self._threads = CapacityLimiter(_THREADS)
        self._loop: asyncio.AbstractEventLoop | None = None

    def application(self) -> Starlette:
        """Return the edge as an ASGI application."""
        return Starlette(
            routes=[
                AccessRoute("/topics", self.topics, role="read"),
                # No browser need confirm where it comes from: whoever may post, posts.
                AccessRoute("/topics/{topic}", self.append, role="operate", methods=["POST"]),
                AccessRoute("/topics/{topic}/events", self.events, role="read"),
                AccessRoute("/status", self.status, role="read"),
                *metric_routes(self._exposition),
            ],
            exception_handlers={
                _RequestError: _request_error_response,
                **exception_handlers(_STATUS, _ADDRESSES, _log),
            },
        )

    def close(self) -> None:
        """End all streams. From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._watcher.close)

    # -- appending ---------------------------------------------------------------------------

    async def append(self, request: Request) -> Response:
        appender = self._appender
        if appender is None:
            raise _RequestError("ReadOnly", "This server was started with --read-only.", 403)
        self._counts.requests += 1
        topic = request.path_params["topic"]
        params = self._append_params(request)
        key = parse_idempotency_key(request.headers)
        with self._admission.admit() as ticket:
            try:
                body = await self._body(request, ticket)
            except ClientDisconnect:
                return Response(status_code=400)  # the client is gone
            if params.format == "lines":
                ticket.hold(len(body), min(body.count(b"\n"), self._limits.lines_max) + 1)
            found = await self._parsed_body(body, params)
            del body
            if key is not None:
                result = await self._append_once(appender, topic, key, found.events, params)
            else:
                result = await self._append(appender, topic, found.events, params)
        self._counts.events += result.appended
        return self._append_response(topic, params, result, found)

    def _append_params(self, request: Request) -> AppendParams:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise _RequestError(
                "EncodingRefused",
                f"The Content-Encoding is {encoding!r}; send the body as it is.",
                415,
            )
        content_type = request.headers.get("content-type", "")
        form = parse_content_type(content_type)
        if form is None:
            raise _RequestError(
                "TypeRefused",
                f"The Content-Type is {content_type!r}; say what the body is: {', '.join(BODY_FORMATS)}, in "
                "UTF-8 where it is text.",
                415,
            )
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ]
        return parse_append_params(form, request.query_params.multi_items(), headers)

    async def _body(self, request: Request, ticket: Ticket) -> bytes:
        """Return the complete body, within the memory limits."""
        most = self._limits.body_bytes_max
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdigit() else 0
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
            raise _RequestError(
                "BodyTooSlow", f"The body was not complete after {_BODY_S:g} s; send it again.", 408
            ) from None
        return bytes(body)

    async def _parsed_body(self, body: bytes, params: AppendParams) -> RequestBody:
        """Return the events of a body that may be appended.

        Raises:
            _RequestError: it may not; the response says which lines are bad, and why.
        """
        if len(body) <= _IN_LOOP_BYTES:
            found = read_body(body, params, self._limits)
        else:
            found = await self._in_thread(lambda: read_body(body, params, self._limits))
        if found.too_many:
            raise _RequestError(
                "TooManyLines",
                f"The body has more than {self._limits.lines_max:,} events; nothing of it was appended: "
                "send them in several requests.",
                413,
            )
        if found.bad_lines and (not params.skip_bad or not found.events):
            self._counts.bad_events += len(found.bad_lines)
            raise _RequestError(
                "BadEvents", _bad_lines_message(found, params), 400, **_bad_lines_json(found)
            )
        if not found.events:
            raise _RequestError("NoEvents", "The body has no event; send one or more.", 400)
        return found

    async def _append(
        self, appender: EventAppender, topic: str, events: Sequence[Event], params: AppendParams
    ) -> AppendResult:
        if self._send_in_loop and len(events) == 1:
            futures, refused = appender.send(topic, events, params)
        else:
            futures, refused = await self._in_thread(lambda: appender.send(topic, events, params))
        if refused is not None and not futures:
            self._stop_if_fatal(refused)
            raise refused
        result = AppendResult()
        for event, future in zip(events, futures, strict=False):
            try:
                # Most are done together with the one before them.
                metadata = future.result() if future.done() else await asyncio.wrap_future(future)
            except MillstreamError as error:
                result.fail(event.line, error)
            else:
                result.add(metadata)
        for event in events[len(futures) :]:
            assert refused is not None, "an event that was not sent was refused"
            result.fail(event.line, refused)
        return result

    async def _append_once(
        self,
        appender: EventAppender,
        topic: str,
        key: str,
        events: Sequence[Event],
        params: AppendParams,
    ) -> AppendResult:
        def append() -> AppendResult:
            return appender.append_once(topic, key, events, params)

        try:
            result = await self._in_thread(append)
        except MillstreamError as error:
            self._stop_if_fatal(error)
            raise
        self._counts.duplicates += result.duplicate
        return result

    def _append_response(
        self, topic: str, params: AppendParams, result: AppendResult, found: RequestBody
    ) -> Response:
        """Return the response that says which events were appended."""
        content: dict[str, Any] = {"topic": topic, "appended": result.appended}
        if result.duplicate:
            content["duplicate"] = True
        if result.last_record is not None:
            if params.format != "lines":
                content |= result.last_record._asdict()
            ends = {str(number): end for number, end in sorted(result.next_offsets.items())}
            content["position"] = {topic: ends}
        if found.bad_lines:
            self._counts.bad_events += len(found.bad_lines)
            content |= _bad_lines_json(found)
        error = result.failure
        if error is None:
            return json_response(content)
        self._stop_if_fatal(error)
        self._counts.not_appended += len(result.failed_lines)
        content["not_appended"] = len(result.failed_lines)
        content["lines_not_appended"] = result.failed_lines[:_LINES_REPORTED_MAX]
        return error_response(
            type(error).__name__, str(error), status_of(error, _STATUS), **content
        )

    def _stop_if_fatal(self, error: MillstreamError) -> None:
        """Stop the server after an error that prevents all further appends."""
        if isinstance(error, CorruptionError | FencedError):
            self._on_failure(error)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._threads)

    # -- streaming ----------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        self._loop = asyncio.get_running_loop()
        topic = request.path_params["topic"]
        start, partitions = parse_stream_params(request.query_params.multi_items())
        start = parse_last_event_id(request.headers.get("last-event-id")) or start
        if self._watcher.subscribers >= self._subscribers_max:
            return error_response(
                "TooManyStreams",
                f"{self._subscribers_max} streams are open, which is the limit; try again later.",
                503,
            )
        found = await self._streams.run(lambda: self._open_stream(topic, start, partitions))
        self._counts.streams += 1
        return event_stream_response(self._stream(*found, grows=not partitions))

    def _open_stream(
        self, topic: str, start: str, partitions: Sequence[int]
    ) -> tuple[Reader, TopicInfo, dict[int, int]]:
        """Return a reader that is pinned to the topic, and the offsets at which a stream of it starts."""
        reader = self._open_reader()
        topic_id = reader.topic_id(topic)
        reader = reader.pinned({topic: topic_id})
        at = resolve_positions(reader, topic, start, partitions)
        return reader, TopicInfo(topic, topic_id, len(at)), at

    async def _stream(
        self, reader: Reader, topic: TopicInfo, at: dict[int, int], *, grows: bool
    ) -> AsyncIterator[bytes]:
        async with aclosing(self._streams.events(reader, topic, at, grows=grows)) as events:  # type: ignore[type-var]
            async for text in events:
                self._counts.streamed_bytes += len(text)
                yield text

    # -- status -------------------------------------------------------------------------------

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

        return json_response({"topics": await self._streams.run(read)})

    def read_metrics(self, readings: Readings) -> None:
        """Add the figures of the edge. From any thread."""
        add_http_figures(readings, self._counts, self._admission, self._watcher.subscribers)
        add_statsd_figures(readings, self._statsd_counts())

    async def status(self, _: Request) -> Response:
        return json_response(
            {
                "http": {
                    **asdict(self._counts),
                    "refused_for_load": self._admission.refused,
                    "appending": self._admission.requests,
                    "appending_bytes": self._admission.held_bytes,
                    "streams_open": self._watcher.subscribers,
                },
                "statsd": self._statsd_counts(),
            }
        )


def _too_large(size: int, most: int) -> _RequestError:
    return _RequestError(
        "BodyTooLarge",
        f"The body has {size:,} bytes or more, and may have {most:,}; nothing of it was appended: send "
        "it in several requests.",
        413,
    )


def _bad_lines_message(found: RequestBody, params: AppendParams) -> str:
    first = found.bad_lines[0]
    which = f"Line {first.line}" if params.format == "lines" else "The event"
    others = len(found.bad_lines) - 1
    also = f", and {others} more lines are bad" if others else ""
    what = "the line" if params.format == "lines" and not others else "it" if not others else "them"
    skip = ", or use bad=skip to append the other lines" if found.events else ""
    return (
        f"{which} {first.reason}{also}. Nothing of this request was appended. Correct {what}{skip}."
    )


def _bad_lines_json(found: RequestBody) -> dict[str, Any]:
    return {
        "bad": len(found.bad_lines),
        "bad_lines": [line.to_json() for line in found.bad_lines[:_LINES_REPORTED_MAX]],
    }


async def _request_error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, _RequestError)
    return error.response
