"""``millstream alert``: tell what is wrong with a log and its apps, without Prometheus."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import click

from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.tables import log_option
from millstream.client.log_metrics import read_log_metrics
from millstream.durations import to_us
from millstream.errors import ConfigError, ConflictError
from millstream.metrics.exposition import ReadFigures
from millstream.views.alerts.rules_file import read_rules
from millstream.views.alerts.watch import AlertFile, AlertWatch
from millstream.views.server.app_metrics import AppMetrics
from millstream.views.server.catalog import ViewCatalog


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@log_option
@click.option(
    "--every", default="15 seconds", show_default=True, help="How often to look at the figures."
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the states of alerts are kept; by default alerts.json in the folder of the log.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Look once, and exit with 1 if an alert fires or figures cannot be read.",
)
@click.pass_context
def alert(
    context: click.Context, file: Path, folder: Path, every: str, state: Path | None, *, once: bool
) -> None:
    """Look at the figures of a log by the rules in FILE, and tell what is wrong.

    FILE is TOML: docs/watch.md. Each alert is told when it begins to fire, again after its repeat, and when it is over;
    what could not be told is told later, also after a restart. It looks at apps whether they run or not.
    Ctrl-C or SIGTERM ends it, after a last look.

    \b
    Examples:
      millstream alert rules.toml
      millstream alert rules.toml --log ./data --every "1 minute"
      millstream alert rules.toml --once || echo something is wrong
    """
    rules = read_rules(file)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r}. Give that of the log: --log.")
    every_s = to_us(every, what="--every") / 1e6
    kept = folder / "alerts.json" if state is None else state
    with ExitStack() as opened:
        opened.enter_context(_only_one(kept))
        catalog = opened.enter_context(closing(ViewCatalog(folder)))
        figures = opened.enter_context(closing(AppMetrics(catalog, folder)))
        read_log: ReadFigures = partial(read_log_metrics, folder)
        sources = {"apps": figures.read, "log": read_log}
        watch = AlertWatch(folder.resolve().name, rules, sources, AlertFile(kept))
        if once:
            watch.look()
        else:
            _watch(watch, every_s)
        for name in watch.firing:
            click.echo(f"firing: {name}")
        for name in watch.unread:
            click.echo(f"figures of {name} cannot be read", err=True)
    if once and (watch.firing or watch.unread):
        context.exit(1)


def _watch(watch: AlertWatch, every_s: float) -> None:
    """Look until a signal arrives."""
    stopped = threading.Event()
    with wait_for_stop_signal() as wait:
        thread = threading.Thread(target=watch.run, args=(stopped, every_s))
        thread.start()
        click.echo("Looking at the figures (Ctrl-C ends it)")
        try:
            wait()
        finally:
            stopped.set()
            thread.join()


@contextmanager
def _only_one(kept: Path) -> Iterator[None]:
    """Be the only process that keeps states in a file: two would tell everything twice.

    Raises:
        ConflictError: there is another.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_name(f"{kept.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                f"Another `millstream alert` keeps its states in {kept}. End it, or give --state another file."
            ) from None
        yield
