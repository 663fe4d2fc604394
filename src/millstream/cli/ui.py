"""`millstream ui`: the page, and the views over HTTP."""

from __future__ import annotations

import dataclasses
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from millstream.access.audit_log import Actor, AuditLog
from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.tables import log_option
from millstream.cli.token_option import door_options
from millstream.cli.version_runs import VersionRuns, parse_programs
from millstream.views.reader import apps_with_state
from millstream.views.server.server import LISTEN_DEFAULT, serve


@click.command()
@log_option
@click.option(
    "--listen",
    default=LISTEN_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve. Port 0 takes a free one.",
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    envvar="MILLSTREAM_VIEWS",
    show_envvar=True,
    metavar="URL",
    help="A database whose views to serve, too. A password is better left to PGPASSWORD or ~/.pgpass: "
    "a command line can be read by others.",
)
@door_options("Requests need a token, and browsers log in with one.")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Pages of this origin may send requests, too, such as that of a proxy: https://example.com; may be repeated.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow an address that other machines reach, without tokens.",
)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="APP=FILE",
    help="The file of an app's program, so that the page /operate has buttons to plan, compare, deploy and roll back; not "
    "with --insecure. May be repeated.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in your browser.")
def ui(
    folder: Path,
    listen: str,
    stores: tuple[str, ...],
    *,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    origins: tuple[str, ...],
    insecure: bool,
    programs: tuple[str, ...],
    opens: bool,
) -> None:
    """Show a page of what the apps of a log do, live; serve their views over HTTP.

    The pipelines need not run. It only reads, but for the page /operate, which sends dead letters again, and changes
    the version of an app, when asked to; not with --insecure. With --token-file, that needs a token with the role operate, and
    all else one with the role read. Ctrl-C ends it.

    \b
    Examples:
      millstream ui
      millstream ui --log ./demo-data --open
      millstream ui --program ads=app.py
      millstream ui --listen 127.0.0.1:9000
      millstream ui --listen 0.0.0.0:8400 --token-file tokens.txt --tls-cert cert.pem --tls-key key.pem
      curl 'http://127.0.0.1:8400/views/ad_ctr?ad_id=7&order=-window_start&limit=5'
      curl -N 'http://127.0.0.1:8400/views/ad_ctr/changes?since=0'
    """
    with (
        wait_for_stop_signal() as wait,
        closing(VersionRuns(folder, parse_programs(programs))) as commands,
        serve(
            folder,
            listen=listen,
            insecure=insecure,
            token_file=token_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            origins=origins,
            databases=stores,
            replay=partial(_replay, folder),
            commands=commands,
        ) as serving,
    ):
        click.echo(f"Serving {folder} at {serving.url} (Ctrl-C ends it)")
        if not apps_with_state(folder):
            click.echo(f"No app has run in {folder} yet; the page shows one as soon as it runs.")
        if opens:
            webbrowser.open(serving.url)
        wait()


def _replay(
    folder: Path, app: str, records: Sequence[str], who: Actor, *, late_ok: bool
) -> Mapping[str, Any]:
    """Send dead letters of an app again, for the page."""
    from millstream.ops.dead_letter_replay import DeadLetterFilter, parse_record_id, replay

    chosen = DeadLetterFilter(record_ids=[parse_record_id(one) for one in records])
    details = {"records": list(records), "late_ok": late_ok}
    with AuditLog(folder, app).recorded(who, "dead replay", details) as found:
        done = dataclasses.asdict(replay(folder, app, chosen, late_ok=late_ok))
        found["appended"] = done["records"]
    return done
