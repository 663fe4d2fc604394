"""The same local time some days or months earlier, as the clocks of a time zone show it.

Not so many hours earlier: a week with a change of clocks has 167 or 169 of them. In detail:

- A day that the earlier month does not have (the 31st, the 29th of February) gives nothing.
- A local time that the clocks of the earlier day skip gives nothing.
- Of a local time that the clocks of the earlier day show twice, the second showing belongs to the second
  showing of the day asked about, and the first to everything else.
- A window of whole days is asked about by its date, also where the clocks skip midnight.

Source: PEP 495 (the fold of a local time), with the rules of ``zoneinfo`` (the IANA time zone database).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from millstream.kernels.windows.calendar_windows import local_instants

DAY_US = 86_400_000_000
_ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SLACK_US = 2 * DAY_US  # more than the offset from UTC of any zone has ever changed by
_MONTH_DAYS_MAX = 31


@dataclass(frozen=True)
class LocalSpan:
    """So many days or months back, by the calendar and clocks of a zone.

    ``by_date``: the windows are of whole days, and named by the date on which they begin.
    """

    days: int
    months: int
    tz: str
    by_date: bool

    @property
    def longest_us(self) -> int:
        """More than the time between an instant and the one that it is compared with."""
        return (self.days + self.months * _MONTH_DAYS_MAX) * DAY_US + _SLACK_US

    def before(self, start_us: int) -> int | None:
        """Return the earlier instant, in microseconds since 1970 UTC; None if there is none."""
        return _before(self, start_us)

    def earlier_date(self, local: datetime) -> datetime | None:
        """Return a local time of an earlier day; None if the calendar does not have that day."""
        if not self.months:
            return local - timedelta(days=self.days)
        month = local.year * 12 + local.month - 1 - self.months
        try:
            return local.replace(year=month // 12, month=month % 12 + 1)
        except ValueError:
            return None


@lru_cache(maxsize=4096)
def _before(span: LocalSpan, start_us: int) -> int | None:
    zone = ZoneInfo(span.tz)
    try:
        shown = (_ORIGIN + timedelta(microseconds=start_us)).astimezone(zone)
        local = shown.replace(tzinfo=None, fold=0)
        if span.by_date:
            midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
            earlier = span.earlier_date(midnight)
            return None if earlier is None else local_instants(earlier, zone)[0]
        earlier = span.earlier_date(local)
        if earlier is None:
            return None
        instant = earlier.replace(tzinfo=zone, fold=shown.fold).astimezone(UTC)
        skipped = instant.astimezone(zone).replace(tzinfo=None, fold=0) != earlier
    except OverflowError:  # before the year 1
        return None
    return None if skipped else (instant - _ORIGIN) // _MICROSECOND
