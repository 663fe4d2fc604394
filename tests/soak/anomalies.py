"""The anomalies of a history: a pure function from operations to findings.

A history has the requests of clients and their results (``history``). From it follows what the log must hold:
which value is at which offset, which transaction was committed. Whatever contradicts this is a finding. An
unknown result (a response that never arrived) is no finding.

=======================  ==========================================================================
finding                  what was seen
=======================  ==========================================================================
``lost-write``           acknowledged, and passed over by everybody who read beyond it
``unseen``               acknowledged, and not there when everything was read at the end
``duplicate``            one value at two offsets
``invented``             a value that nobody sent, or not to there
``duplicate-offset``     two acknowledged values with one offset
``inconsistent-offset``  two values seen at one offset
``aborted-read``         a committed reader saw what was taken back, or anybody what was refused
``precommitted-read``    a committed reader saw what was not to be committed yet
``torn-transaction``     some of a transaction was seen, some not
``poll-skip``            a reader passed over a record that is there; ``int-``: within one poll
``nonmonotonic-poll``    a reader went back; ``int-``: within one poll
``nonmonotonic-send``    a producer's records in another order than it sent them; ``int-``: of one
                         transaction
``offset-regression``    a group's offset before one that had been committed
``offset-invented``      a group's offset that nobody committed
``aborted-offsets``      a group's offset that only transactions which were taken back committed
``twice-transformed``    two committed results of one record
``never-transformed``    a group is past a record, and there is no result of it
``circular``             transactions that have read of each other, in a circle
=======================  ==========================================================================

Source: the published analyses of Kafka and its kin by Jepsen, and Elle's paper on inferring isolation
anomalies; names follow theirs where there is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import NamedTuple

from soak.history import History, Operation, Place, Sent

SHOWN_MAX = 20  # findings of one kind that a report names; all are counted


class Finding(NamedTuple):
    """One contradiction."""

    kind: str
    text: str


class Version(NamedTuple):
    """An offset of a partition."""

    place: Place
    offset: int


def findings(history: History) -> list[Finding]:
    """Return the findings of a history; none, if it can have happened."""
    facts = _Facts(history)
    return [
        *facts.conflicts,
        *_misplaced(facts),
        *_unread(facts),
        *_uncommitted(facts),
        *_torn(facts),
        *_polls(facts),
        *_sends(facts),
        *_group_offsets(facts),
        *_results(facts),
        *_circles(facts),
    ]


class _Facts:
    """Indexes of a history: by value, by offset, by partition."""

    def __init__(self, history: History) -> None:
        self.complete = history.complete
        self.operations = history.operations
        self.writers: dict[str, tuple[Operation, Sent]] = {}
        self.values: dict[Version, str] = {}
        self.versions: dict[str, set[Version]] = defaultdict(set)
        self.conflicts: list[Finding] = []
        self.seen: set[str] = set()  # by anybody
        self.seen_committed: set[str] = set()
        self.read_to: dict[Place, int] = defaultdict(lambda: -1)  # the last offset anybody read
        for one in self.operations:
            for sent in one.sent:
                self.writers[sent.value] = (one, sent)
                if sent.offset is not None and one.outcome != "fail":
                    self._learn(Version(sent.place, sent.offset), sent.value, read=False)
        for one in self.operations:
            for place, offset, value in one.read:
                self._learn(Version(place, offset), value, read=True)
                self.seen.add(value)
                if one.isolation == "committed":
                    self.seen_committed.add(value)
                self.read_to[place] = max(self.read_to[place], offset)

    def _learn(self, version: Version, value: str, *, read: bool) -> None:
        known = self.values.setdefault(version, value)
        self.versions[value].add(version)
        if known != value:
            kind = "inconsistent-offset" if read else "duplicate-offset"
            self.conflicts.append(Finding(kind, f"{version}: {known} and {value}"))

    def must_be_there(self, value: str) -> bool:
        """Return whether a value was written for certain, and is there for committed readers.

        What is there of a transaction shows that all of it is.
        """
        if value in self.seen_committed:
            return True
        if value not in self.writers:
            return False
        one, _ = self.writers[value]
        shown = one.outcome != "fail" and any(
            sent.value in self.seen_committed for sent in one.sent
        )
        return one.outcome == "ok" or shown

    def offset_of(self, sent: Sent) -> int | None:
        """Return where a record is, as it was acknowledged or seen."""
        if sent.offset is not None:
            return sent.offset
        return next((one.offset for one in self.versions.get(sent.value, ())), None)

    def passed_over(self, sent: Sent) -> bool:
        """Return whether readers have been where a record is to be."""
        offset = self.offset_of(sent)
        return self.complete or (offset is not None and offset <= self.read_to[sent.place])


def _misplaced(facts: _Facts) -> Iterator[Finding]:
    for value in facts.seen:
        places = facts.versions[value]
        writer = facts.writers.get(value)
        if writer is None:
            yield Finding("invented", f"{value} at {sorted(places)}, and nobody sent it")
        elif any(one.place != writer[1].place for one in places):
            yield Finding("invented", f"{value} at {sorted(places)}, sent to {writer[1].place}")
    for value, versions in facts.versions.items():
        if len(versions) > 1:
            yield Finding("duplicate", f"{value} at {sorted(versions)}")


def _unread(facts: _Facts) -> Iterator[Finding]:
    for one in facts.operations:
        if one.outcome != "ok":
            continue
        for sent in one.sent:
            if sent.value in facts.seen:
                continue
            if sent.offset is not None and sent.offset <= facts.read_to[sent.place]:
                end = facts.read_to[sent.place]
                yield Finding("lost-write", f"{sent} of {one.process}; read to {end}")
            elif facts.complete:
                yield Finding("unseen", f"{sent} of {one.process}")


def _uncommitted(facts: _Facts) -> Iterator[Finding]:
    """What was seen although it was aborted, or not yet committed."""
    for one in facts.operations:
        for read in one.read:
            writer = facts.writers.get(read.value)
            kind = None if writer is None else _too_early(one, writer[0])
            if writer is not None and kind is not None:
                by = f"{writer[0].process}, its operation {writer[0].number}"
                yield Finding(kind, f"{one.process} read {read}; written by {by}")


def _too_early(reader: Operation, writer: Operation) -> str | None:
    """Return what is wrong with having read what was written; None if nothing is."""
    if writer.kind != "transaction":
        return "aborted-read" if writer.outcome == "fail" else None
    if reader.isolation != "committed":
        return None
    if writer.outcome == "fail":
        return "aborted-read"
    early = writer.commit_began is None or reader.ended < writer.commit_began or reader is writer
    return "precommitted-read" if early else None


def _torn(facts: _Facts) -> Iterator[Finding]:
    for one in facts.operations:
        if one.kind != "transaction" or one.outcome == "fail":
            continue
        seen = [sent for sent in one.sent if sent.value in facts.seen_committed]
        missing = [
            sent
            for sent in one.sent
            if sent.value not in facts.seen_committed and facts.passed_over(sent)
        ]
        if seen and missing:
            text = f"{one.process}, operation {one.number}: {seen[0]} is there, {missing[0]} is not"
            yield Finding("torn-transaction", text)


def _polls(facts: _Facts) -> Iterator[Finding]:
    """Each reader from its assigned position: no step back, nothing skipped."""
    everything: dict[Place, list[int]] = defaultdict(list)
    committed: dict[Place, list[int]] = defaultdict(list)
    for version, value in facts.values.items():
        if value in facts.seen or facts.must_be_there(value):
            everything[version.place].append(version.offset)
        if facts.must_be_there(value):
            committed[version.place].append(version.offset)
    for offsets in (*everything.values(), *committed.values()):
        offsets.sort()
    for process in _by_process(facts):
        at: dict[Place, int] = {}  # where each partition is read on
        for one in process:
            if one.kind == "assign":
                at = {place: offset for place, offset in one.offsets.items() if offset >= 0}
            there = committed if one.isolation == "committed" else everything
            yield from _poll(one, at, there)


def _poll(one: Operation, at: dict[Place, int], there: dict[Place, list[int]]) -> Iterator[Finding]:
    of_this: set[Place] = set()  # partitions that this poll has brought records of
    for place, offset, value in one.read:
        expected = at.get(place)
        prefix = "int-" if place in of_this else ""
        of_this.add(place)
        at[place] = offset + 1
        if expected is None or offset == expected:
            continue
        text = (
            f"{one.process}, operation {one.number}: {value} at {place} {offset}, from {expected}"
        )
        if offset < expected:
            yield Finding(f"{prefix}nonmonotonic-poll", text)
            continue
        offsets = there[place]
        passed = bisect_left(offsets, expected)
        if passed < len(offsets) and offsets[passed] < offset:
            yield Finding(f"{prefix}poll-skip", f"{text}; {offsets[passed]} is there")


def _by_process(facts: _Facts) -> list[list[Operation]]:
    processes: dict[str, list[Operation]] = defaultdict(list)
    for one in facts.operations:
        processes[one.process].append(one)
    return [sorted(of_one, key=lambda one: one.number) for of_one in processes.values()]


def _sends(facts: _Facts) -> Iterator[Finding]:
    for process in _by_process(facts):
        last: dict[Place, tuple[Sent, Operation, int]] = {}
        for one in process:
            if one.outcome == "fail":
                continue
            for sent in one.sent:
                offset = facts.offset_of(sent)
                if offset is None:
                    continue
                before = last.get(sent.place)
                last[sent.place] = (sent, one, offset)
                if before is not None and before[2] > offset:
                    kind = "int-nonmonotonic-send" if before[1] is one else "nonmonotonic-send"
                    yield Finding(kind, f"{one.process}: {before[0]}, then {sent} at {offset}")


def _group_offsets(facts: _Facts) -> Iterator[Finding]:
    """The committed offsets that groups found, compared with those committed for them."""
    commits = _commits(facts)
    done = {key: _done(of_key, key[1]) for key, of_key in commits.items()}
    for one in facts.operations:
        if one.kind != "committed" or one.outcome != "ok":
            continue
        for place, offset in one.offsets.items():
            key = (one.group, place)
            text = f"{one.process} found {offset} committed by {one.group} for {place}"
            ends, highest = done.get(key, ([], []))
            before = bisect_left(ends, one.began)
            if before and offset < highest[before - 1]:
                yield Finding("offset-regression", f"{text}, after {highest[before - 1]}")
            tries = [by for by in commits[key] if by.offsets[place] == offset]
            if offset >= 0 and all(_is_void(by) for by in tries):
                yield Finding("aborted-offsets" if tries else "offset-invented", text)


def _commits(facts: _Facts) -> dict[tuple[str, Place], list[Operation]]:
    """Return who committed offsets, by group and partition."""
    commits: dict[tuple[str, Place], list[Operation]] = defaultdict(list)
    for one in facts.operations:
        if one.kind in ("commit", "transaction"):
            for place in one.offsets:
                commits[one.group, place].append(one)
    return commits


def _done(commits: list[Operation], place: Place) -> tuple[list[int], list[int]]:
    """Return when commits were acknowledged, and the highest offset up to each."""
    ended = sorted((one.ended, one.offsets[place]) for one in commits if one.outcome == "ok")
    return [at for at, _ in ended], list(accumulate((offset for _, offset in ended), max))


def _is_void(one: Operation) -> bool:
    """Return whether an operation cannot have had an effect."""
    never_requested = one.kind == "transaction" and one.commit_began is None
    return one.outcome == "fail" or (one.outcome == "info" and never_requested)


def _results(facts: _Facts) -> Iterator[Finding]:
    """What transactions made of what they read: one committed result of each record."""
    results: dict[tuple[str, str], list[Sent]] = defaultdict(list)
    inputs: dict[str, set[Place]] = defaultdict(set)
    for one in facts.operations:
        if one.kind == "transaction" and one.group:
            inputs[one.group].update(one.offsets)
            for sent in one.sent:
                if sent.source is not None and facts.must_be_there(sent.value):
                    results[one.group, sent.source].append(sent)
    for (_, source), made in results.items():
        if len(made) > 1:
            yield Finding("twice-transformed", f"{source}: {made[0]} and {made[1]}")
    if facts.complete:
        yield from _passed_without_result(facts, inputs, results.keys())


def _passed_without_result(
    facts: _Facts, inputs: dict[str, set[Place]], with_result: Collection[tuple[str, str]]
) -> Iterator[Finding]:
    ends: dict[tuple[str, Place], int] = {}
    for one in facts.operations:
        if one.kind == "committed" and one.outcome == "ok":
            for place, offset in one.offsets.items():
                ends[one.group, place] = max(offset, ends.get((one.group, place), -1))
    for group, places in inputs.items():
        for version, value in facts.values.items():
            past = version.place in places and version.offset < ends.get((group, version.place), -1)
            if past and value in facts.seen_committed and (group, value) not in with_result:
                yield Finding("never-transformed", f"{value} at {version}, by {group}")


def _circles(facts: _Facts) -> Iterator[Finding]:
    """Transactions that depend on each other by what they read: a strongly connected component."""
    edges: dict[int, set[int]] = {}
    transactions = [one for one in facts.operations if one.kind == "transaction"]
    numbers = {id(one): number for number, one in enumerate(transactions)}
    for number, one in enumerate(transactions):
        edges[number] = set()
        for read in one.read:
            writer = facts.writers.get(read.value)
            if writer is not None and writer[0].kind == "transaction" and writer[0] is not one:
                edges[number].add(numbers[id(writer[0])])
    for circle in _components(edges):
        named = [f"{transactions[n].process}/{transactions[n].number}" for n in sorted(circle)]
        yield Finding("circular", ", ".join(named))


def _components(edges: dict[int, set[int]]) -> Iterator[set[int]]:
    """Yield the strongly connected components of more than one node.

    Nodes that nobody leads to, or that lead nowhere, are in none: without them, what is left is only
    what lies on a circle or between two. Of that, a node's component is what it reaches and is
    reached by.
    """
    left = {node: set(others) for node, others in edges.items()}
    while True:
        led_to = {other for others in left.values() for other in others}
        kept = {node: others for node, others in left.items() if others and node in led_to}
        if len(kept) == len(left):
            break
        left = {node: others & kept.keys() for node, others in kept.items()}
    back: dict[int, set[int]] = {node: set() for node in left}
    for node, others in left.items():
        for other in others:
            back[other].add(node)
    while left:
        node = next(iter(left))
        component = _reached(node, left) & _reached(node, back)
        if len(component) > 1:
            yield component
        for gone in component:
            del left[gone]


def _reached(start: int, edges: dict[int, set[int]]) -> set[int]:
    reached, waiting = {start}, [start]
    while waiting:
        for other in edges[waiting.pop()]:
            if other in edges and other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached
