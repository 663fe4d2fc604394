"""A file with the address of a server while it runs: for scripts that start one and wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

ready_file_option = click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the address there once clients can come, and remove it at the end.",
)


@contextmanager
def write_ready_file(ready_file: Path | None, text: str) -> Iterator[None]:
    """Keep a text in a file until the block ends."""
    if ready_file is None:
        yield
        return
    # Renamed, so that a script that waits for the file finds the text in it.
    fresh = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
    fresh.write_text(f"{text}\n")
    fresh.rename(ready_file)
    try:
        yield
    finally:
        ready_file.unlink(missing_ok=True)
