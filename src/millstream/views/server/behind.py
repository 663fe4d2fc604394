"""Why a job is behind: rules over its status and its last batches, and the sentences that say what they find.

The rules are published in docs/operate.md, in this order; `millstream why behind` and the page for operators say the
same:

=============  ================================================================================================
cause          it is one where
=============  ================================================================================================
failed         no run is alive, and the last one ended with an error or was killed
stopped        no run is alive otherwise
stopping       a run is alive and was asked to stop
starting       a run is alive, and has committed no batch within its first 5 minutes
stalled        records wait, and none was committed for longer: see :func:`_stalled`
unreadable     the end of a partition cannot be read, or is before what was read of it
was-down       records came while the job was down, and no batch since then left less than it read
overload       it does not catch up: more usually arrives than it can read
backlog        it catches up, and more waits than one batch has read; or it is not known whether it does
batch-limit    the last batch left records, and read nine tenths or more of what ``rows_per_batch`` allows
one-partition  one of several partitions has four fifths or more of what waits
watermark      a step's watermark stands, held by something, and batches after that have read records
slow-batches   records wait, and batches were at work nine tenths of the time or more
=============  ================================================================================================

Where nothing waits, only the rules that do not ask for it hold. What arrives, how fast it is read, and which phase
and step take the time is said in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple

from millstream.durations import format_us
from millstream.views.commit.batch_load import BatchLoad, batch_load

BehindCause = Literal[
    "failed",
    "stopped",
    "stopping",
    "starting",
    "stalled",
    "unreadable",
    "was-down",
    "overload",
    "backlog",
    "batch-limit",
    "one-partition",
    "watermark",
    "slow-batches",
]
START_MAX_S = 300.0  # Spark takes a minute on a busy machine
STALL_MIN_S = 60.0
_STALL_TIMES = 10  # as long as the longest batch
_FULL, _MOST, _BUSY = 0.9, 0.8, 0.9
_PARTITIONS_SHOWN = 3


class BehindFinding(NamedTuple):
    """A sentence; where it is a cause, which."""

    cause: BehindCause | None
    sentence: str


class HeldWatermark(NamedTuple):
    """The watermark of a step, since which batch it stands, and what holds it."""

    step: str
    since_batch_id: int
    held_by: tuple[str, ...]


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job at one moment.

    Args:
        status: As :class:`millstream.views.server.status.AppStatus` has it.
        records: Of the last batches, as the history has them.
        now: By the clock that the batches are dated with.
    """

    app: str
    status: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    now: datetime
    held: Sequence[HeldWatermark] = ()

    @cached_property
    def load(self) -> BatchLoad:
        """The load of the last batches."""
        return batch_load(self.records)

    @cached_property
    def waiting(self) -> dict[str, int]:
        """The partitions with unread records, as ``topic/partition``, those with most first."""
        counts = {_name(one): one["unread"] or 0 for one in self.status["partitions"]}
        return {name: n for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n}

    @property
    def unread(self) -> int:
        found: int = self.status["unread"]
        return found

    @property
    def waited_s(self) -> float:
        """For how long the oldest unread record has been there; without end, if it is not known or its time is to come."""
        since = self.status.get("unread_since")
        waited_s = (
            inf if since is None else (self.now - datetime.fromisoformat(since)).total_seconds()
        )
        return waited_s if waited_s >= 0 else inf

    @property
    def running(self) -> bool:
        found: bool = self.status["running"]
        return found


def findings(facts: JobFacts) -> list[BehindFinding]:
    """Return why a job is behind, in sentences: what waits, the causes by the rules above, and where its time goes."""
    return [found for rule in _RULES for found in rule(facts)]


def _headline(facts: JobFacts) -> Iterator[BehindFinding]:
    brokers = facts.status["brokers"]
    if facts.unread:
        yield BehindFinding(None, f"{facts.app} has {facts.unread:,} unread records.")
    elif any(True for _ in _unreadable(facts)):
        yield BehindFinding(None, f"{facts.app} has read all of what can be read.")
    else:
        there = "there was" if brokers else "there is"
        yield BehindFinding(None, f"{facts.app} has read all {there}.")
    if brokers:
        yield BehindFinding(
            None,
            f"Its log is {brokers}, which is not read here: what is unread was counted after its last batch.",
        )


