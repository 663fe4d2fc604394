"""Rescaling: the state of some buckets becomes that of another number of buckets, by its manifests alone.

A bucket is a range of hashes. A new bucket gets, of each old one that its range meets, the runs that may have rows of
its keys: a whole run, if all of the old bucket is in its range, and otherwise a share of it
(:class:`~millstream.kernels.state.sorted_runs.Share`). So no run is read or written here, and the cost does not
depend on how much is held. Shares that are put together again become one, and if they are all of a run, they are
the run (:mod:`millstream.kernels.state.joined_runs`). So however often buckets are divided and put together, of each row
there are as many references as before.

What is not found by the hash of a key, the operator names (:class:`~millstream.kernels.state.layout.StateLayout`). The
state of an operator without keys is in one bucket, and stays whole.

============================  =============================================================================
what of several buckets       becomes in one
============================  =============================================================================
runs of a slot                one list; those of a bucket keep their order, the larger of two stand first
numbers of rows               the same; but for the first time, where those of a bucket are raised above
                              those of all before it (:mod:`millstream.kernels.state.numbers`)
spaces of such numbers        all that there are, each once
events given out (spent)      their sum; where a bucket is divided, each part gets some of them, and the
                              slot is unsettled
versions, formats             the highest
times that were asked for     the earliest: a timer that comes again does nothing
rows waiting for a time       their sum; where a bucket is divided, not known
time, and what all agree in   the same
============================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from millstream.errors import CorruptionError
from millstream.kernels.state.appended_rows import (
    chunks_by_place,
    chunks_of,
    end_of,
    next_place_of,
    places_after,
)
from millstream.kernels.state.joined_runs import (
    HashRange,
    divided,
    intersection,
    one_chunk,
    put_together,
    ranges_of,
    share_of,
)
from millstream.kernels.state.keyhash import Hashes, buckets_of
from millstream.kernels.state.layout import OperatorMessage, StateLayout
from millstream.kernels.state.numbers import Numbering, end_of_numbers, step_of
from millstream.kernels.state.sorted_runs import Run
from millstream.kernels.state.timers import WAITING

_HALF_BITS = 32  # of a hash, by which buckets are ranges: see `buckets_of`
_SAME = (
    "watermark",
    "clocks",
    "seed",
)  # the same in all buckets, as all get the same messages about time


def hash_range(bucket: int, count: int) -> HashRange:
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
        rescaled = _Rescaled(step, layout, parts, before, after)
        made = {bucket: _NewBucket(rescaled, bucket).message() for bucket in range(after)}
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
class _Rescaled:
    """An operator's state in all old buckets, and how many new ones there are to be."""

    step: str
    layout: StateLayout
    parts: Mapping[int, OperatorMessage]
    before: int
    after: int

    @cached_property
    def numberings(self) -> dict[str, Numbering]:
        """How numbers are made to differ, by counter; of appended rows, their places, by family."""
        made = {
            name: self._numbering(
                step_of(name),
                {at: end_of_numbers(part["values"], name) for at, part in self.parts.items()},
            )
            for name in self.layout.numbered
        }
        for family in self.layout.appended:
            ends = {at: end_of(_chunks(part, family)) for at, part in self.parts.items()}
            made[family] = self._numbering(next_place_of(family), ends)
        return made

    def _numbering(self, sign: str, ends: Mapping[int, int]) -> Numbering:
        common = any(sign in part["values"] for part in self.parts.values())
        return Numbering.of(ends.items(), common=common)

    @cached_property
    def next_places(self) -> dict[str, list[int]]:
        """Where new places begin, by family of appended rows and bucket."""
        return {
            family: places_after(self.step, self.numberings[family].end, self.after)
            for family in self.layout.appended
        }

    def raised(self, family: str, bucket: int) -> int:
        """Return by how much the numbers of a family's rows in an old bucket are raised."""
        counters = [name for name, own in self.layout.numbered.items() if family in own]
        if family in self.layout.appended:
            counters.append(family)
        return sum(self.numberings[name].raised[bucket] for name in counters)

    def values_of(self, bucket: int) -> dict[str, int]:
        """Return the values by which a new bucket goes on with numbers."""
        made = {}
        for name in self.layout.numbered:
            made[name] = self.numberings[name].end + bucket
            made[step_of(name)] = self.after
        for family, starts in self.next_places.items():
            made[next_place_of(family)] = starts[bucket]
        return made


