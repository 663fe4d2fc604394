"""A webhook that delivers while it holds the leader lease of its group, and is on standby otherwise.

One thread polls the lease, another delivers. A leader whose lease is revoked in order finishes the attempts
in flight and commits before the next leader starts, so nothing is delivered twice. The next leader after one
that died, or was taken for dead, starts at its committed offsets. So nothing is skipped, and some records may
be delivered again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from millstream.client import connect
from millstream.edge.webhooks.delivery import Delivery, DeliveryTotals, Webhook, check_topics
from millstream.edge.webhooks.endpoint import parse_url
from millstream.edge.webhooks.leader_lease import open_lease
from millstream.errors import RetriableError
from millstream.log.groups import check_offsets
from millstream.metrics.readings import Readings

_POLL_S = 0.2
_RETRY_S = 1.0


class WebhookRunner:
    """Delivers whenever it holds the lease, from :meth:`run` until :meth:`request_stop`.

    Args:
        on_leading: Called when it starts to deliver.
        on_standby: Called when another process is found to hold the lease, with a sentence that says so.
        report: Called with a sentence about anything else that the user should know.

    Raises:
        ConfigError: the address is invalid; a topic does not exist; the group's name is not allowed.
        BrokerUnavailableError: no broker responds.
    """

    def __init__(
        self,
        log: Path | str,
        webhook: Webhook,
        *,
        on_leading: Callable[[], None],
        on_standby: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        parse_url(webhook.url)
        check_offsets(webhook.group, {})
        with connect(log) as opened:
            check_topics(opened, webhook)
        self._log = log
        self._webhook = webhook
        self._on_leading = on_leading
        self._on_standby = on_standby
        self._report = report
        self.totals = DeliveryTotals()
        self._term: _Term | None = None
        self._stopped = False
        self._retry_at_s = 0.0
        self._polled = False

    def read_metrics(self, readings: Readings) -> None:
        """Add the figures of the webhook. From any thread."""
        labels = {"topic": self._webhook.topic, "group": self._webhook.group}
        readings.add("webhook_leading", float(self._term is not None), **labels)
        totals = self.totals
        readings.add("webhook_delivered_records_total", totals.delivered, **labels)
        readings.add("webhook_undeliverable_records_total", totals.undeliverable, **labels)
        readings.add("webhook_failed_attempts_total", totals.failed_attempts, **labels)

    def why_not_ready(self) -> str | None:
        """Return a sentence until it delivers, or is known to be on standby; then None."""
        return None if self._polled else "It has not asked for the leader lease yet."

    def run(self) -> None:
        """Deliver or wait on standby until :meth:`request_stop` is called, or something fails.

        Raises:
            MillstreamError: the log cannot be read or written to; the lease cannot be acquired.
        """
        reported = False
        lease = open_lease(self._log, self._webhook.group, self._webhook.topic, self._on_revoked)
        try:
            while not self._stopped:
                why = lease.standby_reason
                self._polled = lease.held or why is not None
                if lease.held and self._term is None:
                    reported = False
                    self._start_term()
                elif why is not None and not reported:
                    reported = True
                    self._on_standby(why)
                if self._term is not None and self._term.ended:
                    break  # it has failed: only a failure ends it
                lease.poll(_POLL_S)
        finally:
            # 1. Finish and commit. After a crash the next leader delivers some records again.
            # 2. Release the lease. A crash does that too.
            try:
                self._end_term(commit=True)
            finally:
                lease.close()

    def request_stop(self) -> None:
        """Ask :meth:`run` to finish and return. May be called from a signal handler."""
        self._stopped = True

    def _start_term(self) -> None:
        if time.monotonic() < self._retry_at_s:
            return
        try:
            # Only now: it starts at the committed offsets of the leader before.
            delivery = Delivery(self._log, self._webhook, report=self._report, totals=self.totals)
        except RetriableError as error:
            self._retry_at_s = time.monotonic() + _RETRY_S
            self._report(f"Delivery cannot start yet: {error}")
            return
        self._term = _Term(delivery)
        self._on_leading()

    def _on_revoked(self, in_order: bool) -> None:  # noqa: FBT001 - the lease calls it by position
        try:
            self._end_term(commit=in_order)
        except RetriableError as error:
            self._report(
                f"Another webhook takes over, and some records are delivered again: {error}"
            )

    def _end_term(self, *, commit: bool) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.end(commit=commit)


class _Term:
    """One term as the leader: a delivery, in a thread of its own."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="millstream webhook term")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._delivery.run()
        except BaseException as error:  # noqa: BLE001 - end() raises it
            self._failure = error

    @property
    def ended(self) -> bool:
        """Whether the term has ended by itself, which means that it has failed."""
        return not self._thread.is_alive()

    def end(self, *, commit: bool) -> None:
        """Finish the attempts in flight; return when nothing more is sent or committed.

        Raises:
            MillstreamError: the delivery had failed.
        """
        self._delivery.stop(commit=commit)
        self._thread.join()
        if self._failure is not None and (commit or not isinstance(self._failure, RetriableError)):
            raise self._failure
