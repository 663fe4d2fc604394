"""``millstream broker``: serve a log folder to Kafka's clients."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import click

from millstream.broker.allocator import retain_freed_memory
from millstream.broker.server import LISTEN, RunningBroker, serve
from millstream.broker.settings import BrokerSettings
from millstream.cli.metrics_option import metrics_option, serving_metrics
from millstream.cli.ready_file import ready_file_option, write_ready_file
from millstream.cli.tables import folder_argument
from millstream.client.log_metrics import read_log_metrics
from millstream.durations import to_us
from millstream.log.takeover import SPARE_FILES
from millstream.metrics.exposition import Exposition, ReadFigures


@click.command()
@folder_argument
@click.option(
    "--listen",
    default=LISTEN,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen. Port 0 takes a free one.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="The address that clients get, where a proxy or NAT rewrites addresses.",
)
@click.option(
    "--tls-cert",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A certificate (PEM), followed by its chain: clients must use TLS.",
)
@click.option(
    "--tls-key",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The certificate's private key (PEM, not encrypted), if it is in a file of its own.",
)
@click.option(
    "--users",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Clients authenticate by name and password (SASL PLAIN); `millstream user add` writes the file.",
)
@metrics_option
@ready_file_option
@click.option(
    "--broker-id",
    type=click.IntRange(min=0),
    default=BrokerSettings().broker_id,
    show_default=True,
    help="The id of this broker for clients.",
)
@click.option(
    "--auto-create",
    is_flag=True,
    help="Create topics that clients ask for and that do not exist.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=BrokerSettings().default_partitions,
    show_default=True,
    help="For topics that are created without a number of partitions.",
)
@click.option(
    "--offsets-retention",
    metavar="DURATION",
    help="Delete the offsets of a group that has no members and has not committed for so long, such as "
    '"7 days"; kept forever by default.',
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow an address that other machines reach without TLS, or without users.",
)
def broker(
    folder: Path,
    *,
    listen: str,
    advertise: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    users: Path | None,
    metrics: str | None,
    ready_file: Path | None,
    broker_id: int,
    auto_create: bool,
    partitions: int,
    offsets_retention: str | None,
    insecure: bool,
) -> None:
    """Serve the log in the folder DIR to Kafka's clients, until Ctrl-C or SIGTERM.

    DIR is by default $MILLSTREAM_LOG, or ./data. The broker owns the folder while it runs, and takes it
    over from a program that does. Other programs on this machine read the folder as before, and write
    through the broker. If other machines are to reach it, it needs a certificate and users.

    \b
    Examples:
      millstream broker ./data
      millstream broker ./data --listen 127.0.0.1:0 --ready-file broker.addr
      millstream broker ./data --auto-create --partitions 4
      millstream user add alice --users users.txt
      millstream broker ./data --listen 0.0.0.0:9092 --advertise log.example.com:9092 --tls-cert cert.pem --tls-key key.pem --users users.txt
    """
    retention_ms = None
    if offsets_retention is not None:
        retention_ms = to_us(offsets_retention, what="--offsets-retention") // 1000
    settings = BrokerSettings(
        broker_id=broker_id,
        auto_create=auto_create,
        default_partitions=partitions,
        offsets_retention_ms=retention_ms,
        connections_max=min(
            BrokerSettings().connections_max, max(_files_max() - SPARE_FILES, 2) // 2
        ),
    )
    retain_freed_memory(settings.response_bytes_max)
    asyncio.run(
        _run(
            serve(
                folder,
                listen=listen,
                advertise=advertise,
                tls_cert=tls_cert,
                tls_key=tls_key,
                users=users,
                insecure=insecure,
                settings=settings,
            ),
            folder,
            metrics,
            ready_file,
        )
    )


def _files_max() -> int:
    """Raise the limit of open files as far as allowed, and return it.

    Each connection is one, and each segment that is open for writing.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where there is another limit below this one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        files = most
    return sys.maxsize if files == resource.RLIM_INFINITY else files


async def _run(
    broker: AbstractAsyncContextManager[RunningBroker],
    folder: Path,
    metrics: str | None,
    ready_file: Path | None,
) -> None:
    """Serve until a signal arrives, or the disk fails."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with broker as serving:
        with (
            serving_metrics(metrics, lambda: _exposition(serving, folder)),
            _announce_ready(serving, folder, ready_file),
        ):
            serving.failed.add_done_callback(lambda _: ended.set())
            await ended.wait()
        if serving.failed.done():
            raise serving.failed.result()


def _exposition(serving: RunningBroker, folder: Path) -> Exposition:
    def why_not_ready() -> str | None:
        failure = serving.writer.failure
        return None if failure is None else str(failure)

    read_log: ReadFigures = partial(read_log_metrics, folder)
    sources = {"broker": serving.read_metrics, "log": read_log}
    return Exposition(sources, [why_not_ready])


@contextmanager
def _announce_ready(
    serving: RunningBroker, folder: Path, ready_file: Path | None
) -> Iterator[None]:
    """Write the ready file while clients can connect."""
    tls = " by TLS" if serving.encrypted else ""
    click.echo(f"Kafka clients reach {folder} at {serving.address}{tls} (Ctrl-C ends it)")
    with write_ready_file(ready_file, serving.address):
        yield
