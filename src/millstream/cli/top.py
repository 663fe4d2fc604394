"""``millstream top``: what the apps of a log do, at a glance in the terminal."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.cli.app_folder import app_store
from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.tables import app_store_option, json_option, log_option, print_json
from millstream.durations import format_us, to_us
from millstream.errors import ConfigError, MillstreamError
from millstream.views.commit.batch_load import RECENT_BATCHES, BatchLoad, batch_load
from millstream.views.reader import apps_with_state
from millstream.views.server.status import AppStatus
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation, open_state_store

_STEPS_SHOWN = 8
_PARTITIONS_SHOWN = 8
_EVERY_US_MIN = 100_000


@click.command()
@click.argument("app", required=False)
@click.option("--once", is_flag=True, help="Print it once, and end; for scripts.")
@click.option("--every", default="1 second", show_default=True, help="How often it is drawn anew.")
@log_option
@app_store_option
@json_option
def top(
    app: str | None, *, once: bool, every: str, folder: Path, store: str | None, as_json: bool
) -> None:
    """Show what the apps of a log do, at a glance: how far behind, how fast, and where their time goes.

    It reads the log and the state stores, so the apps may run or not. Without APP, all apps of the log are
    shown. In a terminal it is drawn anew until Ctrl-C; --json prints it once.

    \b
    Examples:
      millstream top
      millstream top ads --every "5 seconds"
      millstream top --once
      millstream top ads --json
    """
    every_us = to_us(every, what="--every")
    if every_us < _EVERY_US_MIN:
        raise ConfigError(f"--every {every!r} is too short: give 100 milliseconds or more.")
    if app is None and store is not None:
        raise ConfigError("--store is the database of one app: name the app, too.")
    names = [app] if app is not None else sorted(apps_with_state(folder))
    if not names:
        raise ConfigError(f"No app has run in {folder}. Correct --log, or run one: millstream run.")
    locations = {name: app_store(folder, name, store) for name in names}
    with ExitStack() as opened:
        watched = [
            _WatchedApp(
                name,
                opened.enter_context(closing(open_state_store(location, readonly=True))),
                AppStatus(name, folder, folder / "apps" / name),
                location,
            )
            for name, location in locations.items()
        ]
        if as_json:
            print_json([one.to_dict() for one in watched])
        elif once or not Console().is_terminal:
            Console().print(Group(*(one.drawn() for one in watched)))
        else:
            _redraw(watched, every_us / 1_000_000)


@dataclass
class _WatchedApp:
    """One app: its state store, and what assembles its status."""

    name: str
    store: StateStore
    status: AppStatus
    location: StoreLocation
    inode: int | None = None  # of the file that was read

    def look(self) -> tuple[dict[str, Any], BatchLoad]:
        """Return the status as it is now, and the load of the last batches."""
        if isinstance(self.location, Path):
            inode = self.location.stat().st_ino
            if inode != self.inode:  # reset or deployed: what was added up is of another file
                self.status.forget()
            self.inode = inode
        load = batch_load(self.store.batches(self.name, limit=RECENT_BATCHES))
        return self.status.read(self.store), load

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        status, load = self.look()
        names = ("app", "running", "failure", "batch_id", "at", "behind_s", "unread", "watermark")
        return {
            **{name: status[name] for name in names},
            "catch_up_s": load.catch_up(status["unread"]).seconds,
            "totals": status["totals"],
            "partitions": status["partitions"],
            "load": load.to_dict(),
        }

    def drawn(self) -> Group:
        """Return what is shown of the app."""
        status, load = self.look()
        parts: list[ConsoleRenderable] = [_headline(status, load), _numbers(status, load)]
        parts += [_phases(load)] if any(load.phases_ms.values()) else []
        parts += [_steps(load)] if load.steps else []
        parts += [_partitions(status)] if status["partitions"] else []
        return Group(*parts)


def _redraw(watched: list[_WatchedApp], every_s: float) -> None:
    """Draw until Ctrl-C or SIGTERM."""
    with (
        wait_for_stop_signal() as wait,
        Live(Group(*(one.drawn() for one in watched)), screen=True, auto_refresh=False) as live,
    ):
        ended = threading.Event()
        thread = threading.Thread(target=lambda: _refresh(live, watched, every_s, ended))
        thread.start()
        try:
            wait()
        finally:
            ended.set()
            thread.join()


def _refresh(
    live: Live, watched: list[_WatchedApp], every_s: float, ended: threading.Event
) -> None:
    while not ended.wait(every_s):
        try:
            drawn = Group(*(one.drawn() for one in watched))
        except (
            MillstreamError,
            OSError,
        ) as error:  # as while an app is reset; it goes on after that
            drawn = Group(Text(str(error), "red"))
        live.update(drawn, refresh=True)


def _headline(status: Mapping[str, Any], load: BatchLoad) -> Text:
    text = Text(status["app"], "bold")
    if status["running"]:
        text.append("  running", "green")
    elif status["failure"]:
        text.append(f"  failed: {status['failure']['kind']}", "bold red")
    else:
        text.append("  stopped", "yellow")
    if status["at"]:
        text.append(f"  batch {status['batch_id']:,} at {status['at'][:19].replace('T', ' ')}Z")
    if not status["unread"]:
        text.append("  nothing unread")
    else:
        text.append(f"  {status['unread']:,} unread", "yellow")
        catch_up = load.catch_up(status["unread"])
        if status["running"] and catch_up.seconds is not None:
            text.append(f", caught up in {format_us(max(1, round(catch_up.seconds)) * 1_000_000)}")
        elif status["running"] and catch_up.never:
            text.append(", not catching up", "red")
    return text


def _numbers(status: Mapping[str, Any], load: BatchLoad) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    behind = status["behind_s"]
    totals = status["totals"]
    table.add_row(
        "behind",
        "-" if behind is None else f"{behind:.1f} s",
        "arriving/s",
        _rate(load.arriving_per_s),
        "read/s",
        _rate(load.read_per_s),
        "busy",
        "-" if load.busy is None else f"{load.busy:.0%}",
    )
    table.add_row(
        "late",
        f"{totals['late']:,}",
        "dead",
        f"{totals['dead']:,}",
        "duplicate",
        f"{totals['duplicate']:,}",
        "filtered",
        f"{totals['filtered']:,}",
    )
    return table


def _phases(load: BatchLoad) -> Text:
    """Return what a batch takes, by phase; it is folded where the terminal is narrow."""
    total_ms = sum(load.phases_ms.values())
    phases = (
        f"{name}\u00a0{took_ms / load.batches:,.0f}\u00a0ms\u00a0({took_ms / total_ms:.0%})"
        for name, took_ms in load.phases_ms.items()
    )
    return Text(f"a batch: {'  '.join(phases)}")


def _steps(load: BatchLoad) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("step", overflow="fold")
    for title in ("work", "rows read", "late", "dead", "state", "state rows"):
        table.add_column(title, justify="right", no_wrap=True)
    worked_ms = sum(step.worked_ms for step in load.steps)
    for step in load.steps[:_STEPS_SHOWN]:
        table.add_row(
            Text(step.step),
            f"{step.worked_ms / worked_ms:.0%}" if worked_ms else "-",
            f"{step.read:,}",
            f"{step.late:,}",
            f"{step.dead:,}",
            _size(step.state_bytes),
            f"{step.state_rows:,}",
        )
    return table


def _partitions(status: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("partition", overflow="fold")
    for title in ("read to", "unread", "watermark", ""):
        table.add_column(title, justify="right", no_wrap=True)
    by_unread = sorted(status["partitions"], key=lambda one: -(one["unread"] or 0))
    for one in by_unread[:_PARTITIONS_SHOWN]:
        table.add_row(
            Text(f"{one['topic']}/{one['partition']}"),
            f"{one['position']:,}",
            "-" if one["unread"] is None else f"{one['unread']:,}",
            "-" if one["watermark"] is None else one["watermark"][:19].replace("T", " ") + "Z",
            "idle" if one["idle"] else "",
        )
    return table


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:,.0f}"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
