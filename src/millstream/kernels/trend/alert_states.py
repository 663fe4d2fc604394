"""The states of an alert, window by window of a key: ok, firing, and ok again.

==========  ==========================================  ============================================
state       a row comes                                 what follows
==========  ==========================================  ============================================
ok          ``when`` is true, and has been for           firing; the row is emitted as "firing"
            ``for_windows`` windows without a gap
ok          otherwise                                   ok; the run grows if ``when`` is true, and is
                                                        over if not
firing      ``recover`` is true                         ok, with no run; the row is emitted as
                                                        "resolved"
firing      otherwise                                   firing
==========  ==========================================  ============================================

A window without a row is a gap: it ends a run, as a row with ``when`` false does. It resolves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

FIRING = "firing"
RESOLVED = "resolved"


class WindowRow(NamedTuple):
    """What of a row of a window decides: its key, by number, its span, and the two conditions."""

    key: int
    start: int
    end: int
    when: bool
    recover: bool


@dataclass
class AlertState:
    """The state of a key: whether it fires, and if not the run of windows up to ``end``."""

    firing: bool = False
    run: int = 0
    end: int = 0

    def take(self, row: WindowRow, for_windows: int) -> str | None:
        """Take the next row of the key; return the transition that it makes, if any."""
        if self.firing:
            if not row.recover:
                return None
            self.firing, self.run = False, 0
            return RESOLVED
        if not row.when:
            self.run = 0
            return None
        self.run = self.run + 1 if self.run and self.end == row.start else 1
        self.end = row.end
        if self.run < for_windows:
            return None
        self.firing, self.run = True, 0
        return FIRING


def transitions(
    rows: Iterable[WindowRow], states: list[AlertState], for_windows: int
) -> Iterator[str | None]:
    """Yield the transition that each row makes, if any; rows of a key are in the order of windows."""
    for row in rows:
        yield states[row.key].take(row, for_windows)
