"""``--log-format``: what is logged on standard error, as text or as JSON lines."""

from __future__ import annotations

import logging

import click

from millstream.cli.tables import Choice

log_format_option = click.option(
    "--log-format",
    type=Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log on standard error as text, or as JSON lines with app, job, run and batch.",
)


def set_log_format(log_format: str) -> None:
    """Log as it is asked for; as text, what Python logs without being told."""
    if log_format == "text":
        return
    from millstream.views.runs.log_fields import JsonFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    ours = logging.getLogger("millstream")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