@dataclass(frozen=True)
class _Origin:
    """An old bucket, as far as it is in a new one. ``range_`` are its hashes, ``part`` those of them that are."""

    bucket: int
    message: OperatorMessage
    range_: HashRange
    part: HashRange

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

    rescaled: _Rescaled
    bucket: int
    families: dict[str, dict[int, list[Run]]] = field(default_factory=dict)
    unsettled: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = self.rescaled.layout
        self.range_ = hash_range(self.bucket, self.rescaled.after)
        self.origins: list[_Origin] = []
        for bucket, part in sorted(self.rescaled.parts.items()):
            own = hash_range(bucket, self.rescaled.before)
            common = intersection(own, self.range_)
            if common is not None:
                self.origins.append(_Origin(bucket, part, own, common))

    def message(self) -> OperatorMessage:
        """Return the operator's part of the new bucket's manifest."""
        names = dict.fromkeys(name for origin in self.origins for name in origin.message["runs"])
        chunks = {chunks_of(family): family for family in self.layout.appended}
        for name in names:
            is_chunks = name in chunks
            self.families[name] = self._chunks(chunks[name]) if is_chunks else self._family(name)
        message: OperatorMessage = {
            "runs": {
                name: [run.to_message() for slot in sorted(slots) for run in slots[slot]]
                for name, slots in sorted(self.families.items())
                if slots
            },
            "emitted": self._spent(),
            "values": self._values(),
        }
        unsettled = {name: sorted(slots) for name, slots in sorted(self.unsettled.items()) if slots}
        return message | ({"unsettled": unsettled} if unsettled else {})

    # ── runs ────────────────────────────────────────────────────────────────────────────────

    def _family(self, name: str) -> dict[int, list[Run]]:
        by_slot: dict[int, list[list[list[Run]]]] = {}
        for origin in self.origins:
            for slot, runs in origin.slots(name).items():
                taken = self._taken(name, origin, runs)
                if not taken:
                    continue
                place = self._slot(name, origin, slot)
                moved = [[replace(run, slot=place) for run in one] for one in taken]
                by_slot.setdefault(place, []).append(moved)
                if self._was_unsettled(name, origin, slot):
                    self.unsettled.setdefault(name, set()).add(place)
        made = {slot: put_together(runs, self.range_) for slot, runs in by_slot.items()}
        unknown = {slot for slot, runs in made.items() if not all(run.is_counted for run in runs)}
        self.unsettled.setdefault(name, set()).update(unknown)
        return made

    def _slot(self, name: str, origin: _Origin, slot: int) -> int:
        """Return which slot of the new bucket one of an old bucket is: of sets, the same space of numbers."""
        sets = self.layout.sets
        if sets is None or not name.startswith(sets[0]):
            return slot
        return self._all_spaces.index(self._spaces(origin)[slot])

    def _taken(self, name: str, origin: _Origin, runs: Sequence[list[Run]]) -> list[list[Run]]:
        """Return what of the runs of a slot the new bucket gets."""
        taken = []
        for parts in runs:
            ranges = zip(parts, ranges_of(parts, origin.range_), strict=True)
            shares = [self._share(name, origin, run, range_) for run, range_ in ranges]
            found = [share for share in shares if share is not None]
            if found:
                taken.append(found)
        return taken

    def _share(self, name: str, origin: _Origin, run: Run, range_: HashRange) -> Run | None:
        """Return the part of a run that the new bucket gets; None if it gets none."""
        return divided(
            run,
            range_,
            origin.part,
            raised=self.rescaled.raised(name, origin.bucket),
            always_counted=name in self.layout.filters,
        )

    def _chunks(self, family: str) -> dict[int, list[Run]]:
        """Return the chunks of appended rows, each once, by place."""
        name, found = chunks_of(family), dict[int, list[Run]]()
        for origin in self.origins:
            raised = self.rescaled.numberings[family].raised[origin.bucket]
            for chunk in _chunks(origin.message, family):
                (range_,) = ranges_of([chunk], origin.range_)
                share = self._share(name, origin, chunk, range_)
                if share is not None:
                    place = chunk.slot + raised
                    found.setdefault(place, []).append(replace(share, slot=place))
        return {place: [one_chunk(shares, self.range_)] for place, shares in found.items()}

    # ── events and values ───────────────────────────────────────────────────────────────────

    def _was_unsettled(self, name: str, origin: _Origin, slot: int) -> bool:
        """Return whether it is not known how many events that were given out the new bucket has."""
        given_out = origin.message["emitted"].get(name, {}).get(str(slot), 0)
        was_unsettled = slot in origin.message.get("unsettled", {}).get(name, ())
        return was_unsettled or (origin.is_divided and given_out != 0)

    def _spent(self) -> dict[str, dict[str, int]]:
        """Add up what had been given out, of the slots that there are."""
        spent: dict[str, dict[str, int]] = {}
        for origin in self.origins:
            for name, slots in origin.message["emitted"].items():
                for slot, events in slots.items():
                    own = share_of(events, origin.part, origin.range_)
                    if own and int(slot) in self.families.get(name, {}):
                        of_family = spent.setdefault(name, {})
                        of_family[slot] = of_family.get(slot, 0) + own
        return spent

    def _spaces(self, origin: _Origin) -> list[int]:
        """Return where the spaces of numbers of an old bucket begin now."""
        assert self.layout.sets is not None
        _, counter, spaces = self.layout.sets
        raised = self.rescaled.numberings[counter].raised[origin.bucket]
        return [start + raised for start in origin.values.get(spaces, [0])]

    @cached_property
    def _all_spaces(self) -> list[int]:
        assert self.layout.sets is not None
        numbering = self.rescaled.numberings[self.layout.sets[1]]
        starts = {start for origin in self.origins for start in self._spaces(origin)}
        return sorted(starts | (set() if numbering.was_common else {numbering.end}))

    def _values(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {**self.rescaled.values_of(self.bucket)}
        names = dict.fromkeys(name for origin in self.origins for name in origin.values)
        if self.layout.sets is not None:
            numbers[self.layout.sets[2]] = self._all_spaces
        made = {name: self._value(name) for name in names if name not in numbers}
        return numbers | {name: value for name, value in made.items() if value is not None}

    def _value(self, name: str) -> Any:
        """Return the value of the new bucket; None if there is to be none."""
        held = [origin.values[name] for origin in self.origins if name in origin.values]
        if name == WAITING:
            return self._waiting()
        rule = _RULES.get(name.rpartition(".")[2])
        return _agreed(self.rescaled.step, name, held) if rule is None else rule(held)

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
    "format": max,  # a bucket that has had no batch since a newer format was there has the older one
    "done": min,
    "divided": any,
    "clock_ms": max,
    "arrived": max,  # numbers order the events of a key, and a key has all of its own from one bucket
    "clocks": _elementwise,  # an answer of another bucket expires a little earlier
    "digest": _if_same,  # without it, the rows of a static table are compared again
}


def _chunks(message: OperatorMessage, family: str) -> list[Run]:
    entries = message["runs"].get(chunks_of(family), ())
    return chunks_by_place([Run.from_message(entry) for entry in entries])
