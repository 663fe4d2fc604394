"""The broker as a whole: opens the log, listens, serves, and ends in order.

:func:`serve` is what the command runs and what a program calls from its own event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from millstream.access.tls import Certificate
from millstream.broker.connection import READ_AHEAD_BYTES, TLS_ENDS_S, Connection, end_stream
from millstream.broker.maintenance import refresh_certificate, run_maintenance
from millstream.broker.memory import RequestMemory
from millstream.broker.metrics import read_broker_metrics
from millstream.broker.node import BrokerNode
from millstream.broker.security.authentication import Authenticator, SaslSession
from millstream.broker.security.users import UsersFile
from millstream.broker.settings import BrokerSettings
from millstream.errors import ConfigError, MillstreamError
from millstream.listen_address import bind, is_loopback, parse_listen_address
from millstream.log.writer import LogWriter
from millstream.metrics.exposition import ReadFigures
from millstream.ownership.client import take_ownership
from millstream.ownership.server import OwnerServer
from millstream.threads import Threads

P = ParamSpec("P")
R = TypeVar("R")

LISTEN = "127.0.0.1:9092"
_BACKLOG = 1024
_ENDS_S = 5.0  # for pending responses at the end


@dataclass(frozen=True)
class RunningBroker:
    """A running broker: its address, and ``failed``, which is set if it must end.

    ``writer`` is the log that it serves, for other uses in the same process. ``read_metrics`` adds its figures, from
    any thread.
    """

    host: str
    port: int
    failed: asyncio.Future[MillstreamError]
    writer: LogWriter
    read_metrics: ReadFigures
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
    settings: BrokerSettings | None = None,
) -> AsyncIterator[RunningBroker]:
    """Own a log folder and serve Kafka clients until the block ends.

    Args:
        folder: Created if it is missing.
        listen: ``HOST:PORT``; port 0 takes one that is free.
        advertise: The address that clients get from the broker; by default the one they connected
            to, which is right unless something between rewrites addresses.
        tls_cert: The certificate, as PEM: clients must connect with TLS.
        tls_key: Its private key, if that is not in the same file.
        users: A file of users, made by ``millstream user add``: clients must authenticate, with SASL
            PLAIN. It is read again when it changes.
        insecure: Allow an address that other machines reach without TLS, or without users.

    Raises:
        ConfigError: an address is invalid, is taken, or could be reached by others without TLS and
            users; certificate, key or users cannot be used.
        FolderOwnedError: another process owns this folder and does not hand it over: another broker,
            or one that is in the middle of a transaction.
        CorruptionError: the folder cannot be opened; see ``LogWriter``.
    Guarantees: when the block ends, running requests have their responses, everything that was
        acknowledged is synced, and the folder is free.
    """
    host, port = parse_listen_address(listen, LISTEN)
    advertised = None if advertise is None else parse_listen_address(advertise, LISTEN)
    security = _open_security(tls_cert, tls_key, users)
    if not insecure and not is_loopback(host):
        security.check_public_listener(listen)
    with closing(security), bind(host, port, "broker") as listener:
        server = OwnerServer(Path(folder))
        writer = await _in_thread(take_ownership, Path(folder), server)
        try:
            async with _serving(
                writer, listener, advertised, security, settings or BrokerSettings()
            ) as (failed, read_metrics):
                server.open(writer)
                name, number = listener.getsockname()[:2]
                encrypted = security.certificate is not None
                yield RunningBroker(name, number, failed, writer, read_metrics, encrypted)
        finally:
            await _in_thread(server.close)
            await _in_thread(writer.close)


async def _in_thread(call: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
    """Run a call that may block in a thread, while connections are served; return its result.

    Not with ``asyncio.to_thread``, whose threads have ended when the program's main thread has.
    """
    with Threads(1, "millstream-broker-server") as thread:
        return await asyncio.wrap_future(thread.submit(call, *args, **named))


@dataclass(frozen=True)
class _Security:
    """The certificate and the users of a broker, as far as it has them."""

    certificate: Certificate | None
    authenticator: Authenticator | None

    def check_public_listener(self, listen: str) -> None:
        if self.certificate is not None and self.authenticator is not None:
            return
        if self.authenticator is None:
            why = "every client that reaches it reads and writes everything"
            missing = "--users" if self.certificate else "--tls-cert, --tls-key and --users"
        else:
            why, missing = "passwords would be sent in the clear", "--tls-cert and --tls-key"
        raise ConfigError(
            f"{listen} can be reached from other machines, and {why}. Give {missing}, listen on "
            "127.0.0.1, or use --insecure (insecure=True)"
        )

    def tls_options(self, login_s: float) -> dict[str, Any]:
        """Return the options of asyncio's server for the certificate; none without one."""
        if self.certificate is None:
            return {}
        return {
            "ssl": self.certificate.context,
            "ssl_handshake_timeout": login_s,
            "ssl_shutdown_timeout": TLS_ENDS_S,
        }

    def close(self) -> None:
        if self.authenticator is not None:
            self.authenticator.close()


