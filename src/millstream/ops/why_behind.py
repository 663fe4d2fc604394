"""Why a job is behind: how much is unread, how fast it arrives and is read, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.durations import format_us
from millstream.views.commit.batch_load import RECENT_BATCHES, BatchLoad, batch_load
from millstream.views.server.status import AppStatus
from millstream.views.state_store.store import StateStore

_PARTITIONS_SHOWN = 3
_MOST = 0.5


@dataclass(frozen=True)
class BehindReport:
    """How far a job is behind. ``catch_up_s``: None if it does not catch up at this rate, or it is not known."""

    app: str
    running: bool
    unread: int
    behind_s: float | None
    catch_up_s: float | None
    load: BatchLoad
    partitions: Mapping[str, int]
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = ("app", "running", "unread", "behind_s", "catch_up_s")
        plain = {name: getattr(self, name) for name in names}
        return {
            **plain,
            "partitions": dict(self.partitions),
            "load": self.load.to_dict(),
            "sentences": list(self.sentences),
        }


def why_behind(store: StateStore, app: str, log: Path) -> BehindReport:
    """Return how far a job is behind, and what takes its time. It need not run."""
    status = AppStatus(app, log, log / "apps" / app).read(store)
    load = batch_load(store.batches(app, limit=RECENT_BATCHES))
    unread = status["unread"]
    lag = {f"{one['topic']}/{one['partition']}": one["unread"] for one in status["partitions"]}
    slow = dict(sorted(lag.items(), key=lambda item: -(item[1] or 0)))
    partitions = {name: count for name, count in slow.items() if count}
    return BehindReport(
        app,
        status["running"],
        unread,
        status["behind_s"],
        load.catch_up(unread).seconds if status["running"] else None,
        load,
        partitions,
        tuple(_sentences(app, status, load, partitions)),
    )


def _sentences(
    app: str, status: Mapping[str, Any], load: BatchLoad, partitions: Mapping[str, int]
) -> Iterator[str]:
    unread = status["unread"]
    there = "there was" if status["brokers"] else "there is"
    yield f"{app} has {unread:,} unread records." if unread else f"{app} has read all {there}."
    if status["brokers"]:
        yield (
            f"Its log is {status['brokers']}, which is not read here: what is unread was counted after its last batch."
        )
    if not status["running"]:
        failure = status["failure"]
        yield (
            f"It does not run: {failure['kind']}: {failure['reason']} {failure['advice']}"
            if failure
            else "It does not run: it was stopped. Run it: millstream run."
        )
    if (partitions and len(partitions) < len(status["partitions"])) or len(partitions) > 1:
        most = list(partitions.items())[:_PARTITIONS_SHOWN]
        yield "Most are in " + ", ".join(f"{name} ({count:,})" for name, count in most) + "."
    if load.batches:
        yield from _speed(status, load)
        yield from _time(load)


def _speed(status: Mapping[str, Any], load: BatchLoad) -> Iterator[str]:
    if load.arriving_per_s is None or load.read_per_s is None or load.busy is None:
        return
    yield (
        f"In its last {load.batches:,} batches ({format_us(int(load.seconds) * 1_000_000)}), "
        f"{load.arriving_per_s:,.0f} records a second arrived, and it read {load.read_per_s:,.0f}; it was at work "
        f"{load.busy:.0%} of the time."
    )
    if not status["unread"] or not status["running"]:
        return
    catch_up = load.catch_up(status["unread"])
    if catch_up.seconds is not None:
        shown = format_us(max(1, round(catch_up.seconds)) * 1_000_000)
        yield f"At the rate of its fullest batches it catches up in {shown}."
    elif catch_up.never:
        yield (
            "At the rate of its fullest batches it never catches up: more arrives than it can process. Give it more "
            "cores or partitions (millstream rescale), or make the slowest step cheaper."
        )
    else:
        yield (
            f"When it catches up is not known yet: no batch had more than {load.capacity.records:,} records, and the "
            "next one will have more."
        )


def _time(load: BatchLoad) -> Iterator[str]:
    total_ms = sum(load.phases_ms.values())
    if total_ms:
        phase, most_ms = max(load.phases_ms.items(), key=lambda item: item[1])
        yield f"Of the time of a batch, {most_ms / total_ms:.0%} is {_PHASE[phase]}."
    worked_ms = sum(step.worked_ms for step in load.steps)
    if worked_ms:
        slowest = load.steps[0]
        yield (
            f"The step that works longest is {slowest.step!r}: {slowest.worked_ms / worked_ms:.0%} of the work of all "
            f"steps, for {slowest.read:,} rows."
        )


_PHASE = {
    "plan": "planning and waiting for Spark",
    "read": "reading, decoding and the steps before the first shuffle",
    "stages": "the operators behind shuffles",
    "outputs": "writing large outputs",
    "collect": "collecting results",
    "commit": "the commit to the sinks",
}
