"""The broker as a whole: opens the log, listens, serves, and ends in order.

:func:`serve` is what the command runs and what a program calls from its own event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from millstream.broker.connection import READ_AHEAD_BYTES, Connection
from millstream.broker.housekeeping import keep_house
from millstream.broker.memory import RequestMemory
from millstream.broker.node import Node
from millstream.broker.settings import Settings
from millstream.errors import ConfigError, MillstreamError
from millstream.listening import address_of, bound, is_loopback
from millstream.log.writer import LogWriter

LISTEN = "127.0.0.1:9092"
_BACKLOG = 1024
_ENDS_S = 5.0  # for the answers that are still to be given at the end
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """A broker that is up: where, and what makes it end by itself.

    ``writer`` is the log that it serves, for what the broker's own process does with it besides.
    """

    host: str
    port: int
    failed: asyncio.Future[MillstreamError]
    writer: LogWriter

    @property
    def address(self) -> str:
        """``HOST:PORT``, as clients want it for ``bootstrap.servers``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@asynccontextmanager
async def serve(
    folder: Path | str,
    *,
    listen: str = LISTEN,
    advertise: str | None = None,
    insecure: bool = False,
    settings: Settings | None = None,
) -> AsyncIterator[Serving]:
    """Own a log folder and answer Kafka's clients until the block ends.

    Args:
        folder: Made if it is missing.
        listen: ``HOST:PORT``; port 0 takes one that is free.
        advertise: The address that clients are told to go on with; the one they came to if not
            given, which is right unless something between rewrites addresses.
        insecure: Allow an address that other machines reach: there is no authentication.

    Raises:
        ConfigError: an address is none, is taken, or could be reached by others.
        FolderOwnedError: another process writes to this folder.
        CorruptionError: the folder cannot be opened; see ``LogWriter``.
    Guarantees: when the block ends, requests at work are answered, everything that was acknowledged
        is synced, and the folder is free.
    """
    host, port = address_of(listen, LISTEN)
    told = None if advertise is None else address_of(advertise, LISTEN)
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{listen} can be reached from other machines, and there is no authentication: whoever "
            "reaches it reads and writes everything. Listen on 127.0.0.1, or say --insecure "
            "(insecure=True)"
        )
    with bound(host, port, "broker") as listener:
        writer = await asyncio.to_thread(LogWriter, folder)
        try:
            async with _serving(writer, listener, told, settings or Settings()) as failed:
                name, number = listener.getsockname()[:2]
                yield Serving(name, number, failed, writer)
        finally:
            await asyncio.to_thread(writer.close)


@asynccontextmanager
async def _serving(
    writer: LogWriter,
    listener: socket.socket,
    advertised: tuple[str, int] | None,
    settings: Settings,
) -> AsyncIterator[asyncio.Future[MillstreamError]]:
    failed: asyncio.Future[MillstreamError] = asyncio.get_running_loop().create_future()

    def fail(error: MillstreamError) -> None:
        if not failed.done():
            failed.set_result(error)

    node = Node(writer, settings, on_failure=fail)
    memory = RequestMemory(settings.requests_bytes_max)
    connections: dict[asyncio.Task[None], Connection] = {}

    async def connected(reader: asyncio.StreamReader, stream: asyncio.StreamWriter) -> None:
        if len(connections) >= settings.connections_max:
            _log.warning("closed a connection: %d are open, the limit", len(connections))
            stream.close()
            return
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        connection = Connection(node, memory, reader, stream, advertised=advertised)
        connections[task] = connection
        try:
            await connection.run()
        except asyncio.CancelledError:
            pass  # the broker ends; asyncio would complain of a task of its own that is cancelled
        finally:
            del connections[task]

    node.start()
    keeping = asyncio.create_task(keep_house(node))
    try:
        server = await asyncio.start_server(
            connected, sock=listener, limit=READ_AHEAD_BYTES, backlog=_BACKLOG
        )
        try:
            yield failed
        finally:
            server.close()
            await _end(connections)
            node.groups.close()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(node.close)


async def _end(connections: Mapping[asyncio.Task[None], Connection]) -> None:
    """Let connections finish what they append, and close them."""
    for connection in connections.values():
        connection.stop()
    tasks = set(connections)
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_ENDS_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
