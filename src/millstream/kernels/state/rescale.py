"""Rescaling: the state of some buckets becomes that of another number of buckets, by its manifests alone.

A bucket is a range of hashes. A new bucket gets, of each old one that its range meets, the runs that may have rows of
its keys: a whole run, if all of the old bucket is in its range, and otherwise a share of it
(:class:`~millstream.kernels.state.sorted_runs.Share`). So no run is read or written here, and the cost does not
depend on how much is held. Shares of two buckets that are put together again become one.

What is not found by the hash of a key, the operator names (:class:`~millstream.kernels.state.layout.StateLayout`). The
state of an operator without keys is in one bucket, and stays whole.

============================  =============================================================================
what of several buckets       becomes in one
============================  =============================================================================
runs of a slot                one list; those of a bucket keep their order, the larger of two stand first
numbers given out in each     those of the second and following are raised by what had been given out
events given out (spent)      their sum; where a bucket is divided, the slot is unsettled
versions                      the highest
times that were asked for     the earliest: a timer that comes again does nothing
rows waiting for a time       their sum; where a bucket is divided, not known
time, and what all agree in   the same
============================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream.errors import CorruptionError
from millstream.kernels.state.appended_rows import chunks_of, divided_flag
from millstream.kernels.state.keyhash import Hashes, buckets_of
from millstream.kernels.state.layout import OperatorMessage, StateLayout
from millstream.kernels.state.sorted_runs import Run, Share
from millstream.kernels.state.timers import WAITING

_HALF_BITS = 32  # of a hash, by which buckets are ranges: see `buckets_of`
_SAME = (
    "watermark",
    "clocks",
    "seed",
)  # the same in all buckets, as all get the same messages about time
_Range = tuple[int, int]


def hash_range(bucket: int, count: int) -> _Range:
    """Return the hashes of one of ``count`` buckets, ``[low, high)``."""
    low, high = (
        -(-(number << _HALF_BITS) // count) << _HALF_BITS for number in (bucket, bucket + 1)
    )
    return low, high


def rescale_operator(
    step: str,
    parts: Mapping[int, OperatorMessage],
    layout: StateLayout,
    *,
    before: int,
    after: int,
    only: Hashes | None = None,
) -> dict[int, OperatorMessage]:
    """Return an operator's parts of the manifests of ``after`` buckets, given those of ``before``.

    Args:
        step: Its name.
        parts: Its parts by bucket. A bucket that has had no batch yet has none.
        layout: What it keeps besides rows of keys.
        before: How many buckets there are.
        after: How many there are to be.
        only: The one hash of all its rows, if it has no keys.

    Raises:
        CorruptionError: the buckets differ in what is the same in all.
    """
    if not parts:
        return {}
    same = {name: _agreed(step, name, [part[name] for part in parts.values()]) for name in _SAME}
    if only is not None:
        made = _whole(parts, before, after, only)
    else:
        made = {
            bucket: _NewBucket.of(step, parts, before, hash_range(bucket, after), layout).message()
            for bucket in range(after)
        }
    return {bucket: {**message, **same} for bucket, message in made.items()}


def _whole(
    parts: Mapping[int, OperatorMessage], before: int, after: int, only: Hashes
) -> dict[int, OperatorMessage]:
    """Give the state of the one bucket that has all to the one that is to have it; the others have none."""
    old, new = (int(buckets_of(only, count)[0]) for count in (before, after))
    made = {bucket: _nothing() for bucket in range(after)}
    if old in parts:
        made[new] = parts[old]
    return made


def _nothing() -> OperatorMessage:
    return {"runs": {}, "emitted": {}, "values": {}}


def _agreed(step: str, name: str, values: Sequence[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    raise CorruptionError(
        f"The buckets of the state of step {step!r} differ in {name!r}, which is the same in all: one of them was restored "
        "from elsewhere. Restore the app's whole folder from where you keep copies of it, or reset the app to "
        "rebuild it from the log."
    )


@dataclass(frozen=True)
class _Origin:
    """An old bucket, as far as it is in a new one. ``range_`` are its hashes, ``part`` those of them that are."""

    message: OperatorMessage
    range_: _Range
    part: _Range
    raised: Mapping[str, int]  # by how much the numbers that each counter has given out are raised

    @property
    def is_divided(self) -> bool:
        return self.range_ != self.part

    @property
    def values(self) -> Mapping[str, Any]:
        values: Mapping[str, Any] = self.message["values"]
        return values

    def slots(self, family: str) -> dict[int, list[list[Run]]]:
        """Return the runs of a family by slot, oldest first, each with its parts."""
        slots: dict[int, list[list[Run]]] = {}
        for entry in self.message["runs"].get(family, ()):
            run = Run.from_message(entry)
            runs = slots.setdefault(run.slot, [])
            if run.part:
                runs[-1].append(run)
            else:
                runs.append([run])
        return slots


@dataclass
class _NewBucket:
    """One new bucket of an operator, and the old ones that its range meets, in the order of hashes."""

    step: str
    layout: StateLayout
    origins: list[_Origin]
    families: dict[str, dict[int, list[Run]]] = field(default_factory=dict)
    unsettled: dict[str, set[int]] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: str,
        parts: Mapping[int, OperatorMessage],
        before: int,
        range_: _Range,
        layout: StateLayout,
    ) -> _NewBucket:
        origins: list[_Origin] = []
        raised: dict[str, int] = {}
        for bucket in sorted(parts):
            own = hash_range(bucket, before)
            common = _intersection(own, range_)
            if common is None:
                continue
            origins.append(_Origin(parts[bucket], own, common, dict(raised)))
            for name, given in _given_out(parts[bucket], layout).items():
                raised[name] = raised.get(name, 0) + given
        return cls(step, layout, origins)

    def message(self) -> OperatorMessage:
        """Return the operator's part of the new bucket's manifest."""
        names = dict.fromkeys(name for origin in self.origins for name in origin.message["runs"])
        for name in names:
            self.families[name] = self._family(name)
        message: OperatorMessage = {
            "runs": {
                name: [run.to_message() for slot in sorted(slots) for run in slots[slot]]
                for name, slots in sorted(self.families.items())
            },
            "emitted": self._spent(),
            "values": self._values() | self.flags,
        }
        unsettled = {name: sorted(slots) for name, slots in sorted(self.unsettled.items()) if slots}
        return message | ({"unsettled": unsettled} if unsettled else {})

    # ── runs ────────────────────────────────────────────────────────────────────────────────

    def _family(self, name: str) -> dict[int, list[Run]]:
        by_slot: dict[int, list[list[list[Run]]]] = {}
        in_sets = self.layout.sets is not None and name.startswith(self.layout.sets[0])
        first_space = 0
        for origin in self.origins:
            for slot, runs in origin.slots(name).items():
                taken = self._taken(name, origin, runs)
                moved = [[replace(run, slot=slot + first_space) for run in one] for one in taken]
                by_slot.setdefault(slot + first_space, []).append(moved)
                if taken and self._is_unsettled(name, origin, slot, taken):
                    self.unsettled.setdefault(name, set()).add(slot + first_space)
            first_space += len(_spaces(origin.values, self.layout)) if in_sets else 0
        if name in map(
            chunks_of, self.layout.appended
        ):  # places are counted from the first chunk on
            return {
                slot: _flat([run for one in runs for run in one]) for slot, runs in by_slot.items()
            }
        return {slot: _flat(_together(runs)) for slot, runs in by_slot.items()}

    def _taken(self, name: str, origin: _Origin, runs: Iterable[list[Run]]) -> list[list[Run]]:
        """Return what of the runs of a slot the new bucket gets."""
        if name in map(chunks_of, self.layout.appended):
            if origin.is_divided:
                self.flags[divided_flag(name.removesuffix(chunks_of("")))] = True
            return list(runs)
        taken = []
        for parts in runs:
            ranges = zip(parts, _ranges(parts, origin.range_), strict=True)
            shares = [self._share(name, origin, run, range_) for run, range_ in ranges]
            found = [share for share in shares if share is not None]
            if found:
                taken.append(found)
        return taken

    def _is_unsettled(
        self, name: str, origin: _Origin, slot: int, taken: Iterable[list[Run]]
    ) -> bool:
        """Return whether it is not known how many events of a slot are held."""
        given_out = origin.message["emitted"].get(name, {}).get(str(slot), 0)
        was_unsettled = slot in origin.message.get("unsettled", {}).get(name, ())
        uncounted = not all(run.is_counted for parts in taken for run in parts)
        return was_unsettled or uncounted or (origin.is_divided and given_out != 0)

    def _share(self, name: str, origin: _Origin, run: Run, range_: _Range) -> Run | None:
        """Return the part of a run that the new bucket gets; None if it gets none."""
        common = _intersection(range_, origin.part)
        if common is None:
            return None
        raised = self._raised(name, origin) + (run.share.renumbered if run.share else 0)
        is_filter = name in self.layout.filters
        if common == range_ and len(self.origins) == 1 and run.share is None:
            return run
        counted = run.is_counted and (common == range_ or is_filter)
        (low, high), (old_low, old_high) = common, range_
        rows = run.rows if is_filter else max(1, run.rows * (high - low) // (old_high - old_low))
        share = Share(low, high, run.stored_rows, counted, raised)
        return replace(
            run, rows=min(rows, run.rows), events=run.events if counted else 0, share=share
        )

    def _raised(self, family: str, origin: _Origin) -> int:
        """Return by how much the numbers of a family's rows are raised."""
        if family in self.layout.appended:
            return origin.raised.get(family, 0)
        counters = (name for name, own in self.layout.numbered.items() if family in own)
        return sum(origin.raised.get(counter, 0) for counter in counters)

    # ── events and values ───────────────────────────────────────────────────────────────────

    def _spent(self) -> dict[str, dict[str, int]]:
        """Add up what had been given out, of the slots that there are."""
        spent: dict[str, dict[str, int]] = {}
        for origin in self.origins:
            for name, slots in origin.message["emitted"].items():
                for slot, events in slots.items():
                    if int(slot) in self.families.get(name, {}):
                        of_family = spent.setdefault(name, {})
                        of_family[slot] = of_family.get(slot, 0) + events
        return spent

    def _values(self) -> dict[str, Any]:
        names = dict.fromkeys(name for origin in self.origins for name in origin.values)
        if self.layout.sets is not None:
            names.pop(self.layout.sets[2], None)
        made = {name: self._value(name) for name in names}
        if self.layout.sets is not None:
            starts = [
                start + origin.raised.get(self.layout.sets[1], 0)
                for origin in self.origins
                for start in _spaces(origin.values, self.layout)
            ]
            made[self.layout.sets[2]] = starts
        return {name: value for name, value in made.items() if value is not None}

    def _value(self, name: str) -> Any:
        """Return the value of the new bucket; None if there is to be none."""
        held = [origin.values[name] for origin in self.origins if name in origin.values]
        if name in self.layout.numbered:
            return sum(held)
        if name == WAITING:
            return self._waiting()
        rule = _RULES.get(name.rpartition(".")[2])
        return _agreed(self.step, name, held) if rule is None else rule(held)

    def _waiting(self) -> dict[str, int | None]:
        counts: dict[str, int | None] = {}
        for origin in self.origins:
            for slot, rows in origin.values.get(WAITING, {}).items():
                known = counts.get(slot, 0)
                unknown = rows is None or known is None or origin.is_divided
                counts[slot] = None if unknown else (known or 0) + (rows or 0)
        return counts


