"""Sending dead letters from an app's view to a topic, each exactly once: what relay and replay share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from millstream.client.producer import Producer
from millstream.errors import FencePassedError

RECORD_ID = ("topic", "partition", "offset")
"""The columns of the view ``dead_letters`` that identify a record."""

SLICE_ROWS = 10_000
"""The largest number of dead letters in one transaction."""


def send_once(
    producer: Producer,
    writer: str,
    number: int,
    rows: pl.DataFrame,
    send: Callable[[dict[str, Any]], object],
) -> bool:
    """Send rows in one transaction that moves the fence of ``writer`` to ``number``.

    A crash before the commit leaves nothing of it in the log; after it, the fence is there, too.

    Args:
        send: Sends one row with the producer.

    Returns:
        False if the fence was there already: the rows were sent before, and are not sent again.
    """
    try:
        with producer.transaction() as transaction:
            transaction.fence(writer, number)
            for row in rows.iter_rows(named=True):
                send(row)
    except FencePassedError:
        return False
    return True
