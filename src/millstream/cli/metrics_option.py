"""``--metrics``: where a process that serves no HTTP otherwise serves its figures and its health."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from millstream.metrics.exposition import Exposition
from millstream.metrics.server import METRICS_DEFAULT, serve_metrics

metrics_option = click.option(
    "--metrics",
    metavar="HOST:PORT",
    help=f"Serve /metrics for Prometheus, /healthz and /readyz there, such as {METRICS_DEFAULT}. Port 0 takes a free one.",
)


@contextmanager
def serving_metrics(listen: str | None, exposition: Callable[[], Exposition]) -> Iterator[None]:
    """Serve figures until the block ends, if an address is given; say where."""
    if listen is None:
        yield
        return
    with serve_metrics(listen, exposition()) as url:
        click.echo(f"Metrics are at {url}")
        yield
