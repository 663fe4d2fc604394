"""How many of the rows that a step read are dead: too many say that schema or code is wrong.

A dead record is an answer that is missing. Some are as expected; a step at which most are dead did
not do its work, and whoever looks at the exit code of a run must learn of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from millstream.errors import ConfigError

_log = logging.getLogger(__name__)


def check_dead_letter_max(share: float) -> float:
    """Make sure that a share is one.

    Raises:
        ConfigError: it is not from 0 to 1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(
            f"dead_max is {share!r}. Give the share of dead rows above which a run has failed, from "
            "0 to 1, such as 0.5; with 1 no run has."
        )
    return float(share)


@dataclass
class DeadLetterShare:
    """Adds up what each step of a run read, and what of it was dead; speaks of each step once.

    ``share_max`` is the share above which a step has failed. A share counts as of the whole run, so
    that it does not depend on batches.
    """

    share_max: float
    on_alarm: Callable[[str], None] | None = None
    _read: Counter[str] = field(default_factory=Counter)
    _dead: Counter[str] = field(default_factory=Counter)
    _reported: set[str] = field(default_factory=set)

    def observe(self, books: Mapping[str, Counter[str]]) -> None:
        """Take in the books of a batch that was committed."""
        for step, line in books.items():
            self._read[step] += line["read"]
            self._dead[step] += line["dead"]
        for step, words in self.failed_steps().items():
            if step not in self._reported:
                self._reported.add(step)
                _log.warning("%s", words)
                if self.on_alarm is not None:
                    self.on_alarm(words)

    def failed_steps(self) -> dict[str, str]:
        """Give the steps at which too many rows are dead, each with a sentence that says so."""
        return {
            step: (
                f"{dead:,} of the {self._read[step]:,} rows that {step} read are dead, more than "
                f"{self.share_max:.0%}: `millstream dead list` says why. Correct the schema or the "
                "code, then `millstream dead replay`; dead_max= of the app allows more."
            )
            for step, dead in self._dead.items()
            if dead > self.share_max * self._read[step]
        }
