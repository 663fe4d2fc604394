"""One connection: it reads requests and writes responses, in the order of the requests.

One task reads, another handles requests and writes. Requests are handled one after the other, except
Produce requests: consecutive ones are handled together, so that one sync serves them. The broker stops
reading from a client that sends faster than it gets responses, or does not read them: TCP slows down this
client alone. ``memory`` bounds what all connections hold together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from millstream.broker.call import Call
from millstream.broker.dispatch import (
    Peer,
    UnauthenticatedError,
    UnknownRequestError,
    decode_call,
    handle_request,
)
from millstream.broker.memory import SMALL_BYTES_MAX, RequestMemory
from millstream.broker.node import BrokerNode
from millstream.broker.protocol import messages
from millstream.broker.protocol.wire import BytesLike, MalformedError
from millstream.broker.security.authentication import OPENING_BYTES_MAX, SaslSession

READ_AHEAD_BYTES = 64 * 1024  # of a connection, before memory is reserved for its next request
TLS_ENDS_S = 1.0  # for a client to agree to the end of a connection
_SIZE_BYTES = 4
_FRAME_BYTES_MIN = 8  # key, version, correlation id
_REQUESTS_MAX = 64  # of one connection, read and not yet handled
_PRODUCES_MAX = 64  # of one connection, handled at the same time
_CHUNK_BYTES = 1024 * 1024  # of a response, written at a time
_TLS_CHUNK_BYTES = 256 * 1024  # the same, with encryption: other connections are served in between
_REFUSALS = {  # what the broker ends a connection for, and its name in the metrics
    MalformedError: "malformed",
    UnknownRequestError: "unsupported",
    UnauthenticatedError: "unauthenticated",
    TimeoutError: "timeout",
}
_TLS_HANDSHAKE = b"\x16\x03"  # the first bytes of a TLS handshake


async def end_stream(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and return when it is closed, after ``TLS_ENDS_S`` at most.

    TLS closes when the other side agrees. asyncio waits for that for a time, but for ever where the client has agreed
    or gone, and what the socket still holds for it is not read.
    """
    _close(writer)
    closed = asyncio.ensure_future(writer.wait_closed())
    try:
        await asyncio.wait({closed}, timeout=TLS_ENDS_S)
    finally:
        writer.transport.abort()  # nothing, where it is closed
        with suppress(OSError):
            await closed


