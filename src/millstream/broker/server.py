"""The broker as a whole: opens the log, listens, serves, and ends in order.

:func:`serve` is what the command runs and what a program calls from its own event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from millstream.broker.authentication import Authenticator, Login
from millstream.broker.connection import READ_AHEAD_BYTES, Connection
from millstream.broker.encryption import Certificate
from millstream.broker.housekeeping import keep_certificate, keep_house
from millstream.broker.memory import RequestMemory
from millstream.broker.node import Node
from millstream.broker.settings import Settings
from millstream.broker.users import UsersFile
from millstream.errors import ConfigError, MillstreamError
from millstream.joining.access import claim
from millstream.joining.gate import Gate
from millstream.listening import address_of, bound, is_loopback
from millstream.log.writer import LogWriter
from millstream.threads import Threads

P = ParamSpec("P")
R = TypeVar("R")

LISTEN = "127.0.0.1:9092"
_BACKLOG = 1024
_ENDS_S = 5.0  # for the answers that are still to be given at the end
_TLS_ENDS_S = 1.0  # for a client to agree that a connection is at its end


@dataclass(frozen=True)
class Serving:
    """A broker that is up: where, and what makes it end by itself.

    ``writer`` is the log that it serves, for what the broker's own process does with it besides.
    """

    host: str
    port: int
    failed: asyncio.Future[MillstreamError]
    writer: LogWriter
    encrypted: bool = False

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
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
    users: Path | str | None = None,
    insecure: bool = False,
    settings: Settings | None = None,
) -> AsyncIterator[Serving]:
    """Own a log folder and answer Kafka's clients until the block ends.

    Args:
        folder: Made if it is missing.
        listen: ``HOST:PORT``; port 0 takes one that is free.
        advertise: The address that clients are told to go on with; the one they came to if not
            given, which is right unless something between rewrites addresses.
        tls_cert: The certificate, as PEM: clients come by TLS, and in no other way.
        tls_key: Its private key, if that is not in the same file.
        users: A file of users, made by ``millstream user add``: clients say who they are, by SASL
            PLAIN, before anything else. It is read again when it changes.
        insecure: Allow an address that other machines reach without TLS, or without users.

    Raises:
        ConfigError: an address is none, is taken, or could be reached by others without TLS and users;
            certificate, key or users cannot be used.
        FolderOwnedError: another process owns this folder and does not give it up: another broker,
            or one that is in the middle of a transaction.
        CorruptionError: the folder cannot be opened; see ``LogWriter``.
    Guarantees: when the block ends, requests at work are answered, everything that was acknowledged
        is synced, and the folder is free.
    """
    host, port = address_of(listen, LISTEN)
    told = None if advertise is None else address_of(advertise, LISTEN)
    door = _door(tls_cert, tls_key, users)
    if not insecure and not is_loopback(host):
        door.check_fit_for_others(listen)
    with closing(door), bound(host, port, "broker") as listener:
        gate = Gate(Path(folder))
        writer = await _in_thread(claim, Path(folder), gate)
        try:
            async with _serving(writer, listener, told, door, settings or Settings()) as failed:
                gate.open(writer)
                name, number = listener.getsockname()[:2]
                yield Serving(name, number, failed, writer, encrypted=door.certificate is not None)
        finally:
            await _in_thread(gate.close)
            await _in_thread(writer.close)


async def _in_thread(call: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
    """Return what a call returns that may wait, while connections are served.

    Not by ``asyncio.to_thread``, whose threads are gone when the program's main thread has ended.
    """
    with Threads(1, "millstream-broker-serving") as thread:
        return await asyncio.wrap_future(thread.submit(call, *args, **named))


@dataclass(frozen=True)
class _Door:
    """What clients have to pass before they are answered."""

    certificate: Certificate | None
    authenticator: Authenticator | None

    def check_fit_for_others(self, listen: str) -> None:
        if self.certificate is not None and self.authenticator is not None:
            return
        if self.authenticator is None:
            why = "whoever reaches it reads and writes everything"
            missing = "--users" if self.certificate else "--tls-cert, --tls-key and --users"
        else:
            why, missing = "passwords would pass for all to read", "--tls-cert and --tls-key"
        raise ConfigError(
            f"{listen} can be reached from other machines, and {why}. Give {missing}, listen on "
            "127.0.0.1, or say --insecure (insecure=True)"
        )

    def close(self) -> None:
        if self.authenticator is not None:
            self.authenticator.close()


def _door(
    tls_cert: Path | str | None, tls_key: Path | str | None, users: Path | str | None
) -> _Door:
    certificate = authenticator = None
    if tls_cert is not None:
        certificate = Certificate(Path(tls_cert), None if tls_key is None else Path(tls_key))
    elif tls_key is not None:
        raise ConfigError(f"--tls-key {tls_key} has no certificate; give --tls-cert, too")
    if users is not None:
        file = UsersFile(users)
        if not file.read():
            raise ConfigError(
                f"{users} has no user, so nobody could come in. Add one, with: "
                f"millstream user add NAME --users {users}"
            )
        authenticator = Authenticator(file)
    return _Door(certificate, authenticator)


@asynccontextmanager
async def _serving(
    writer: LogWriter,
    listener: socket.socket,
    advertised: tuple[str, int] | None,
    door: _Door,
    settings: Settings,
) -> AsyncIterator[asyncio.Future[MillstreamError]]:
    failed: asyncio.Future[MillstreamError] = asyncio.get_running_loop().create_future()

    def fail(error: MillstreamError) -> None:
        if not failed.done():
            failed.set_result(error)

    node = Node(writer, settings, on_failure=fail)
    memory = _request_memory(settings)
    connections: dict[asyncio.Task[None], Connection] = {}
    ending = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, stream: asyncio.StreamWriter) -> None:
        if ending.is_set():  # it was accepted just before the door was shut
            stream.close()
            return
        if len(connections) >= settings.connections_max:
            node.closings.tell(f"closed a connection: {len(connections)} are open, the limit")
            stream.close()
            return
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        client_host = stream.get_extra_info("peername")[0]
        login = Login(door.authenticator, client_host) if door.authenticator else None
        connection = Connection(node, memory, reader, stream, advertised=advertised, login=login)
        connections[task] = connection
        try:
            await connection.run()
        except asyncio.CancelledError:
            pass  # the broker ends; asyncio would complain of a task of its own that is cancelled
        finally:
            del connections[task]

    node.start()
    await node.begin()
    keeping = [asyncio.create_task(keep_house(node))]
    if door.certificate is not None:
        keeping.append(asyncio.create_task(keep_certificate(node, door.certificate)))
    try:
        tls: dict[str, Any] = {}
        if door.certificate is not None:
            tls = {
                "ssl": door.certificate.context,
                "ssl_handshake_timeout": settings.login_s,
                "ssl_shutdown_timeout": _TLS_ENDS_S,
            }
        server = await asyncio.start_server(
            connected, sock=listener, limit=READ_AHEAD_BYTES, backlog=_BACKLOG, **tls
        )
        try:
            yield failed
        finally:
            ending.set()
            server.close()
            await _end(connections)
            await node.end()
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await _in_thread(node.close)


def _request_memory(settings: Settings) -> RequestMemory:
    return RequestMemory(
        settings.requests_bytes_max,
        whole_s=settings.stalled_s,
        contended_s=settings.contended_s,
    )


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