def _not_running(facts: JobFacts) -> Iterator[BehindFinding]:
    if facts.running:
        return
    last = ""
    if facts.records:
        ago_s = (facts.now - _at(facts.records[-1])).total_seconds()
        last = f" Its last batch was committed {_shown(ago_s)} ago."
    failure = facts.status["failure"]
    if failure:
        why = f"{failure['kind']}: {failure['reason']} {failure['advice']}"
        yield BehindFinding("failed", f"It does not run: {why}{last}")
    else:
        yield BehindFinding(
            "stopped", f"It does not run: it was stopped. Run it: millstream run.{last}"
        )


def _stopping(facts: JobFacts) -> Iterator[BehindFinding]:
    if facts.running and facts.status["stopping"]:
        yield BehindFinding(
            "stopping", "It was asked to stop, and begins no further batch: millstream stop."
        )


def _stalled(facts: JobFacts) -> Iterator[BehindFinding]:
    """Say that a run commits nothing.

    A run without a batch has 5 minutes from its start. After its first one it has a minute from the last, or ten times the
    longest of the last ones, if that is more. Both begin when the oldest record that waits came, if that was later: a
    batch is due as soon as a record waits, and not before.
    """
    if not facts.running:
        return
    run = facts.status["runs"][-1]
    own = [one for one in facts.records if one["run"] == run["run"]]
    begun = datetime.fromisoformat(run["since"])
    quiet_s = (facts.now - (_at(own[-1]) if own else begun)).total_seconds()
    longest_s = max((one["duration_ms"] / 1000 for one in own), default=0.0)
    allowed_s = max(STALL_MIN_S, _STALL_TIMES * longest_s) if own else START_MAX_S
    if not own and quiet_s <= allowed_s:
        yield BehindFinding(
            "starting",
            f"It started {_shown(quiet_s)} ago, and has committed no batch yet.",
        )
    elif facts.unread and min(quiet_s, facts.waited_s) > allowed_s:
        usual = f", and the longest of the last ones took {_shown(longest_s)}" if own else ""
        yield BehindFinding(
            "stalled",
            f"No batch was committed for {_shown(quiet_s)}{usual}: the process {run['pid']} is stopped, or waits for "
            "something that does not respond, such as a sink. spark.log in the folder of the app may say what.",
        )


def _unreadable(facts: JobFacts) -> Iterator[BehindFinding]:
    if facts.status["brokers"]:
        return
    for one in facts.status["partitions"]:
        if one["end"] is None:
            yield BehindFinding(
                "unreadable",
                f"How much of {_name(one)} is unread is not known, as it cannot be read: millstream doctor.",
            )
        elif one["end"] < one["position"]:
            yield BehindFinding(
                "unreadable",
                f"{_name(one)} ends at {one['end']:,}, before {one['position']:,}, which was read up to: it was deleted "
                "and created again, or cut off. The app reads none of it: millstream doctor.",
            )


def _was_down(facts: JobFacts) -> Iterator[BehindFinding]:
    if not facts.records or not facts.unread:
        return
    newest = facts.records[-1]["run"]
    older = [one for one in facts.records if one["run"] != newest]
    run = [one for one in facts.records if one["run"] == newest]
    if not older or any(one["unread"] < one["read"] for one in run):
        return
    first, before = run[0], older[-1]
    down_s = (_at(first) - _at(before)).total_seconds() - first["duration_ms"] / 1000
    came = first["read"] + first["unread"] - before["unread"]
    if down_s > 0 and came > 0:
        yield BehindFinding(
            "was-down",
            f"It did not run for {_shown(down_s)} before batch {first['batch_id']:,}, and {came:,} records came in that "
            "time: it has not caught up since.",
        )


def _rates(facts: JobFacts) -> Iterator[BehindFinding]:
    load = facts.load
    if load.arriving_per_s is None or load.read_per_s is None or load.busy is None:
        return
    yield BehindFinding(
        None,
        f"In its last {load.batches:,} batches ({_shown(load.seconds)}), {load.arriving_per_s:,.0f} records a second "
        f"arrived, and it read {load.read_per_s:,.0f}; it was at work {load.busy:.0%} of the time.",
    )


