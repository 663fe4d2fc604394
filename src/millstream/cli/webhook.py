"""``millstream webhook``: deliver the records of a topic to an address."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

import click

from millstream.cli.ready import ready_file_option, told_ready
from millstream.cli.tables import Choice, address_option, counted
from millstream.durations import to_us
from millstream.edge.webhooks.delivering import Content, Webhook
from millstream.edge.webhooks.header_file import read_headers
from millstream.edge.webhooks.retrying import Backoff
from millstream.edge.webhooks.shifts import Shifts
from millstream.edge.webhooks.signing import read_secret


@click.command()
@click.argument("topic")
@click.argument("url")
@click.option(
    "--group",
    required=True,
    metavar="NAME",
    help="Go on where this group is, and commit for it what was delivered or given up.",
)
@click.option(
    "--dead",
    required=True,
    metavar="NAME",
    help="The topic to which records go that are given up, with the reason in a header.",
)
@click.option(
    "--from",
    "begin",
    type=Choice(("earliest", "latest")),
    default="earliest",
    show_default=True,
    help="Where to begin where the group has committed nothing.",
)
@click.option(
    "--content",
    type=Choice(("record", "value")),
    default="record",
    show_default=True,
    help="What to send: the record as JSON, as `consume --json` prints it, or its value as it is.",
)
@click.option(
    "--content-type",
    default=Webhook.content_type,
    show_default=True,
    metavar="TYPE",
    help="Of values.",
)
@click.option(
    "--secret-file",
    "secret_files",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="Sign requests with the secret in this file; two while it is changed.",
)
@click.option(
    "--header-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Headers of every request, one `NAME: VALUE` a line, such as Authorization.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    default=Webhook.lanes,
    show_default=True,
    help="How many records may be on their way at a time; those of one key go one by one.",
)
@click.option(
    "--timeout", default="10 seconds", show_default=True, help="How long an attempt may take."
)
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=Backoff().attempts_max,
    show_default=True,
    help="After so many a record is given up.",
)
@click.option(
    "--backoff",
    default="1 second",
    show_default=True,
    help="The wait after the first attempt; each further one waits twice as long.",
)
@click.option(
    "--backoff-max",
    default="5 minutes",
    show_default=True,
    help="The longest wait, unless the endpoint asks for more (up to an hour).",
)
@address_option
@ready_file_option
def webhook(
    topic: str,
    url: str,
    *,
    group: str,
    dead: str,
    begin: Literal["earliest", "latest"],
    content: Content,
    content_type: str,
    secret_files: tuple[Path, ...],
    header_file: Path | None,
    parallel: int,
    timeout: str,
    attempts: int,
    backoff: str,
    backoff_max: str,
    address: Path | str,
    ready_file: Path | None,
) -> None:
    """Deliver the records of TOPIC to the address URL, each until it is taken or given up.

    A record is taken when the answer is 2xx. It is tried again after 408, 425, 429, 5xx, or none; after
    any other answer, or too many attempts, it goes to the --dead topic. Each is delivered once or more
    often, always with the same Idempotency-Key. Those of one key go one after the other. Of several
    with the same --group one delivers, and the others stand by until it ends or dies. Ctrl-C or SIGTERM
    ends it after the attempts at work.

    \b
    Examples:
      millstream topic create undelivered
      millstream webhook clicks https://example.com/hook --group hook --dead undelivered --secret-file secret
      millstream webhook clicks http://127.0.0.1:9000/ --group test --dead undelivered --attempts 3
      millstream lag hook
    """
    what = Webhook(
        topic=topic,
        url=url,
        group=group,
        dead_topic=dead,
        start=begin,
        lanes=parallel,
        timeout_s=to_us(timeout, what="--timeout") / 1e6,
        backoff=Backoff(
            attempts_max=attempts,
            first_s=to_us(backoff, what="--backoff") / 1e6,
            most_s=to_us(backoff_max, what="--backoff-max") / 1e6,
        ),
        content=content,
        content_type=content_type,
        headers={} if header_file is None else read_headers(header_file),
        secrets=[read_secret(path) for path in secret_files],
    )
    _deliver(address, what, ready_file)


def _deliver(address: Path | str, what: Webhook, ready_file: Path | None) -> None:
    """Deliver and stand by until a signal comes, and tell of it."""
    with ExitStack() as stack:
        is_up = False

        def up(text: str, *, err: bool) -> None:
            nonlocal is_up
            click.echo(text, err=err)
            if not is_up:
                is_up = True
                stack.enter_context(told_ready(ready_file, what.url))

        shifts = Shifts(
            address,
            what,
            began=lambda: up(f"Delivering {what.topic} to {what.url} (Ctrl-C ends it)", err=False),
            stood_by=lambda why: up(why, err=True),
            tell=lambda text: click.echo(text, err=True),
        )
        with _stopped_by_signals(shifts):
            shifts.run()
    totals = shifts.totals
    click.echo(
        f"{counted(totals.delivered, 'record')} delivered, {totals.given_up} given up, "
        f"{counted(totals.failed_attempts, 'attempt')} failed"
    )


@contextmanager
def _stopped_by_signals(shifts: Shifts) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end it while the block runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        shifts.stop_soon()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
