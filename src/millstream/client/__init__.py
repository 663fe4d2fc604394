"""Clients of a log: one interface for a log in a folder and for one behind brokers.

``open`` has :func:`connect`, ``log`` what it returns. ``folder`` and ``kafka`` implement it with modules of
the same names: log, producer, consumer, reader, groups, transaction.
"""

from millstream.client.log import EventLog
from millstream.client.open import connect

__all__ = ["EventLog", "connect"]
