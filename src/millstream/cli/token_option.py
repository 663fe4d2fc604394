"""The option that names the file with the token of an HTTP server."""

from __future__ import annotations

from pathlib import Path

import click

token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Questions over HTTP carry the token in this file (Authorization: Bearer …).",
)
