"""``millstream edge``: events in over HTTP and UDP, and out as server-sent events."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import click

from millstream.access.tls import certificate_of
from millstream.access.tokens import tokens_of
from millstream.cli.ready_file import ready_file_option, write_ready_file
from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.tables import address_argument
from millstream.cli.token_option import door_options
from millstream.client.address import shown
from millstream.durations import to_us
from millstream.edge.http.request_body import RequestLimits
from millstream.edge.server import HTTP_DEFAULT, EdgeServer, EdgeSettings, serve


@click.command()
@address_argument
@click.option(
    "--http",
    default=HTTP_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve HTTP. Port 0 takes a free one; none: not at all.",
)
@click.option("--statsd", metavar="HOST:PORT", help="Where to receive StatsD datagrams.")
@click.option(
    "--statsd-topic", metavar="NAME", help="The topic of metrics, with their name as key."
)
@click.option(
    "--statsd-malformed",
    metavar="NAME",
    help="The topic of lines that are not a metric, with the reason in a header; by default they are only counted.",
)
@click.option("--read-only", is_flag=True, help="Append nothing, and do not own the folder.")
@door_options("HTTP requests must carry a token (Authorization: Bearer …).")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Pages of this origin may send requests, such as https://example.com; may be repeated.",
)
@click.option(
    "--event-bytes",
    type=click.IntRange(min=1),
    default=RequestLimits().event_bytes_max,
    show_default=True,
    help="How large an event may be.",
)
@click.option(
    "--body-bytes",
    type=click.IntRange(min=1),
    default=RequestLimits().body_bytes_max,
    show_default=True,
    help="How large a request may be.",
)
@click.option(
    "--in-flight-bytes",
    type=click.IntRange(min=1),
    default=EdgeSettings().in_flight_bytes,
    show_default=True,
    help="About how much memory all requests together may take; beyond it the response is 429.",
)
@click.option(
    "--streams",
    type=click.IntRange(min=0),
    default=EdgeSettings().subscribers_max,
    show_default=True,
    help="How many streams of events may be open.",
)
@click.option(
    "--heartbeat",
    default="15 seconds",
    show_default=True,
    help="After how long without a record a stream sends a heartbeat.",
)
@ready_file_option
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow addresses that other machines reach: without a token, and for datagrams.",
)
def edge(
    address: Path | str,
    *,
    http: str,
    statsd: str | None,
    statsd_topic: str | None,
    statsd_malformed: str | None,
    read_only: bool,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    origins: tuple[str, ...],
    event_bytes: int,
    body_bytes: int,
    in_flight_bytes: int,
    streams: int,
    heartbeat: str,
    ready_file: Path | None,
    insecure: bool,
) -> None:
    """Take events over HTTP and UDP, and send them out as server-sent events.

    The log is by default $MILLSTREAM_LOG, or ./data. The edge owns the folder while it runs, unless it is
    --read-only; over kafka:// there may be several. Ctrl-C or SIGTERM ends it, after the accepted requests
    are appended and have their responses.

    \b
    Examples:
      millstream edge ./data
      curl --json '{"user": "u1", "ad": 7}' 'http://127.0.0.1:8080/topics/clicks?key_field=user'
      curl -N 'http://127.0.0.1:8080/topics/clicks/events?from=earliest'
      millstream edge ./data --statsd 127.0.0.1:8125 --statsd-topic metrics
      millstream edge kafka://127.0.0.1:9092 --http 0.0.0.0:8080 --token-file token
    """
    settings = EdgeSettings(
        limits=RequestLimits(event_bytes_max=event_bytes, body_bytes_max=body_bytes),
        in_flight_bytes=in_flight_bytes,
        subscribers_max=streams,
        heartbeat_s=to_us(heartbeat, what="--heartbeat") / 1e6,
        statsd_topic=statsd_topic,
        malformed_topic=statsd_malformed,
        read_only=read_only,
        tokens=tokens_of(None, token_file),
        certificate=certificate_of(tls_cert, tls_key),
        origins=origins,
        insecure=insecure,
    )
    with wait_for_stop_signal() as wait:
        serving = serve(
            address,
            http=None if http == "none" else http,
            statsd=statsd,
            settings=settings,
            # This process must end, as if it had received the signal.
            on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM),
        )
        with serving as up:
            _announce(up, address)
            where = [line for line in (up.url, up.statsd) if line is not None]
            with write_ready_file(ready_file, "\n".join(where)):
                wait()
            counts = up.statsd_counts()
        if counts is not None:
            click.echo(f"StatsD: {json.dumps(counts)}")
        error = up.failed()
        if error is not None:
            raise error


def _announce(up: EdgeServer, address: Path | str) -> None:
    log = shown(address)
    addresses = []
    if up.url is not None:
        addresses.append(f"HTTP reaches {log} at {up.url}")
    if up.statsd is not None:
        addresses.append(f"StatsD datagrams are received at {up.statsd}")
    click.echo(f"{'; '.join(addresses)} (Ctrl-C ends it)")