def _open_security(
    tls_cert: Path | str | None, tls_key: Path | str | None, users: Path | str | None
) -> _Security:
    certificate = authenticator = None
    if tls_cert is not None:
        certificate = Certificate(Path(tls_cert), None if tls_key is None else Path(tls_key))
    elif tls_key is not None:
        raise ConfigError(f"--tls-key {tls_key} has no certificate; give --tls-cert, too")
    if users is not None:
        file = UsersFile(users)
        if not file.read():
            raise ConfigError(
                f"{users} has no user, so no client could authenticate. Add one, with: "
                f"millstream user add NAME --users {users}"
            )
        authenticator = Authenticator(file)
    return _Security(certificate, authenticator)


@asynccontextmanager
async def _serving(
    writer: LogWriter,
    listener: socket.socket,
    advertised: tuple[str, int] | None,
    security: _Security,
    settings: BrokerSettings,
) -> AsyncIterator[tuple[asyncio.Future[MillstreamError], ReadFigures]]:
    """Serve connections until the block ends; yield what is set if it must end, and what adds figures."""
    failed: asyncio.Future[MillstreamError] = asyncio.get_running_loop().create_future()

    def fail(error: MillstreamError) -> None:
        if not failed.done():
            failed.set_result(error)

    node = BrokerNode(writer, settings, on_failure=fail)
    memory = _request_memory(settings)
    connections: dict[asyncio.Task[None], Connection] = {}
    refused: set[asyncio.Task[None]] = set()
    ending = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, stream: asyncio.StreamWriter) -> None:
        if ending.is_set():  # it was accepted just before the listener was closed
            stream.transport.abort()
            return
        if len(connections) >= settings.connections_max:
            node.connection_refused(len(connections))
            await _refuse(stream, refused)
            return
        task = _current_task()
        client_host = stream.get_extra_info("peername")[0]
        login = SaslSession(security.authenticator, client_host) if security.authenticator else None
        connection = Connection(node, memory, reader, stream, advertised=advertised, login=login)
        connections[task] = connection
        node.counters.count_accepted(open_now=len(connections))
        try:
            await connection.run()
        except asyncio.CancelledError:
            pass  # the broker ends; asyncio would log the cancelled task as an error
        finally:
            del connections[task]
            node.counters.connections = len(connections)

    node.start()
    await node.resume()
    maintenance = [asyncio.create_task(run_maintenance(node))]
    if security.certificate is not None:
        maintenance.append(asyncio.create_task(refresh_certificate(node, security.certificate)))
    try:
        server = await asyncio.start_server(
            connected,
            sock=listener,
            limit=READ_AHEAD_BYTES,
            backlog=_BACKLOG,
            **security.tls_options(settings.login_s),
        )
        try:
            yield failed, partial(read_broker_metrics, node, memory)
        finally:
            ending.set()
            server.close()
            await _drain(connections, refused)
            await node.drain()
    finally:
        for task in maintenance:
            task.cancel()
        await asyncio.gather(*maintenance, return_exceptions=True)
        await _in_thread(node.close)


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None, "a connection is served by a task"
    return task


async def _refuse(stream: asyncio.StreamWriter, refused: set[asyncio.Task[None]]) -> None:
    """Close a connection; meanwhile its task is one of those that the end of the broker waits for."""
    task = _current_task()
    refused.add(task)
    try:
        await end_stream(stream)
    finally:
        refused.remove(task)


def _request_memory(settings: BrokerSettings) -> RequestMemory:
    return RequestMemory(
        settings.requests_bytes_max,
        whole_s=settings.stalled_s,
        contended_s=settings.contended_s,
    )


async def _drain(
    connections: Mapping[asyncio.Task[None], Connection], refused: Iterable[asyncio.Task[None]]
) -> None:
    """Let connections finish their appends, and close them; those that were refused are closed, too."""
    for connection in connections.values():
        connection.stop()
    tasks = {*connections, *refused}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_ENDS_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