def _catch_up(facts: JobFacts) -> Iterator[BehindFinding]:
    load = facts.load
    if not facts.unread or not facts.running or not load.batches:
        return
    catch_up = load.catch_up(facts.unread)
    more: BehindCause | None = "backlog" if facts.unread > load.capacity.records else None
    if catch_up.never:
        yield BehindFinding(
            "overload",
            "At the rate of its fullest batches it never catches up: more arrives than it can process. Give it more "
            "cores or partitions (millstream rescale), or make the slowest step cheaper.",
        )
    elif catch_up.seconds is not None:
        shown = _shown(max(1.0, catch_up.seconds))
        yield BehindFinding(more, f"At the rate of its fullest batches it catches up in {shown}.")
    elif more:
        yield BehindFinding(
            more,
            f"When it catches up is not known yet: no batch had more than {load.capacity.records:,} records, and the "
            "next one will have more.",
        )


def _batch_limit(facts: JobFacts) -> Iterator[BehindFinding]:
    last = facts.records[-1] if facts.records else {}
    rows_max = last.get("rows_max")  # None: of a version that did not record it
    if facts.unread and rows_max and last["unread"] and last["read"] >= _FULL * rows_max:
        yield BehindFinding(
            "batch-limit",
            f"Its last batch read {last['read']:,} records, and a batch may read {rows_max:,} (rows_per_batch): with more, "
            "less of the time is spent on what every batch takes.",
        )


def _one_partition(facts: JobFacts) -> Iterator[BehindFinding]:
    count = len(facts.status["partitions"])
    if not facts.waiting or count < 2:
        return
    name, most = next(iter(facts.waiting.items()))
    if most >= _MOST * facts.unread:
        yield BehindFinding(
            "one-partition", f"{most / facts.unread:.0%} of them are in {name}, one of {count}."
        )
    elif len(facts.waiting) > 1:
        shown = [*facts.waiting.items()][:_PARTITIONS_SHOWN]
        named = ", ".join(f"{each} ({waiting:,})" for each, waiting in shown)
        yield BehindFinding(None, f"Most are in {named}.")


def _watermark(facts: JobFacts) -> Iterator[BehindFinding]:
    for held in facts.held:
        after = [one["read"] for one in facts.records if one["batch_id"] > held.since_batch_id]
        if held.held_by and any(after):
            yield BehindFinding(
                "watermark",
                f"Windows of {held.step!r} wait: its watermark stands since batch {held.since_batch_id:,}, while "
                f"{sum(after):,} records were read. {held.held_by[0]} holds it: millstream why open {facts.app}.",
            )


def _time(facts: JobFacts) -> Iterator[BehindFinding]:
    load = facts.load
    slow: BehindCause | None = None
    if facts.running and facts.unread and load.busy is not None and load.busy >= _BUSY:
        slow = "slow-batches"
    total_ms = sum(load.phases_ms.values())
    if total_ms:
        phase, most_ms = max(load.phases_ms.items(), key=lambda item: item[1])
        yield BehindFinding(
            slow, f"Of the time of a batch, {most_ms / total_ms:.0%} is {_PHASE[phase]}."
        )
    worked_ms = sum(step.worked_ms for step in load.steps)
    if worked_ms:
        slowest = load.steps[0]
        yield BehindFinding(
            slow,
            f"The step that works longest is {slowest.step!r}: {slowest.worked_ms / worked_ms:.0%} of the work of all "
            f"steps, for {slowest.read:,} rows.",
        )


_RULES: tuple[Callable[[JobFacts], Iterator[BehindFinding]], ...] = (
    _headline,
    _not_running,
    _stopping,
    _stalled,
    _unreadable,
    _was_down,
    _one_partition,
    _rates,
    _catch_up,
    _batch_limit,
    _watermark,
    _time,
)
_PHASE = {
    "plan": "planning and waiting for Spark",
    "read": "reading, decoding and the steps before the first shuffle",
    "stages": "the operators behind shuffles",
    "outputs": "writing large outputs",
    "collect": "collecting results",
    "commit": "the commit to the sinks",
}


def _name(partition: Mapping[str, Any]) -> str:
    return f"{partition['topic']}/{partition['partition']}"


def _at(record: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(record["at"])


def _shown(seconds: float) -> str:
    return format_us(max(0, round(seconds)) * 1_000_000)
