"""What a running job reports: a Progress after every batch, a Report at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from millstream.choices import did_you_mean


@dataclass(frozen=True)
class Progress:
    """One committed batch. Counts are events; ``lag`` is unread records by ``topic/partition``.

    ``late`` counts an event once, also if several parallel steps found it late (the ledger has the count of
    each). ``behind_s`` is how far the views are behind the log: the age of the oldest record that they do
    not reflect, or the duration of the batch if they reflect all; None before anything was read.
    ``state_bytes`` is the size of the operators' state. ``false_positive_rates`` is, for each dedup with
    Bloom filters, the current probability that it takes a new event for a repeat. ``object_store`` counts the
    requests and bytes that the batch cost, where the state is on one: ``puts``, ``gets``, ``lists``,
    ``deletes``, ``retries``, ``bytes_up``, ``bytes_down``, and the ``cache_hits`` that cost none; a count of 0 is not there.
    ``wait_us`` is for how long the batch waited for the answers, that of all its tasks together.
    """

    app: str
    batch_id: int
    at: datetime
    duration_ms: float
    read: int
    emitted: int
    held: int
    late: int
    filtered: int
    dead: int
    duplicate: int
    watermark: datetime | None
    lag: Mapping[str, int]
    behind_s: float | None
    state_bytes: int
    false_positive_rates: Mapping[str, float] = field(default_factory=dict)
    object_store: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        values["at"] = self.at.isoformat()
        values["watermark"] = self.watermark.isoformat() if self.watermark else None
        return values


def largest_batch(known: Mapping[str, Any] | None, progress: Progress) -> dict[str, Any]:
    """Return the batch that read most, of the one that is ``known`` and this one; of equal ones the newer.

    Its speed is the nearest to that of reading the log again, as small batches are mostly overhead.
    """
    if known is not None and known["read"] > progress.read:
        return dict(known)
    return {
        "batch_id": progress.batch_id,
        "read": progress.read,
        "duration_ms": progress.duration_ms,
    }


UntilOption = Literal["stopped", "caught-up"]
UNTIL_OPTIONS = get_args(UntilOption)
Until = UntilOption | Callable[[Progress], bool]
"""How long a run goes on: see :meth:`millstream.App.run`."""

_EXIT_COUNTS = ("late", "dead", "duplicate", "filtered")


def format_share(share: float) -> str:
    """Return a small probability as a text: ``1 in 20,000``."""
    return f"1 in {1 / share:,.0f}" if share > 0 else "none of the"


def describe_created_topic(topic: str, others: Sequence[str]) -> str:
    """Return the notice that a run created a topic that it reads, by which a misspelt name shows."""
    there = ", ".join(others) or "none"
    near = did_you_mean(topic, others)
    return f"created topic {topic!r} (it did not exist; topics here: {there}){near and f'.{near}'}"


@dataclass(frozen=True)
class Report:
    """What a run did. ``reason`` says why it ended: caught-up, timeout, count, condition, stopped.

    Counts are events over the whole run; ``seconds`` is from the call of run to its return; ``alarms`` are
    the messages of the app's alarms; ``false_positive_rates`` are those of the last batch: see
    :class:`Progress`. ``failed_steps`` had more dead letters than the app's ``dead_max`` allows.
    ``created_topics`` did not exist, and were created empty; ``other_topics`` are those that the log had.
    """

    app: str
    reason: str
    batches: int
    seconds: float
    read: int
    late: int
    filtered: int
    dead: int
    duplicate: int
    watermark: datetime | None
    lag: Mapping[str, int]
    alarms: tuple[str, ...] = ()
    false_positive_rates: Mapping[str, float] = field(default_factory=dict)
    failed_steps: tuple[str, ...] = ()
    created_topics: tuple[str, ...] = ()
    other_topics: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no step failed. `millstream run` ends with the exit code 1 where one did."""
        return not self.failed_steps

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        values["watermark"] = self.watermark.isoformat() if self.watermark else None
        return values

    def __str__(self) -> str:
        rate = self.read / self.seconds if self.seconds else 0.0
        lag = sum(self.lag.values())
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        counts = [f"{name} {getattr(self, name):,}" for name in _EXIT_COUNTS]
        lines = [
            f"{self.app}: {self.reason} after {batches} in {self.seconds:.1f} s",
            f"  read {self.read:,} events ({rate:,.0f} a second), {lag:,} unread",
            f"  {', '.join(counts)}",
            f"  watermark {self.watermark.isoformat() if self.watermark else 'not yet set'}",
            *(f"  alarm: {message}" for message in self.alarms),
            *(
                f"  {describe_created_topic(name, self.other_topics)}"
                for name in self.created_topics
            ),
            *(
                ["  nothing was read: look at the names of the topics"]
                if self.created_topics and not self.read
                else []
            ),
            *(
                f"  {step} takes {format_share(rate)} new events for repeats"
                for step, rate in self.false_positive_rates.items()
            ),
        ]
        return "\n".join(lines)