def _close(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():  # closed twice, asyncio's TLS would not abort any more
        writer.close()


class Connection:
    """Reads requests and writes responses until one side ends the connection.

    Args:
        login: The authentication of the client, where the broker has users.
    """

    def __init__(
        self,
        node: BrokerNode,
        memory: RequestMemory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        advertised: tuple[str, int] | None,
        login: SaslSession | None = None,
    ) -> None:
        self._node = node
        self._memory = memory
        self._reader = reader
        self._writer = writer
        host, port = advertised or writer.get_extra_info("sockname")[:2]
        client_host = writer.get_extra_info("peername")[0]
        self._login = login
        self._encrypted = writer.get_extra_info("ssl_object") is not None
        self._peer = Peer(host, port, client_host, node.next_connection(), login)
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(_REQUESTS_MAX)
        self._produces: deque[tuple[int, asyncio.Task[list[BytesLike] | None]]] = deque()
        self._other_done = asyncio.Event()  # set while no request other than Produce is handled
        self._other_done.set()
        self._held: list[int] = []  # sizes of the requests with reserved memory
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the connection ends."""
        serving = asyncio.create_task(self._serve())
        self._reading = reading = asyncio.create_task(self._read())
        reading.add_done_callback(self._put_end)
        late = self._node.loop.call_later(self._node.settings.login_s, self._end_if_unauthenticated)
        try:
            await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
            if self._other_done.is_set():
                # What a client has sent before it disconnects is still appended.
                await asyncio.wait({serving}, timeout=self._node.settings.stalled_s)
        finally:
            late.cancel()
            for task in (reading, serving, *(task for _, task in self._produces)):
                task.cancel()
            if self._writer.transport.get_write_buffer_size():
                self._writer.transport.abort()  # closing would wait for a client that reads nothing
            else:
                _close(self._writer)
            results = await asyncio.gather(reading, serving, return_exceptions=True)
            self._node.connection_closed(self._peer.connection)
            for size in self._held:
                self._memory.release(size)
            for error in results:
                self._log_end(error)
            if self._encrypted:
                await end_stream(self._writer)

    def stop(self) -> None:
        """Read no more requests, and end when those that append records have their responses."""
        if self._reading is not None:
            self._reading.cancel()

    def _end_if_unauthenticated(self) -> None:
        """End a connection that has not authenticated: it counts towards the limit of connections."""
        if self._login is not None and self._login.user is None:
            self._log_end(UnauthenticatedError("it did not authenticate in time"))
            self.stop()

    def _log_end(self, error: object) -> None:
        """Log why a connection ended, unless the client disconnected: an OSError here is the socket's."""
        reason = next((name for kind, name in _REFUSALS.items() if isinstance(error, kind)), None)
        if reason is not None:
            self._node.counters.refusals[reason] += 1
            self._node.log_limiter.log_closed(
                f"closed the connection of {self._peer.client_host}: {error}"
            )
        elif isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)):
            self._node.counters.refusals["fault"] += 1
            self._node.log_limiter.log_closed(
                f"a request of {self._peer.client_host} failed", fault=error
            )

    # -- reading ------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read requests until the client disconnects, is idle for too long, or sends an invalid request."""
        while (frame := await self._next_frame()) is not None:
            await self._frames.put(frame)

    def _put_end(self, _: asyncio.Task[None]) -> None:
        """Say that no request follows, also where reading was stopped before it began."""
        with suppress(asyncio.QueueFull):  # then nobody waits for an element
            self._frames.put_nowait(None)

    async def _next_frame(self) -> bytes | None:
        """Return the next request; None at the end."""
        head = await self._next_size()
        if head is None:
            return None
        size = int.from_bytes(head, "big", signed=True)
        settings = self._node.settings
        size_max = min(settings.request_bytes_max, self._memory.request_bytes_max)
        if self._login is not None and self._login.user is None:
            size_max = min(size_max, OPENING_BYTES_MAX)
        if head.startswith(_TLS_HANDSHAKE) and not self._encrypted:
            raise MalformedError(
                "it begins with a TLS handshake, and this broker has no certificate"
            )
        if not _FRAME_BYTES_MIN <= size <= size_max:
            raise MalformedError(f"a request of {size} bytes; at most {size_max}")
        began_s = self._node.loop.time()
        try:
            return await self._frame(size)
        except TimeoutError:
            waited_s = self._node.loop.time() - began_s
            raise TimeoutError(
                f"a request of {size} bytes was not complete after {waited_s:.1f} s"
            ) from None

    async def _frame(self, size: int) -> bytes:
        """Return a request of so many bytes, once memory for it is reserved.

        Raises:
            TimeoutError: it was not complete in time.
        """
        async with asyncio.timeout(self._node.settings.stalled_s):
            first = await self._reader.readexactly(min(size, SMALL_BYTES_MAX))
        # Else a request that waits, such as a join, would make those after it hold memory.
        await self._other_done.wait()
        await self._memory.reserve(size)
        self._held.append(size)
        if len(first) == size:
            return first
        async with self._memory.receive_deadline():
            return first + await self._reader.readexactly(size - len(first))

    async def _next_size(self) -> bytes | None:
        while True:
            try:
                async with asyncio.timeout(self._node.settings.idle_s):
                    return await self._reader.readexactly(_SIZE_BYTES)
            except TimeoutError:
                if self._frames.empty() and not self._produces and self._other_done.is_set():
                    return None
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    # -- handling -----------------------------------------------------------------------------

    async def _serve(self) -> None:
        while (frame := await self._next_read()) is not None:
            size = len(frame)
            call = decode_call(frame, self._peer)
            del frame  # its records are copied out
            if call.api is messages.PRODUCE:
                task = asyncio.create_task(handle_request(self._node, call))
                self._produces.append((size, task))
                task.add_done_callback(self._write_produced)
                while len(self._produces) >= _PRODUCES_MAX:
                    await asyncio.wait({self._produces[0][1]})
            else:
                await self._handle_other(call, size)
            await self._drained()
        while self._produces:
            await asyncio.wait({self._produces[0][1]})

    async def _next_read(self) -> bytes | None:
        """Return the next request; None at the end."""
        if self._frames.empty() and self._reading is not None and self._reading.done():
            return None
        return await self._frames.get()

    async def _handle_other(self, call: Call, size: int) -> None:
        while self._produces:
            await asyncio.wait({self._produces[0][1]})
        self._other_done.clear()
        try:
            data = await handle_request(self._node, call)
            self._free(size)
            if data is not None:
                await self._write(data)
            failure = None if self._login is None else self._login.failure
            if call.held_bytes or failure:
                del data
                await self._drained(entirely=True)
            if failure:
                raise UnauthenticatedError(failure)
        finally:
            self._node.responses.release(call.held_bytes)
            self._other_done.set()

    async def _write(self, frame: list[BytesLike]) -> None:
        """Write a response in chunks, as the client reads it.

        asyncio copies what the socket does not accept at once; so the next chunk is written when the one
        before has been sent. TLS passes on all that it is given, and no buffer limit would count it.
        """
        chunk_bytes = _TLS_CHUNK_BYTES if self._encrypted else _CHUNK_BYTES
        for part in frame:
            view = memoryview(part)
            for at in range(0, len(view), chunk_bytes):
                self._writer.write(view[at : at + chunk_bytes])
                await self._drained()
                if self._encrypted:
                    await asyncio.sleep(0)

    def _write_produced(self, _: asyncio.Task[list[BytesLike] | None]) -> None:
        """Write the responses that are complete, up to the first that is not."""
        while self._produces and self._produces[0][1].done():
            size, task = self._produces.popleft()
            self._free(size)
            if task.cancelled():
                continue
            error = task.exception()
            if error is not None:
                self._log_end(error)
                self._writer.transport.abort()
            elif (data := task.result()) is not None:
                self._writer.writelines(data)

    def _free(self, size: int) -> None:
        self._held.remove(size)
        self._memory.release(size)

    async def _drained(self, *, entirely: bool = False) -> None:
        """Return when the client has read enough of what was written, or all of it."""
        transport = self._writer.transport
        if entirely and transport.get_write_buffer_size():
            transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(self._node.settings.stalled_s):
                await self._writer.drain()
        except TimeoutError:
            raise TimeoutError("the client does not read its responses") from None
        finally:
            if entirely:
                transport.set_write_buffer_limits()