def _elementwise(values: Sequence[Sequence[int]]) -> list[int]:
    return [max(numbers) for numbers in zip(*values, strict=True)]


def _if_same(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


# By the name of a value, or what follows its last dot. Others are the same in all buckets.
_RULES: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "version": max,
    "done": min,
    "divided": any,
    "clock_ms": max,
    "clocks": _elementwise,  # an answer of another bucket expires a little earlier
    "digest": _if_same,  # without it, the rows of a static table are compared again
}


def _given_out(message: OperatorMessage, layout: StateLayout) -> dict[str, int]:
    """Return how many numbers a bucket has given out, by counter; of appended rows, their places."""
    counters = {name: message["values"].get(name, 0) for name in layout.numbered}
    for family in layout.appended:
        chunks = message["runs"].get(chunks_of(family), ())
        counters[family] = sum(Run.from_message(entry).rows for entry in chunks)
    return counters


def _spaces(values: Mapping[str, Any], layout: StateLayout) -> list[int]:
    assert layout.sets is not None
    starts: list[int] = values.get(layout.sets[2], [0])
    return starts


def _intersection(one: _Range, other: _Range) -> _Range | None:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low < high else None


def _ranges(parts: Sequence[Run], whole: _Range) -> Iterator[_Range]:
    """Yield the range of hashes of each part of a run that may have rows of a whole range."""
    known = all(run.first for run in parts[1:])
    starts = [parts[0].first or whole[0], *(run.first for run in parts[1:]), whole[1]]
    for number, run in enumerate(parts):
        if run.share is not None:
            yield run.share.low, run.share.high
        else:
            yield (starts[number], starts[number + 1]) if known else whole


