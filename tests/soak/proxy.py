"""The proxy between the clients and the broker: it forwards bytes until it is to lose them.

Connections are reset, or the broker's responses are lost: the broker has handled the request, and the client
does not know.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # closing sends a reset, whatever is still on its way


class _Link:
    """One connection of a client, and the one to the broker behind it."""

    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.drops_responses = False

    def reset(self) -> None:
        for writer in self.writers:
            handle = writer.get_extra_info("socket")
            if handle is not None and handle.fileno() >= 0:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class Proxy:
    """Runs in a thread. Clients connect to ``address``; the broker listens at ``target_port``."""

    def __init__(self, target_port: int, chance: random.Random) -> None:
        self._target_port, self._chance = target_port, chance
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self.address = ""
        self.connections = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def reset(self, part: float) -> None:
        """Reset a part of the connections."""
        self._tell(lambda link: link.reset(), part)

    def mute(self, part: float) -> None:
        """Lose all later responses of the broker, on a part of the connections."""

        def mute(link: _Link) -> None:
            link.drops_responses = True

        self._tell(mute, part)

    def reset_mute(self) -> None:
        """Reset the connections whose responses were lost: later bytes would make no sense."""
        self._tell(lambda link: link.reset() if link.drops_responses else None, 1.0)

    def _tell(self, do: Callable[[_Link], None], part: float) -> None:
        def tell() -> None:
            for link in list(self._links):
                if self._chance.random() < part:
                    do(link)

        self._loop.call_soon_threadsafe(tell)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_PIECE_BYTES)
        )
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._up.set()
        self._loop.run_forever()
        server.close()
        for link in list(self._links):
            link.reset()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:  # there is no broker at the moment
            _Link([writer]).reset()
            return
        link = _Link([writer, back])
        self._links.add(link)
        try:
            pumps = {
                asyncio.create_task(self._pump(link, reader, back, responses=False)),
                asyncio.create_task(self._pump(link, there, writer, responses=True)),
            }
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._links.discard(link)
            link.reset()

    async def _pump(
        self,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        responses: bool,
    ) -> None:
        try:
            while data := await reader.read(_PIECE_BYTES):
                if not (responses and link.drops_responses):
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
