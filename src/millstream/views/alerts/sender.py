"""Sends to targets, to each for so long at most, so that one that never ends its response holds no other one up for ever.

The time limits of sockets are for each piece that comes: a receiver that sends a byte now and then would be waited
for without end, and so would a name that is not resolved.
"""

from __future__ import annotations

import threading

from millstream.errors import RetriableError
from millstream.views.alerts.targets import AlertMessage, AlertTarget

SEND_MAX_S = 60.0  # a command has 30 seconds, and the pieces of a response 10 each


class TargetSender:
    """Sends to targets, each in a thread of its own while it takes. One thread at a time calls it."""

    def __init__(self, send_max_s: float = SEND_MAX_S) -> None:
        self._send_max_s = send_max_s
        self._sending: dict[str, _Sending] = {}  # by target: what had not ended in time

    def send(self, target: AlertTarget, message: AlertMessage) -> None:
        """Send a message, or learn that it was taken since it was given up.

        Raises:
            RetriableError: it has not ended in time, or goes on since an earlier time.
            Exception: what the target raises.
        """
        sending = self._sending.pop(target.name, None)
        if sending is not None and sending.is_alive():
            self._sending[target.name] = sending
            raise RetriableError(f"{target.name} has still not responded")
        if sending is None or sending.error is not None or sending.message.id != message.id:
            sending = _Sending(target, message)
            sending.start()
            sending.join(self._send_max_s)
        if sending.is_alive():
            self._sending[target.name] = sending
            raise RetriableError(f"{target.name} did not respond within {self._send_max_s:g} s")
        if sending.error is not None:
            raise sending.error


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
