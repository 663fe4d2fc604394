"""The time at which a device made an event, when the device's clock cannot be trusted."""

from __future__ import annotations

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.pipeline.expressions import Column, as_expression

_TIME = pl.Datetime("us", "UTC")


def device_time(
    created: Column,
    sent: Column,
    received: Column,
    true: Column | None = None,
    *,
    max_backdate: Duration | None = None,
) -> pl.Expr:
    """Correct a device's clock by three times: when it made the event, sent it, and we received it.

    How long the event waited on the device, ``sent - created``, is true however wrong the device's
    clock is; so the event was made that long before it was received. Where ``created`` or ``sent``
    is null, or the event was not made before it was sent, it is ``received`` as it stands. Exact to
    the microsecond; the time from device to receiver counts as zero.

    Args:
        created: When the device made the event, by its own clock.
        sent: When it sent the event, by the same clock.
        received: When the event was received, by a clock that is right.
        true: A time that is known to be right; where it is not null, it is the result.
        max_backdate: The most by which the result lies before ``received``: a device that was off
            for a month, or claims so, cannot reach back further. ``true`` is not held by it.

    Example::

        events.stream(time=ms.device_time("created", "sent", "received", max_backdate="7 days"))

    Source: Snowplow's derived timestamp, with an exact duration in the place of its calendar period.
    """
    made, left, came = (
        as_expression(column, what=f"device_time's {name}").cast(_TIME)
        for name, column in (("created", created), ("sent", sent), ("received", received))
    )
    waited = left - made
    if max_backdate is not None:
        waited = pl.min_horizontal(waited, pl.lit(_limit(max_backdate), pl.Duration("us")))
    corrected = pl.when(made < left).then(came - waited).otherwise(came)
    if true is None:
        return corrected
    return pl.coalesce(as_expression(true, what="device_time's true").cast(_TIME), corrected)


def _limit(max_backdate: Duration) -> int:
    limit_us = to_us(max_backdate, what="device_time's max_backdate")
    if limit_us == 0:
        raise ConfigError(
            "device_time's max_backdate is 0, which leaves only the time of receipt. Give a longer "
            "one, or use that time itself."
        )
    return limit_us
