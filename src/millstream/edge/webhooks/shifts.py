"""A webhook that delivers while it is on duty for its group, and stands by while another is.

One thread asks whose duty it is; another delivers. Who is relieved in order finishes the attempts at
work and commits before the next one begins, so nothing comes twice. Who died, or was taken for dead, has
committed what it had: the next one begins there, so nothing is left out, and some may come again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from millstream.client import connect
from millstream.edge.webhooks.delivering import Delivery, Totals, Webhook, check_topics
from millstream.edge.webhooks.duty import duty_of
from millstream.edge.webhooks.endpoint import parse_url
from millstream.errors import RetriableError
from millstream.log.groups import check_offsets

_LOOK_EVERY_S = 0.2
_AGAIN_S = 1.0


class Shifts:
    """Delivers whenever it is on duty, from :meth:`run` until :meth:`stop_soon`.

    Args:
        began: Called when it goes on duty.
        stood_by: Called when it is known that another is, with a sentence that says so.
        tell: Called with a sentence about what else is to be known.

    Raises:
        ConfigError: the address is none; the topics are not there; the group can have no such name.
        BrokerAwayError: no broker answers.
    """

    def __init__(
        self,
        log: Path | str,
        webhook: Webhook,
        *,
        began: Callable[[], None],
        stood_by: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        parse_url(webhook.url)
        check_offsets(webhook.group, {})
        with connect(log) as opened:
            check_topics(opened, webhook)
        self._log = log
        self._webhook = webhook
        self._began = began
        self._stood_by = stood_by
        self._tell = tell
        self.totals = Totals()
        self._shift: _Shift | None = None
        self._stopped = False
        self._again_s = 0.0

    def run(self) -> None:
        """Deliver and stand by until :meth:`stop_soon` is called, or something fails.

        Raises:
            MillstreamError: the log cannot be read or written to; a duty cannot be had.
        """
        told = False
        duty = duty_of(self._log, self._webhook.group, self._webhook.topic, self._relieve)
        try:
            while not self._stopped:
                why = duty.stands_by
                if duty.held and self._shift is None:
                    told = False
                    self._begin()
                elif why is not None and not told:
                    told = True
                    self._stood_by(why)
                if self._shift is not None and self._shift.ended:
                    break  # it has failed: nobody else ends it
                duty.poll(_LOOK_EVERY_S)
        finally:
            # 1. Finish and commit. A crash leaves the duty to the next one, who delivers some again.
            # 2. Give up the duty. A crash does that too.
            try:
                self._end(commit=True)
            finally:
                duty.close()

    def stop_soon(self) -> None:
        """End in order, a moment later. From a signal's handler, too."""
        self._stopped = True

    def _begin(self) -> None:
        if time.monotonic() < self._again_s:
            return
        try:
            # Made only now: it begins where the one before has committed.
            delivery = Delivery(self._log, self._webhook, tell=self._tell, totals=self.totals)
        except RetriableError as error:
            self._again_s = time.monotonic() + _AGAIN_S
            self._tell(f"Delivery cannot begin yet: {error}")
            return
        self._shift = _Shift(delivery)
        self._began()

    def _relieve(self, in_order: bool) -> None:  # noqa: FBT001 - the duty calls it by place
        try:
            self._end(commit=in_order)
        except RetriableError as error:
            self._tell(f"Another takes over, and some records are delivered again: {error}")

    def _end(self, *, commit: bool) -> None:
        shift, self._shift = self._shift, None
        if shift is not None:
            shift.end(commit=commit)


class _Shift:
    """One time on duty: a delivery, in a thread of its own."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="millstream webhook shift")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._delivery.run()
        except BaseException as error:  # noqa: BLE001 - it goes to who ends this
            self._failure = error

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself, which it does when it fails."""
        return not self._thread.is_alive()

    def end(self, *, commit: bool) -> None:
        """Finish the attempts at work; return when nothing more is sent or committed.

        Raises:
            MillstreamError: it had failed.
        """
        self._delivery.stop(commit=commit)
        self._thread.join()
        if self._failure is not None and (commit or not isinstance(self._failure, RetriableError)):
            raise self._failure
