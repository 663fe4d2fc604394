"""``millstream webhook``: deliver the records of a topic to an HTTP endpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

import click

from millstream.cli.metrics_option import metrics_option, serving_metrics
from millstream.cli.ready_file import ready_file_option, write_ready_file
from millstream.cli.tables import Choice, address_option, pluralize
from millstream.durations import to_us
from millstream.edge.webhooks.delivery import Content, Webhook
from millstream.edge.webhooks.header_file import read_headers
from millstream.edge.webhooks.retry_policy import RetryPolicy
from millstream.edge.webhooks.runner import WebhookRunner
from millstream.edge.webhooks.signature import read_secret
from millstream.metrics.exposition import Exposition


@click.command()
@click.argument("topic")
@click.argument("url")
@click.option(
    "--group",
    required=True,
    metavar="NAME",
    help="Continue where this group is, and commit for it what was delivered or dead-lettered.",
)
@click.option(
    "--dead",
    required=True,
    metavar="NAME",
    help="The dead-letter topic of undeliverable records, with the reason in a header.",
)
@click.option(
    "--from",
    "begin",
    type=Choice(("earliest", "latest")),
    default="earliest",
    show_default=True,
    help="Where to start if the group has committed nothing.",
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
    help="The Content-Type of values.",
)
@click.option(
    "--secret-file",
    "secret_files",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="Sign requests with the secret in this file; give two to rotate it.",
)
@click.option(
    "--header-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Headers of every request, one `NAME: VALUE` per line, such as Authorization.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    default=Webhook.workers,
    show_default=True,
    help="How many records may be in flight; those of one key are delivered one by one.",
)
@click.option(
    "--timeout", default="10 seconds", show_default=True, help="How long an attempt may take."
)
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=RetryPolicy().attempts_max,
    show_default=True,
    help="After so many attempts a record is dead-lettered.",
)
@click.option(
    "--backoff",
    default="1 second",
    show_default=True,
    help="The wait after the first attempt; it doubles with each further one.",
)
@click.option(
    "--backoff-max",
    default="5 minutes",
    show_default=True,
    help="The longest wait, unless the endpoint asks for more (up to an hour).",
)
@address_option
@metrics_option
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
    metrics: str | None,
    ready_file: Path | None,
) -> None:
    """Deliver the records of TOPIC to the endpoint URL, at least once.

    A record is delivered when the response is 2xx. It is retried after 408, 425, 429, 5xx, or no response;
    after any other response, or too many attempts, it goes to the --dead topic. Every attempt has the same
    Idempotency-Key. Records of one key are delivered in order. Of several webhooks with the same --group one
    delivers, and the others are on standby until it ends or dies. Ctrl-C or SIGTERM ends it after the
    attempts in flight.

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
        dead_letter_topic=dead,
        start=begin,
        workers=parallel,
        timeout_s=to_us(timeout, what="--timeout") / 1e6,
        retry_policy=RetryPolicy(
            attempts_max=attempts,
            initial_s=to_us(backoff, what="--backoff") / 1e6,
            max_s=to_us(backoff_max, what="--backoff-max") / 1e6,
        ),
        content=content,
        content_type=content_type,
        headers={} if header_file is None else read_headers(header_file),
        secrets=[read_secret(path) for path in secret_files],
    )
    _deliver(address, what, metrics, ready_file)


def _deliver(
    address: Path | str, what: Webhook, metrics: str | None, ready_file: Path | None
) -> None:
    """Deliver or wait on standby until a signal arrives, and report it."""
    with ExitStack() as stack:
        ready = False

        def announce(text: str, *, err: bool) -> None:
            nonlocal ready
            click.echo(text, err=err)
            if not ready:
                ready = True
                stack.enter_context(write_ready_file(ready_file, what.url))

        runner = WebhookRunner(
            address,
            what,
            on_leading=lambda: announce(
                f"Delivering {what.topic} to {what.url} (Ctrl-C ends it)", err=False
            ),
            on_standby=lambda why: announce(why, err=True),
            report=lambda text: click.echo(text, err=True),
        )
        exposition = Exposition({"webhook": runner.read_metrics}, [runner.why_not_ready])
        with serving_metrics(metrics, lambda: exposition), _stopped_by_signals(runner):
            runner.run()
    totals = runner.totals
    click.echo(
        f"{pluralize(totals.delivered, 'record')} delivered, {totals.undeliverable} dead-lettered, "
        f"{pluralize(totals.failed_attempts, 'attempt')} failed"
    )


@contextmanager
def _stopped_by_signals(runner: WebhookRunner) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end it while the block runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        runner.request_stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
