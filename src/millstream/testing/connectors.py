"""The contract of source connectors, as tests: inherit them for a connector, ours or yours. ``SinkContract`` is that of sinks.

::

    class TestMine(SourceContract):
        @contextmanager
        def outside(self, folder):
            with my_server(folder) as server:
                yield MyOutside(server)

``outside`` gives what the tests put events into, and the connector that reads it. pytest runs the tests: everything is in
the topic once, or at least once, as the connector promises, and in order; also when a run dies at any call, in the middle
of a transaction, or while what is outside is down; what is no record is a dead letter; an older source is stopped.
"""

from __future__ import annotations

import json
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from millstream.client.open import connect
from millstream.connectors.connector import (
    Guarantee,
    Position,
    SourceBatch,
    SourceConnector,
    SourceReader,
)
from millstream.connectors.source import Source, SourceStatus, source
from millstream.errors import ProducerFencedError
from millstream.testing.sink_contract import SinkContract, SinkOutside

__all__ = ["Outside", "SinkContract", "SinkOutside", "SourceContract"]

TextEvent: TypeAlias = dict[str, str]
TOPIC = "events"
_DEATHS_MAX = 60  # calls of one run at which it dies, one after the other
_WAIT_S = 120.0  # for what takes a second: machines are slow at times
_TEXTS = (
    "",
    "plain",
    'a "quoted", one',
    "zwei\nZeilen",
    "größer 水 😀",
    " spaces ",
    "null",
    "'",
    "\\n",
)


class Outside(Protocol):
    """What is read, for one test. Only ``connector`` and ``put`` must be there."""

    def connector(self) -> SourceConnector:
        """Return a connector that reads all that was put, with small batches."""
        ...

    def put(self, events: Sequence[TextEvent]) -> None:
        """Add events behind those that are there. All their fields are text, and ``n`` is one of them."""
        ...

    def put_bad(self) -> int:
        """Add something that is no record; return how many dead letters it becomes, 0 where nothing can be bad."""
        ...

    def down(self) -> AbstractContextManager[None] | None:
        """Return a block in which what is outside does not respond; None where it always does."""
        ...


class DeathError(BaseException):
    """A run died. No handler of errors sees it."""


