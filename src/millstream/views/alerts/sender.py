"""Sends to targets, to each for so long at most, so that one that never ends its response holds no other one up for ever.

The time limits of sockets are for each piece that comes: a receiver that sends a byte now and then would be waited
for without end, and so would a name that is not resolved.
"""

from __future__ import annotations

import threading

from millstream.errors import RetriableError
from millstream.views.alerts.targets import AlertMessage, AlertTarget

SEND_MAX_S = 60.0  # a command has 30 seconds, and the pieces of a response 10 each
LATE_MAX = 1_000  # messages that have ended late and were not asked for


class TargetSender:
    """Sends to targets, each in a thread of its own while it takes. One thread at a time calls it."""

    def __init__(self, send_max_s: float = SEND_MAX_S) -> None:
        self._send_max_s = send_max_s
        self._late: dict[tuple[str, str], _Sending] = {}  # by target and message: not ended in time

    def send(self, target: AlertTarget, message: AlertMessage) -> None:
        """Send a message, or learn that it was taken since it was given up.

        Raises:
            RetriableError: it has not ended in time, or the target is still at an earlier message.
            Exception: what the target raises.
        """
        place = target.name, message.id
        if any(one.is_alive() for (name, _), one in self._late.items() if name == target.name):
            raise RetriableError(f"{target.name} has still not responded")
        # What has ended meanwhile is kept until its own message comes, so that it is not sent again.
        sending = self._late.pop(place, None)
        if sending is None or sending.error is not None:
            sending = _Sending(target, message)
            sending.start()
            sending.join(self._send_max_s)
        if sending.is_alive():
            self._keep(place, sending)
            raise RetriableError(f"{target.name} did not respond within {self._send_max_s:g} s")
        if sending.error is not None:
            raise sending.error

    def _keep(self, place: tuple[str, str], sending: _Sending) -> None:
        self._late[place] = sending
        ended = [one for one, late in self._late.items() if not late.is_alive()]
        for one in ended[: max(0, len(ended) - LATE_MAX)]:  # of notices that were given up
            del self._late[one]


class _Sending(threading.Thread):
    def __init__(self, target: AlertTarget, message: AlertMessage) -> None:
        super().__init__(name="millstream alert", daemon=True)
        self.target, self.message = target, message
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.target.send(self.message)
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            self.error = error
