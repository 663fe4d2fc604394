"""The share of dead letters among the rows that a step read: a large one means wrong schema or code.

Some dead letters are expected. A step at which most rows are dead letters did not do its work, and the
exit code of the run must say so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from millstream.errors import ConfigError

_log = logging.getLogger(__name__)


def check_dead_letter_max(share: float) -> float:
    """Make sure that a number is a share.

    Raises:
        ConfigError: it is not from 0 to 1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(
            f"dead_max is {share!r}. Give the share of dead letters above which a run has failed, from "
            "0 to 1, such as 0.5; with 1 no run has."
        )
    return float(share)


@dataclass
class DeadLetterShare:
    """Adds up the rows and dead letters of each step of a run; reports each failed step once.

    ``share_max`` is the share above which a step has failed. It applies to the whole run, so that it does
    not depend on batches.
    """

    share_max: float
    on_alarm: Callable[[str], None] | None = None
    _read: Counter[str] = field(default_factory=Counter)
    _dead: Counter[str] = field(default_factory=Counter)
    _reported: set[str] = field(default_factory=set)

    def observe(self, step_counts: Mapping[str, Counter[str]]) -> None:
        """Add the counts of a committed batch."""
        for step, counts in step_counts.items():
            self._read[step] += counts["read"]
            self._dead[step] += counts["dead"]
        for step, message in self.failed_steps().items():
            if step not in self._reported:
                self._reported.add(step)
                _log.warning("%s", message)
                if self.on_alarm is not None:
                    self.on_alarm(message)

    def failed_steps(self) -> dict[str, str]:
        """Return the steps with too many dead letters, each with a message that says so."""
        return {
            step: (
                f"{dead:,} of the {self._read[step]:,} rows that {step} read are dead letters, more than "
                f"{self.share_max:.0%}: `millstream dead list` says why. Correct the schema or the "
                "code, then `millstream dead replay`; dead_max= of the app allows more."
            )
            for step, dead in self._dead.items()
            if dead > self.share_max * self._read[step]
        }
