"""The broker as a whole: opens the log, listens, serves, and ends in order.

:func:`serve` is what the command runs and what a program calls from its own event loop.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
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
from millstream.log.writer import LogWriter

LISTEN = "127.0.0.1:9092"
_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\s\[\]]+)):(\d{1,5})")
_BACKLOG = 1024
_ENDS_S = 5.0  # for the answers that are still to be given at the end
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """A broker that is up: where, and what makes it end by itself."""

    host: str
    port: int
    failed: asyncio.Future[MillstreamError]

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
    host, port = address_of(listen)
    told = None if advertise is None else address_of(advertise)
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{listen} can be reached from other machines, and there is no authentication: whoever "
            "reaches it reads and writes everything. Listen on 127.0.0.1, or say --insecure "
            "(insecure=True)"
        )
    with bound(host, port) as listener:
        writer = await asyncio.to_thread(LogWriter, folder)
        try:
            async with _serving(writer, listener, told, settings or Settings()) as failed:
                name, number = listener.getsockname()[:2]
                yield Serving(name, number, failed)
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


def address_of(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ConfigError: the text is no such address.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(
            f"the address is {text!r}; give HOST:PORT, such as {LISTEN} or [::1]:9092 (port 0 "
            "takes one that is free)"
        )
    return found[1] or found[2], int(found[3])


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        ConfigError: it is no address of this machine, or is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host!r} is no address of this machine ({error.strerror})") from error
    try:
        # One that ended a moment ago does not hold the port; one that listens does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken by another program, perhaps another broker; end "
                "it, or listen on another port (port 0 takes one that is free)"
            ) from error
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another address"
        ) from error
    return listener
