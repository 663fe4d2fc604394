"""Histories of a correct log, from a seed: small, and with every kind of operation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from soak.history import History, Isolation, Operation, Place, Read, Sent

PLAIN = [Place("plain", 0), Place("plain", 1)]
INPUT, OUTPUT = Place("input", 0), Place("output", 0)
PLACES = [*PLAIN, INPUT, OUTPUT]
GROUP = "transform"


@dataclass
class _Entry:
    """What lies at an offset: a record, or with ``value`` None the end of a transaction."""

    value: str | None
    writer: Operation | None = None  # of a transaction
    is_open: bool = False
    is_aborted: bool = False


@dataclass
class _Open:
    operation: Operation
    entries: list[_Entry] = field(default_factory=list)
    places: set[Place] = field(default_factory=set)


class World:
    """A log and its clients, one step after the other."""

    def __init__(self, seed: int, steps: int = 150) -> None:
        self._chance = random.Random(seed)
        self._logs: dict[Place, list[_Entry]] = {place: [] for place in PLACES}
        self._time = 0
        self._values = 0
        self._numbers: dict[str, int] = {}
        self._operations: list[Operation] = []
        self._open: dict[str, _Open] = {}
        self._positions: dict[tuple[str, Place], int] = {}
        self._committed = 0  # the group's offset of the input
        kinds = [self._send, self._send, self._transact, self._end, self._poll, self._transform]
        for _ in range(steps):
            self._chance.choice(kinds)()
        self._finish()
        self.history = History(self._operations, complete=True)

    # -- steps --------------------------------------------------------------------------------

    def _send(self) -> None:
        one = self._begin(f"send-{self._chance.randrange(2)}", "send")
        place = self._chance.choice(PLAIN)
        sent = self._new(place)
        one.sent = [sent]
        outcome = self._chance.choice(("ok", "ok", "ok", "ok", "info", "lost"))
        if outcome != "lost":
            self._logs[place].append(_Entry(sent.value))
        if outcome == "ok":
            sent.offset = len(self._logs[place]) - 1
            self._done(one)

    def _transact(self) -> None:
        name = f"transact-{self._chance.randrange(2)}"
        if name in self._open:
            return
        one = self._begin(name, "transaction")
        self._write(
            name, one, [self._new(self._chance.choice((INPUT, PLAIN[0]))) for _ in range(3)]
        )

    def _transform(self) -> None:
        if "transform" in self._open:
            return
        readable = self._readable(INPUT, "committed")
        found = [one for one in readable if one.offset >= self._committed]
        found = found[: self._chance.randint(1, 3)]
        if not found:
            return
        one = self._begin("transform", "transaction")
        one.read, one.group = found, GROUP
        one.offsets = {INPUT: found[-1].offset + 1}
        self._write("transform", one, [self._new(OUTPUT, read.value) for read in found])

    def _write(self, name: str, one: Operation, records: list[Sent]) -> None:
        one.sent = records
        opened = self._open[name] = _Open(one)
        for sent in records:
            entry = _Entry(sent.value, one, is_open=True)
            self._logs[sent.place].append(entry)
            sent.offset = len(self._logs[sent.place]) - 1
            opened.entries.append(entry)
            opened.places.add(sent.place)

    def _end(self) -> None:
        if self._open:
            self._end_one(self._chance.choice(sorted(self._open)))

    def _end_one(self, name: str) -> None:
        opened = self._open.pop(name)
        one = opened.operation
        commits = self._chance.random() < 0.7
        is_known = self._chance.random() < 0.8
        if commits or not is_known:
            one.commit_began = self._tick()
        for entry in opened.entries:
            entry.is_open, entry.is_aborted = False, not commits
        for place in opened.places:
            self._logs[place].append(_Entry(None))
        if commits and one.group:
            self._committed = one.offsets[INPUT]
        if is_known:
            self._done(one, "ok" if commits else "fail")
        elif self._chance.random() < 0.5:
            for sent in one.sent:
                sent.offset = None
        if one.group:  # it reads on from what is committed
            assigned = self._begin("transform", "assign")
            assigned.offsets = {INPUT: -1}
            self._done(assigned)
            self._ask()

    def _ask(self) -> None:
        fetched = self._begin("transform", "committed")
        fetched.group, fetched.offsets = GROUP, {INPUT: self._committed or -1}
        self._done(fetched)

    def _poll(self, process: str = "", most: int = 6) -> None:
        isolation: Isolation = self._chance.choice(("committed", "uncommitted"))
        process = process or f"{isolation}-{self._chance.randrange(2)}"
        isolation = "uncommitted" if process.startswith("uncommitted") else "committed"
        if process not in self._numbers or self._chance.random() < 0.1:
            assigned = self._begin(process, "assign")
            for place in PLACES:
                at = self._chance.randint(0, len(self._logs[place]))
                self._positions[process, place] = 0 if process.endswith("last") else at
                assigned.offsets[place] = self._positions[process, place]
            self._done(assigned)
        one = self._begin(process, "poll")
        one.isolation = isolation
        for place in PLACES:
            at = self._positions[process, place]
            for read in [x for x in self._readable(place, isolation) if x.offset >= at][:most]:
                one.read.append(read)
                self._positions[process, place] = read.offset + 1
        self._done(one)

    def _finish(self) -> None:
        for name in sorted(self._open):
            self._end_one(name)
        self._ask()
        for process in ("committed-last", "uncommitted-last"):
            self._poll(process, most=1 << 30)

    # -- the log ------------------------------------------------------------------------------

    def _readable(self, place: Place, isolation: Isolation) -> list[Read]:
        found = []
        for offset, entry in enumerate(self._logs[place]):
            if isolation == "committed" and entry.is_open:
                break
            if entry.value is None or (isolation == "committed" and entry.is_aborted):
                continue
            found.append(Read(place, offset, entry.value))
        return found

    def _new(self, place: Place, source: str | None = None) -> Sent:
        self._values += 1
        return Sent(place, f"v{self._values}", None, source)

    def _begin(self, process: str, kind: str) -> Operation:
        number = self._numbers.get(process, 0)
        self._numbers[process] = number + 1
        one = Operation(process, number, kind, began=self._tick())
        self._operations.append(one)
        return one

    def _done(self, one: Operation, outcome: str = "ok") -> None:
        one.outcome, one.ended = outcome, self._tick()

    def _tick(self) -> int:
        self._time += 1
        return self._time