def _together(lists: Sequence[list[list[Run]]]) -> list[list[Run]]:
    """Put lists of runs into one, in which each keeps its order, and of two heads the larger goes first."""
    waiting = [list(runs) for runs in lists if runs]
    made: list[list[Run]] = []
    while any(waiting):
        heads = [
            (sum(run.rows for run in runs[0]), -number)
            for number, runs in enumerate(waiting)
            if runs
        ]
        first = -max(heads)[1]
        run = waiting[first].pop(0)
        for number, runs in enumerate(waiting):
            if runs and number != first:
                joined = _joined(runs[0], run) if number < first else _joined(run, runs[0])
                if joined is not None:
                    run = joined
                    runs.pop(0)
        made.append(run)
    return made


def _joined(one: list[Run], other: list[Run]) -> list[Run] | None:
    """Return as one two runs of which the second goes on where the first ends within one stored run; None: they don't."""
    last, first = one[-1], other[0]
    if last.share is None or first.share is None or last.name != first.name:
        return None
    if last.share.high != first.share.low or last.share.renumbered != first.share.renumbered:
        return None
    both = last.share._replace(
        high=first.share.high, counted=last.share.counted and first.share.counted
    )
    rows = min(last.rows + first.rows, both.stored_rows)
    events = last.events + first.events if both.counted else 0
    return [*one[:-1], replace(last, rows=rows, events=events, share=both), *other[1:]]


def _flat(runs: Iterable[list[Run]]) -> list[Run]:
    """Give the parts of each run new numbers, from 0 on."""
    return [replace(run, part=part) for parts in runs for part, run in enumerate(parts)]
