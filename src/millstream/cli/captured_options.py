"""The options that the commands on captured tables and their copies share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from millstream.client.default_log import DEFAULT_FOLDER, LOG_VARIABLE


def tables_option(said: str) -> Callable[[Any], Any]:
    """Take the tables that are meant, by patterns; all of them if none is given."""
    return click.option(
        "--tables", multiple=True, default=("*",), show_default=True, metavar="PATTERN", help=said
    )


log_option = click.option(
    "--log",
    default=DEFAULT_FOLDER,
    show_default=True,
    envvar=LOG_VARIABLE,
    show_envvar=True,
    metavar="LOG",
    help="The log that the capture writes to: a folder, or kafka://HOST:PORT.",
)
