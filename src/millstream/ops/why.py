"""Why a window is open, and why events were late: the status of an app, in sentences.

A window closes when the watermark of its step reaches its end plus the lateness. The watermark is the
minimum over the active inputs, an input's the minimum over its active partitions. So one partition holds it
back, and an event there would advance it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from millstream.durations import format_us
from millstream.errors import ConfigError
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.views.state_store.store import StateStore

_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class WatermarkReport:
    """The watermark of a step. ``held_by`` names what holds it back, the slowest first."""

    step: str
    watermark: datetime | None
    since: datetime
    since_batch_id: int
    held_by: tuple[str, ...]
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "step": self.step,
            "watermark": None if self.watermark is None else self.watermark.isoformat(),
            "since": self.since.isoformat(),
            "since_batch_id": self.since_batch_id,
            "held_by": list(self.held_by),
            "sentences": list(self.sentences),
        }


@dataclass(frozen=True)
class LateReport:
    """The late events of a step. ``missed_by_us`` is the most by which one missed, if known."""

    step: str
    events: int
    missed_by_us: int
    last_batch_id: int
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = {name: getattr(self, name) for name in ("step", "events", "missed_by_us")}
        return {**values, "last_batch_id": self.last_batch_id, "sentences": list(self.sentences)}


def why_open(store: StateStore, app: str, step: str | None = None) -> list[WatermarkReport]:
    """Return for each step with windows what holds its watermark back, since when, and what advances it.

    Raises:
        ConfigError: the app has no such step.
    """
    status = store.status(app)
    times = _of_step(status.get("time", {}), step, app)
    return [_open(name, time, status) for name, time in times.items()]


def why_late(store: StateStore, app: str, step: str | None = None) -> list[LateReport]:
    """Return for each step how many events were late, and by how much they missed.

    Raises:
        ConfigError: the app has no such step.
    """
    status = store.status(app)
    known = dict.fromkeys([*status.get("time", {}), *status.get("late", {})])
    if step is not None:
        _of_step(known, step, app)
    late = status.get("late", {})
    return [_late(name, counts) for name, counts in late.items() if step in (None, name)]


def _of_step(by_step: Mapping[str, Any], step: str | None, app: str) -> Mapping[str, Any]:
    if step is None:
        return by_step
    if step not in by_step:
        raise ConfigError(
            f"The app {app!r} has no step {step!r} that waits for time. "
            f"It has {', '.join(repr(name) for name in by_step) or 'none yet'}."
        )
    return {step: by_step[step]}


def _open(step: str, time: Mapping[str, Any], status: Mapping[str, Any]) -> WatermarkReport:
    watermark = _moment(time["watermark_us"])
    since = datetime.fromisoformat(time["since"])
    held_by = [
        held
        for name, clock in time["clocks"].items()
        if clock["active"] and clock["watermark"] <= time["watermark_us"]
        for held in _holders(name, clock, status)
    ]
    stands = f"at {_format_time(watermark)}" if watermark else "not set yet"
    first = (
        f"{step}: its watermark is {stands}, since batch {time['since_batch_id']} "
        f"({_format_time(since)}). A window is open while that is before its end and the lateness."
    )
    rest = [sentence for held in held_by for sentence in held.sentences()]
    if not held_by and any(clock["advances"] for clock in time["clocks"].values()):
        rest = ["Every input is idle, so it goes on with running time (idle_advance)."]
    elif not held_by:
        rest = [
            "Every input is idle, so it holds until an event comes.",
            "watermark(idle_advance=True) would let it go on with running time.",
        ]
    names = tuple(held.name for held in held_by)
    return WatermarkReport(step, watermark, since, time["since_batch_id"], names, (first, *rest))


@dataclass(frozen=True)
class _WatermarkHolder:
    """A partition, or an upstream step, that holds a watermark back."""

    name: str
    reached: datetime | None
    ahead: datetime | None
    unread: int | None
    idle_ms: int | None
    producers: tuple[str | None, ...] = ()  # some of those that hold it
    producer_count: int = 0

    def sentences(self) -> Iterator[str]:
        if self.reached is None:
            yield f"{self.name} holds it: no event has come from it yet."
        else:
            ahead = ""
            if self.ahead is not None and self.ahead > self.reached:
                by = format_us((self.ahead - self.reached) // timedelta(microseconds=1))
                ahead = f"; another is at {_format_time(self.ahead)}, {by} ahead"
            yield f"{self.name} holds it: it has reached {_format_time(self.reached)}{ahead}."
        if self.producers:
            named = ", ".join(repr(name) for name in self.producers)
            more = self.producer_count - len(self.producers)
            others = f" and {more:,} others" if more > 0 else ""
            yield f"Of its producers the slowest: {named}{others}."
        if self.unread is None:
            yield "It moves when the step above moves."
        elif self.unread:
            yield f"It moves as the {self.unread:,} unread records of it are read."
        elif self.idle_ms is None:
            yield (
                "It moves when a later event comes to it. It is never left out: "
                'watermark(idle="1 minute") would leave it out while it is quiet.'
            )
        else:
            quiet = format_us(self.idle_ms * 1000)
            yield (
                "It moves when a later event comes to it, or when it has been quiet for "
                f"{quiet} of running time."
            )


def _holders(
    name: str, clock: Mapping[str, Any], status: Mapping[str, Any]
) -> list[_WatermarkHolder]:
    """Return the slowest active partitions of an input; of an upstream step, the step."""
    source = status.get("sources", {}).get(name)
    if source is None:
        return [
            _WatermarkHolder(f"the step {name!r}", _moment(clock["watermark"]), None, None, None)
        ]
    topic, reached = source["topic"], clock["partitions"]
    lag = status.get("lag", {})
    numbers = {int(number) for number in reached}
    numbers |= {int(n.rpartition("/")[2]) for n in lag if n.rpartition("/")[0] == topic}
    active = {
        n: reached.get(str(n), NO_WATERMARK) for n in sorted(numbers) if n not in clock["idle"]
    }
    least, most = (
        min(active.values(), default=NO_WATERMARK),
        max(active.values(), default=NO_WATERMARK),
    )
    return [
        _WatermarkHolder(
            f"{topic}/{number}",
            _moment(at_us),
            _moment(most),
            int(lag.get(f"{topic}/{number}", 0)),
            source["idle_ms"],
            *_producers(clock["slowest"].get(str(number))),
        )
        for number, at_us in active.items()
        if at_us == least
    ]


def _producers(slowest: Mapping[str, Any] | None) -> tuple[tuple[str | None, ...], int]:
    return ((), 0) if slowest is None else (tuple(slowest["names"]), slowest["count"])


def _late(step: str, counts: Mapping[str, Any]) -> LateReport:
    events, missed_us = counts["events"], counts["late_by_us_max"]
    count = "1 event" if events == 1 else f"{events:,} events"
    first = f"{step}: {count} came too late, the last in batch {counts['batch_id']}."
    missed = (
        f"The latest missed by {format_us(missed_us)}: that much more lateness, or delay of the "
        "watermark, would have taken all of them in."
        if missed_us
        else "By how much they missed is not known for this step."
    )
    return LateReport(step, events, missed_us, counts["batch_id"], (first, missed))


def _moment(at_us: int) -> datetime | None:
    return None if at_us <= NO_WATERMARK else _START + timedelta(microseconds=at_us)


def _format_time(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")
