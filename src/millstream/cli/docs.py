"""`millstream docs`: the documentation of the installed version, in a browser."""

from __future__ import annotations

import webbrowser

import click

from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.site_server import LISTEN_DEFAULT, serve_site


@click.command()
@click.option(
    "--listen",
    default=LISTEN_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve. Port 0 takes a free one.",
)
@click.option("--open", "opens", is_flag=True, help="Open the first page in your browser.")
def docs(listen: str, *, opens: bool) -> None:
    """Serve the documentation of this version, with its search, from the package itself.

    No network is needed. Ctrl-C ends it.

    \b
    Examples:
      millstream docs --open
      millstream docs --listen 127.0.0.1:9000
    """
    with wait_for_stop_signal() as wait, serve_site(listen=listen) as url:
        click.echo(f"The documentation is at {url} (Ctrl-C ends it)")
        if opens:
            webbrowser.open(url)
        wait()