class SourceContract(ABC):
    """What every source connector does; see the module."""

    rounds = 12  # of the random test

    @abstractmethod
    def outside(self, folder: Path) -> AbstractContextManager[Outside]:
        """Return something outside, in a folder of the test's."""

    # ── the tests ───────────────────────────────────────────────────────────────────────────

    def test_all_is_in_the_topic_in_order(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.put(40)
            assert trial.run().state == "idle"
            trial.check()

    def test_a_later_run_goes_on_where_the_last_one_stopped(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            for _ in range(3):
                trial.put(9)
                trial.run()
                trial.check()
            assert trial.run().records == trial.run().records == len(trial.read())

    def test_a_run_may_die_at_any_call(self, tmp_path: Path) -> None:
        for number in range(1, _DEATHS_MAX):
            with self._trial(tmp_path / str(number)) as trial:
                trial.put(25)
                died = trial.run_until(_Death(at_call=number))
                trial.run()
                trial.check()
                if not died:
                    return
        raise AssertionError(
            f"a run over 25 events has {_DEATHS_MAX} calls or more: its batches are too small"
        )

    def test_a_run_may_die_in_the_middle_of_any_transaction(self, tmp_path: Path) -> None:
        for number in range(1, _DEATHS_MAX):
            with self._trial(tmp_path / str(number)) as trial:
                trial.put(25)
                died = trial.run_until(_Death(in_batch=number))
                trial.run()
                trial.check()
                if not died:
                    return

    def test_events_and_deaths_at_random(self, tmp_path: Path) -> None:
        chance = random.Random(20)  # noqa: S311 - a test's, and repeatable
        with self._trial(tmp_path) as trial:
            for _ in range(self.rounds):
                trial.put(chance.randrange(0, 30))
                if chance.random() < 0.7:
                    kind = chance.choice(("at_call", "in_batch"))
                    trial.run_until(_Death(**{kind: chance.randrange(1, 8)}))
            trial.run()
            trial.check()

    def test_what_is_no_record_is_a_dead_letter_and_the_others_are_read(
        self, tmp_path: Path
    ) -> None:
        with self._trial(tmp_path) as trial:
            trial.put(5)
            bad = trial.put_bad()
            trial.put(5)
            assert trial.run().dead == bad
            trial.check()
            letters = trial.dead_letters()
            assert len(letters) == bad
            assert all(letter["reason"] and letter["where"] for letter in letters)
            assert trial.run().dead == bad

    def test_where_there_is_nothing_a_read_returns(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.put(3)
            trial.run()
            with closing(trial.open()) as reader:
                begun_s = time.monotonic()
                batch = reader.read(0.05)
                assert batch is None or batch.is_empty
                assert time.monotonic() - begun_s < _WAIT_S / 4

    def test_what_is_put_while_it_runs_is_read(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            with trial.running() as running:
                for _ in range(2):
                    trial.put(4)
                    running.wait_for(lambda status: status.records >= len(trial.events))
            trial.check()

    def test_it_waits_until_what_is_outside_responds(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.put(4)
            trial.run()
            if (block := trial.outside.down()) is None:
                return
            with trial.running() as running:
                with block:
                    running.wait_for(lambda status: status.state == "retrying")
                    assert running.last.problem
                running.wait_for(lambda status: status.state != "retrying")
            trial.put(4)
            trial.run()
            trial.check()

    def test_a_later_source_of_the_name_stops_the_earlier(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.put(3)
            earlier = _Earlier(trial.source().connector, trial.run)
            try:
                trial.source(earlier).run(until="caught-up")
            except ProducerFencedError:
                pass
            else:
                raise AssertionError("the earlier source wrote after a later one had begun")
            trial.run()
            trial.check()

    def test_it_says_what_it_is(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            first, second = trial.outside.connector(), trial.outside.connector()
            assert first.kind
            assert (first.kind, first.origin) == (second.kind, second.origin)
            assert first.guarantee in ("each once", "at least once")

    @contextmanager
    def _trial(self, folder: Path) -> Iterator[_Trial]:
        outside = folder / "outside"
        outside.mkdir(parents=True)
        with self.outside(outside) as opened:
            yield _Trial(opened, folder / "log", [])


@dataclass
class _Trial:
    """Something outside, a log, and the events that were put."""

    outside: Outside
    log: Path
    events: list[TextEvent]

    def put(self, count: int) -> None:
        first = len(self.events)
        new = [{"n": str(n), "text": _TEXTS[n % len(_TEXTS)]} for n in range(first, first + count)]
        self.events += new
        if new:
            self.outside.put(new)

    def put_bad(self) -> int:
        return self.outside.put_bad()

    def source(self, connector: SourceConnector | None = None) -> Source:
        made = self.outside.connector() if connector is None else connector
        return source(made, topic=TOPIC, to=self.log)

    def run(self) -> SourceStatus:
        return self.source().run(until="caught-up")

    def run_until(self, death: _Death) -> bool:
        """Run until it dies, or is done; return whether it died."""
        try:
            self.source(_Dying(self.outside.connector(), death)).run(until="caught-up")
        except DeathError:
            return True
        return False

    def open(self) -> SourceReader:
        return self.outside.connector().open(_stored_positions(self.log))

    @contextmanager
    def running(self) -> Iterator[_Running]:
        running = _Running(self.source())
        thread = threading.Thread(target=running.run, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.source.stop()
            thread.join(_WAIT_S)
        assert running.error is None, running.error

    def read(self) -> list[TextEvent]:
        """Return the events in the topic."""
        with connect(self.log) as log:
            values = log.read(TOPIC, 0, columns=("value",)).column("value").to_pylist()
        return [_event(value) for value in values]

    def dead_letters(self) -> list[Mapping[str, str]]:
        with connect(self.log) as log:
            if f"{TOPIC}.dead" not in log.topics():
                return []
            rows = log.read(f"{TOPIC}.dead", 0, columns=("headers",)).column("headers").to_pylist()
        return [{one["key"]: one["value"].decode() for one in row} for row in rows]

    def check(self) -> None:
        """Make sure that the topic has the events, as the connector promises."""
        found = self.read()
        if self.outside.connector().guarantee == "at least once":
            found = list({event["n"]: event for event in found}.values())  # by their first ones
        assert found == self.events


@dataclass
class _Running:
    """A source that runs in a thread."""

    source: Source
    last: SourceStatus = field(default_factory=lambda: SourceStatus("streaming"))
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.source.run(on_status=self._take)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def _take(self, status: SourceStatus) -> None:
        self.last = status

    def wait_for(self, met: Callable[[SourceStatus], bool]) -> None:
        end_s = time.monotonic() + _WAIT_S
        while not met(self.last):
            assert self.error is None, self.error
            assert time.monotonic() < end_s, f"after {_WAIT_S:.0f} s the status is {self.last}"
            time.sleep(0.01)


@dataclass
class _Death:
    """When a run dies: at a call of the reader's, or in the transaction of a batch, after its records were sent."""

    at_call: int = 0
    in_batch: int = 0

    def call(self) -> None:
        self.at_call -= 1
        if self.at_call == 0:
            raise DeathError

    def in_transaction(self, batch: SourceBatch) -> SourceBatch:
        self.in_batch -= 1
        return (
            replace(batch, positions=_DyingPositions(batch.positions))
            if not self.in_batch
            else batch
        )


class _DyingPositions(dict[str, Position]):
    """Positions at which the writer dies: it has sent the batch's records, and not committed them."""

    def items(self) -> Any:
        raise DeathError


@dataclass
class _Wrapped:
    """A connector as another one is."""

    inner: SourceConnector

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def origin(self) -> str:
        return self.inner.origin

    @property
    def guarantee(self) -> Guarantee:
        return self.inner.guarantee


@dataclass
class _Dying(_Wrapped):
    death: _Death

    def open(self, positions: Mapping[str, Position]) -> SourceReader:
        self.death.call()
        return _DyingReader(self.inner.open(positions), self.death)


@dataclass
class _DyingReader:
    inner: SourceReader
    death: _Death

    @property
    def alarm(self) -> str:
        return self.inner.alarm

    def read(self, wait_s: float) -> SourceBatch | None:
        self.death.call()
        batch = self.inner.read(wait_s)
        self.death.call()
        if batch is None or batch.is_empty:
            return batch
        return self.death.in_transaction(batch)

    def stored(self, batch: SourceBatch) -> None:
        self.death.call()
        self.inner.stored(batch)
        self.death.call()

    def close(self) -> None:
        self.inner.close()


@dataclass
class _Earlier(_Wrapped):
    """A connector whose first batch has been read when ``later`` runs, and is not written yet."""

    later: Callable[[], object]

    def open(self, positions: Mapping[str, Position]) -> SourceReader:
        reader = self.inner.open(positions)
        return _EarlierReader(reader, self.later)


@dataclass
class _EarlierReader:
    inner: SourceReader
    later: Callable[[], object] | None
    alarm: str = ""

    def read(self, wait_s: float) -> SourceBatch | None:
        batch = self.inner.read(wait_s)
        if batch is not None and not batch.is_empty and self.later is not None:
            later, self.later = self.later, None
            later()
        return batch

    def stored(self, batch: SourceBatch) -> None:
        self.inner.stored(batch)

    def close(self) -> None:
        self.inner.close()


def _event(value: bytes) -> TextEvent:
    return {name: str(field) for name, field in json.loads(value).items()}


def _stored_positions(log_folder: Path) -> dict[str, Position]:
    """Return the positions in the log, as the writer keeps them: they are JSON."""
    positions: dict[str, Position] = {}
    with connect(log_folder) as log:
        table = log.read(f"{TOPIC}.positions", 0, columns=("key", "value"))
    for key, value in zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True):
        split = json.loads(key).get("split")
        if split is not None and value is not None:
            positions[split] = json.loads(value)
        elif split is not None:
            positions.pop(split, None)
    return positions
