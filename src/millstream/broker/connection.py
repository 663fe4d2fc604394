"""One connection: requests in, answers out, in the order of the requests.

One task reads, another answers. Requests are answered one after the other, but for Produce requests:
those that follow each other are all taken up, so that one sync serves them. A client that sends faster
than it is answered, or does not take its answers, is no longer read from: TCP slows it down, and nobody
else. What all connections hold together is bounded by ``memory``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from millstream.broker import messages
from millstream.broker.authentication import OPENING_BYTES_MAX, Login
from millstream.broker.dispatch import (
    Peer,
    UnauthenticatedError,
    UnknownRequestError,
    answer,
    read_call,
)
from millstream.broker.memory import SMALL_BYTES_MAX, RequestMemory
from millstream.broker.node import Call, Node
from millstream.broker.wire import Buffer, MalformedError

READ_AHEAD_BYTES = 64 * 1024  # of a connection, before there is room for its next request
_SIZE_BYTES = 4
_FRAME_BYTES_MIN = 8  # key, version, correlation id
_REQUESTS_MAX = 64  # read and not yet taken up, of one connection
_PRODUCES_MAX = 64  # taken up and not yet answered
_PIECE_BYTES = 1024 * 1024  # of an answer, written at a time
_TLS_PIECE_BYTES = 256 * 1024  # ... and encrypted: others are served in between
_TLS_HANDSHAKE = b"\x16\x03"  # how the bytes of a client that wants TLS begin


class Connection:
    """Reads requests and writes answers until one side has had enough.

    Args:
        login: What the client has to pass first, where the broker has users.
    """

    def __init__(
        self,
        node: Node,
        memory: RequestMemory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        advertised: tuple[str, int] | None,
        login: Login | None = None,
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
        self._produces: deque[tuple[int, asyncio.Task[list[Buffer] | None]]] = deque()
        self._other_answered = asyncio.Event()  # every request but those of Produce
        self._other_answered.set()
        self._held: list[int] = []  # sizes of the requests that have room
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the connection ends."""
        serving = asyncio.create_task(self._serve())
        self._reading = reading = asyncio.create_task(self._read())
        late = self._node.loop.call_later(self._node.settings.login_s, self._end_if_unknown)
        try:
            await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
            if self._other_answered.is_set():
                # What was sent before the client went is still appended.
                await asyncio.wait({serving}, timeout=self._node.settings.stalled_s)
        finally:
            late.cancel()
            for task in (reading, serving, *(task for _, task in self._produces)):
                task.cancel()
            if self._writer.transport.get_write_buffer_size():
                self._writer.transport.abort()  # closing would wait for a client that takes nothing
            else:
                self._writer.close()
            results = await asyncio.gather(reading, serving, return_exceptions=True)
            self._node.connection_closed(self._peer.connection)
            for size in self._held:
                self._memory.release(size)
            for error in results:
                self._tell(error)
            if self._encrypted:  # ... is closed when the other side has said so, too, or is late
                with suppress(OSError):
                    await self._writer.wait_closed()

    def stop(self) -> None:
        """Read no more requests, and end when those that append something are answered."""
        if self._reading is not None:
            self._reading.cancel()

    def _end_if_unknown(self) -> None:
        """End a connection that has not said who it is: it holds a place of one that would."""
        if self._login is not None and self._login.user is None:
            self._tell(UnauthenticatedError("it did not say in time who it is"))
            self.stop()

    def _tell(self, error: object) -> None:
        """Say why a connection ended, if not because the client went."""
        told = (MalformedError, UnknownRequestError, UnauthenticatedError, TimeoutError)
        if isinstance(error, told):
            self._node.closings.tell(f"closed the connection of {self._peer.client_host}: {error}")
        elif isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)):
            self._node.closings.tell(f"a request of {self._peer.client_host} failed", fault=error)

    # -- reading ------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read requests until the client closes, is silent for too long, or makes no sense."""
        try:
            while (frame := await self._next_frame()) is not None:
                await self._frames.put(frame)
        finally:
            with suppress(asyncio.QueueFull):  # then nobody waits for it to become fuller
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
            raise MalformedError("it speaks TLS, and this broker has no certificate to do so")
        if not _FRAME_BYTES_MIN <= size <= size_max:
            raise MalformedError(f"a request of {size} bytes; at most {size_max}")
        began_s = self._node.loop.time()
        try:
            return await self._frame(size)
        except TimeoutError:
            waited_s = self._node.loop.time() - began_s
            raise TimeoutError(
                f"a request of {size} bytes did not come in whole in {waited_s:.1f} s"
            ) from None

    async def _frame(self, size: int) -> bytes:
        """Return a request of so many bytes, when there is room for it.

        Raises:
            TimeoutError: it did not come in whole in time.
        """
        async with asyncio.timeout(self._node.settings.stalled_s):
            first = await self._reader.readexactly(min(size, SMALL_BYTES_MAX))
        # What is answered later than what follows it, such as a join, would hold the room of all that.
        await self._other_answered.wait()
        await self._memory.reserve(size)
        self._held.append(size)
        if len(first) == size:
            return first
        async with self._memory.coming_in():
            return first + await self._reader.readexactly(size - len(first))

    async def _next_size(self) -> bytes | None:
        while True:
            try:
                async with asyncio.timeout(self._node.settings.idle_s):
                    return await self._reader.readexactly(_SIZE_BYTES)
            except TimeoutError:
                if self._frames.empty() and not self._produces and self._other_answered.is_set():
                    return None
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    # -- answering ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        while (frame := await self._next_read()) is not None:
            size = len(frame)
            call = read_call(frame, self._peer)
            del frame  # its records are copied out
            if call.api is messages.PRODUCE:
                task = asyncio.create_task(answer(self._node, call))
                self._produces.append((size, task))
                task.add_done_callback(self._write_produced)
                while len(self._produces) >= _PRODUCES_MAX:
                    await asyncio.wait({self._produces[0][1]})
            else:
                await self._answer_other(call, size)
            await self._taken()
        while self._produces:
            await asyncio.wait({self._produces[0][1]})

    async def _next_read(self) -> bytes | None:
        """Return the next request that was read; None when there will be none."""
        if self._frames.empty() and self._reading is not None and self._reading.done():
            return None
        return await self._frames.get()

    async def _answer_other(self, call: Call, size: int) -> None:
        while self._produces:
            await asyncio.wait({self._produces[0][1]})
        self._other_answered.clear()
        try:
            data = await answer(self._node, call)
            self._free(size)
            if data is not None:
                await self._write(data)
            failure = None if self._login is None else self._login.failure
            if call.held_bytes or failure:
                del data
                await self._taken(entirely=True)
            if failure:
                raise UnauthenticatedError(failure)
        finally:
            self._node.responses.release(call.held_bytes)
            self._other_answered.set()

    async def _write(self, frame: list[Buffer]) -> None:
        """Write an answer, piece by piece, as the client takes it.

        What the socket does not take at once, asyncio copies; so the next piece comes when the one before
        has gone. And TLS passes on all it has been given, so that what lies behind it would be counted by
        nobody.
        """
        piece_bytes = _TLS_PIECE_BYTES if self._encrypted else _PIECE_BYTES
        for part in frame:
            view = memoryview(part)
            for at in range(0, len(view), piece_bytes):
                self._writer.write(view[at : at + piece_bytes])
                await self._taken()
                if self._encrypted:
                    await asyncio.sleep(0)

    def _write_produced(self, _: asyncio.Task[list[Buffer] | None]) -> None:
        """Write the answers that are there, up to the first that is not."""
        while self._produces and self._produces[0][1].done():
            size, task = self._produces.popleft()
            self._free(size)
            if task.cancelled():
                continue
            error = task.exception()
            if error is not None:
                self._tell(error)
                self._writer.transport.abort()
            elif (data := task.result()) is not None:
                self._writer.writelines(data)

    def _free(self, size: int) -> None:
        self._held.remove(size)
        self._memory.release(size)

    async def _taken(self, *, entirely: bool = False) -> None:
        """Return when the client has taken enough of what was written, or all of it."""
        transport = self._writer.transport
        if entirely and transport.get_write_buffer_size():
            transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(self._node.settings.stalled_s):
                await self._writer.drain()
        except TimeoutError:
            raise TimeoutError("the client does not take its answers") from None
        finally:
            if entirely:
                transport.set_write_buffer_limits()
