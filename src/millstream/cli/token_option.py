"""The options of HTTP and SQL servers: which tokens they accept, and what they are encrypted with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_tls_cert_option = click.option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Serve with TLS: the certificate chain, PEM. A renewed one is used without a restart.",
)
_tls_key_option = click.option(
    "--tls-key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Its private key, PEM, if it is not in the same file.",
)


def token_option(said: str) -> Callable[[Command], Command]:
    """Take the file with a token, or with tokens."""
    return click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"{said} The file has a token, or those of `millstream token`.",
    )


def door_options(said: str) -> Callable[[Command], Command]:
    """Take the file of tokens, and certificate and key."""

    def decorate(command: Command) -> Command:
        return token_option(said)(_tls_cert_option(_tls_key_option(command)))

    return decorate
