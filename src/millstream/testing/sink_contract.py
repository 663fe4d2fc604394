"""The contract of sink connectors, as tests: inherit them for a connector, ours or yours.

::

    class TestMine(SinkContract):
        @contextmanager
        def outside(self, folder):
            with my_server(folder) as server:
                yield MyOutside(server)

``outside`` gives the connector, and what is there. pytest runs the tests: what the topic has is outside, as the connector
promises, also when a run dies before or after any call, or while what is outside is down; what cannot be written is a dead
letter, once, and keeps nothing else from being written; an older run is stopped.
"""

from __future__ import annotations

import json
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from millstream.client.open import connect
from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkConnector,
    SinkGuarantee,
    SinkOpening,
    SinkWriter,
    WrittenBatch,
)
from millstream.connectors.sinks.sink import SinkRun, SinkStatus, sink
from millstream.errors import FencedError

TextRow: TypeAlias = dict[str, str]
_TOPIC, _NAME = "rows", "out"
_DEATHS_MAX = 60  # calls of one run at which it dies, one after the other
_KEYS = 5  # few, so that rows replace one another
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
_NO_ROWS = (b"[1]", b"\xff", b'{"n": ', b'{"n": NaN}')


class SinkOutside(Protocol):
    """What is written to, for one test. Where ``keyed``, it has the last row of each key; else all rows in their order."""

    keyed: bool

    def connector(self) -> SinkConnector:
        """Return a connector that writes there, with batches of up to 7 records."""
        ...

    def rows(self) -> Sequence[TextRow]:
        """Return the rows that are there; all their fields are text, and ``n`` is one of them."""
        ...

    def bad_row(self) -> Mapping[str, Any] | None:
        """Return a row that what is outside itself refuses; None where there is none. It may have fields that others lack."""
        ...

    def down(self) -> AbstractContextManager[None] | None:
        """Return a block in which what is outside does not respond; None where it always does."""
        ...


class SinkDeathError(BaseException):
    """A run died. No handler of errors sees it."""


class SinkContract(ABC):
    """What every sink connector does; see the module."""

    rounds = 8  # of the random test

    @abstractmethod
    def outside(self, folder: Path) -> AbstractContextManager[SinkOutside]:
        """Return something outside that is empty, in a folder of the test's."""

    # ── the tests ───────────────────────────────────────────────────────────────────────────

    def test_all_that_the_topic_has_is_outside(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.send(40)
            status = trial.run()
            assert (status.state, status.records, status.behind) == ("idle", 40, 0)
            trial.check()

    def test_a_later_run_goes_on_where_the_last_one_stopped(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            for _ in range(3):
                trial.send(9)
                trial.run()
                trial.check()
            assert trial.run().records == trial.run().records == 27

    def test_a_run_may_die_at_any_call(self, tmp_path: Path) -> None:
        for number in range(1, _DEATHS_MAX):
            with self._trial(tmp_path / str(number)) as trial:
                trial.send(20)
                died = trial.run_until(number)
                trial.send(5)  # which must not become a part of a batch that was written before
                trial.run()
                trial.check()
                if not died:
                    return
        raise AssertionError(f"a run over 20 records has {_DEATHS_MAX} calls or more")

    def test_rows_and_deaths_at_random(self, tmp_path: Path) -> None:
        chance = random.Random(22)  # noqa: S311 - a test's, and repeatable
        with self._trial(tmp_path, partitions=3) as trial:
            for _ in range(self.rounds):
                trial.send(chance.randrange(0, 30))
                if chance.random() < 0.7:
                    trial.run_until(chance.randrange(1, 9))
            trial.run()
            trial.check()

    def test_what_cannot_be_written_is_a_dead_letter_and_the_others_are_written(
        self, tmp_path: Path
    ) -> None:
        with self._trial(tmp_path) as trial:
            trial.send(2)
            bad = trial.send_bad()
            trial.send(8)
            trial.run_until(3)  # after the first batch was written, and before that was noted
            assert trial.run().dead == bad
            trial.check()
            letters = trial.dead_letters()
            assert len(letters) == len({letter["offset"] for letter in letters}) == bad
            assert all(letter["reason"] for letter in letters)
            assert trial.run().dead == bad

    def test_what_is_sent_while_it_runs_is_written(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.send(1)
            with trial.running() as running:
                for _ in range(2):
                    trial.send(4)
                    running.wait_for(lambda status: status.records >= trial.sent)
            trial.check()

    def test_it_waits_until_what_is_outside_responds(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.send(4)
            trial.run()
            if (block := trial.outside.down()) is None:
                return
            with block, trial.running() as running:
                trial.send(4)
                running.wait_for(lambda status: status.state == "retrying")
                assert running.last.problem
            trial.run()
            trial.check()

    def test_a_later_sink_of_the_name_stops_the_earlier(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            trial.send(10)

            def later() -> None:
                trial.run()
                trial.send(10)
                trial.run()

            try:
                trial.sink(_Earlier(trial.outside.connector(), later)).run(until="caught-up")
            except FencedError:
                pass
            else:
                raise AssertionError("the earlier sink went on after a later one had begun")
            trial.run()
            # What one that was stopped has sent may come late, where what is outside cannot tell.
            trial.check(late=trial.outside.connector().guarantee != "transaction")

    def test_it_says_what_it_is(self, tmp_path: Path) -> None:
        with self._trial(tmp_path) as trial:
            first, second = trial.outside.connector(), trial.outside.connector()
            assert first.kind
            assert (first.kind, first.origin) == (second.kind, second.origin)
            assert first.guarantee in ("transaction", "key", "at least once")
            assert first.guarantee != "key" or trial.outside.keyed

    @contextmanager
    def _trial(self, folder: Path, *, partitions: int = 1) -> Iterator[_SinkTrial]:
        outside = folder / "outside"
        outside.mkdir(parents=True)
        with self.outside(outside) as opened:
            trial = _SinkTrial(opened, folder / "log")
            with connect(trial.log) as log:
                log.create_topic(_TOPIC, partitions=partitions)
            trial.partitions = partitions
            yield trial


@dataclass
class _SinkTrial:
    """Something outside, a log, and the rows that were sent, by partition; None of a key that was deleted."""

    outside: SinkOutside
    log: Path
    partitions: int = 1
    sent: int = 0
    all: list[tuple[int, TextRow]] = field(default_factory=list)
    by_key: dict[str, TextRow] = field(default_factory=dict)

    def send(self, count: int) -> None:
        with connect(self.log) as log, log.producer() as producer:
            for n in range(self.sent, self.sent + count):
                key = f"k{n % _KEYS}" if self.outside.keyed else f"k{n}"
                partition = n % _KEYS % self.partitions
                row = {"n": str(n), "text": _TEXTS[n % len(_TEXTS)]}
                deleted = self.outside.keyed and n % 7 == 3
                value = None if deleted else json.dumps(row, ensure_ascii=False).encode()
                producer.send(_TOPIC, value, key=key.encode(), partition=partition)
                if deleted:
                    self.by_key.pop(key, None)
                else:
                    self.by_key[key] = row
                    self.all.append((partition, row))
        self.sent += count

    def send_bad(self) -> int:
        """Send what cannot be written; return how many records."""
        row = self.outside.bad_row()
        values = [] if row is None else [json.dumps(row).encode()]
        values += _NO_ROWS
        with connect(self.log) as log, log.producer() as producer:
            for value in values:
                producer.send(_TOPIC, value, key=b"bad", partition=0)
        return len(values)

    def sink(self, connector: SinkConnector | None = None) -> SinkRun:
        made = self.outside.connector() if connector is None else connector
        return sink(made, topic=_TOPIC, log=self.log, name=_NAME)

    def run(self) -> SinkStatus:
        return self.sink().run(until="caught-up")

    def run_until(self, call: int) -> bool:
        """Run until it dies at a call, or is done; return whether it died."""
        try:
            self.sink(_DyingSink(self.outside.connector(), _Countdown(call))).run(until="caught-up")
        except SinkDeathError:
            return True
        return False

    @contextmanager
    def running(self) -> Iterator[_RunningSink]:
        running = _RunningSink(self.sink())
        thread = threading.Thread(target=running.run, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.sink.stop()
            thread.join(_WAIT_S)
        assert running.error is None, running.error

    def dead_letters(self) -> list[Mapping[str, str]]:
        with connect(self.log) as log:
            rows = log.read(f"{_NAME}.dead", 0, columns=("headers",)).column("headers").to_pylist()
        return [{one["key"]: one["value"].decode() for one in row} for row in rows]

    def check(self, *, late: bool = False) -> None:
        """Make sure that what is outside has the rows, as the connector promises.

        Args:
            late: Rows of a run that was stopped may have come after those of a later one.
        """
        found = list(self.outside.rows())
        if self.outside.keyed:
            if late:
                assert all(row in [sent for _, sent in self.all] for row in found)
                return
            assert sorted(found, key=_number) == sorted(self.by_key.values(), key=_number)
            return
        if self.outside.connector().guarantee == "at least once":
            found = _first_ones(found)
        for partition in range(self.partitions):
            wanted = [row for number, row in self.all if number == partition]
            numbers = {row["n"] for row in wanted}
            assert [row for row in found if row["n"] in numbers] == wanted
        assert len(found) == len(self.all)


def _number(row: TextRow) -> int:
    return int(row["n"])


def _first_ones(rows: Sequence[TextRow]) -> list[TextRow]:
    found: dict[str, TextRow] = {}
    for row in rows:
        found.setdefault(row["n"], row)
    return list(found.values())


@dataclass
class _RunningSink:
    """A sink that runs in a thread."""

    sink: SinkRun
    last: SinkStatus = field(default_factory=lambda: SinkStatus("writing"))
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.sink.run(on_status=self._take)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def _take(self, status: SinkStatus) -> None:
        self.last = status

    def wait_for(self, met: Callable[[SinkStatus], bool]) -> None:
        end_s = time.monotonic() + _WAIT_S
        while not met(self.last):
            assert self.error is None, self.error
            assert time.monotonic() < end_s, f"after {_WAIT_S:.0f} s the status is {self.last}"
            time.sleep(0.01)


@dataclass
class _Countdown:
    """The call at which a run dies."""

    left: int

    def call(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise SinkDeathError


@dataclass
class _WrappedSink:
    """A connector as another one is."""

    inner: SinkConnector

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def origin(self) -> str:
        return self.inner.origin

    @property
    def guarantee(self) -> SinkGuarantee:
        return self.inner.guarantee

    @property
    def records_max(self) -> int:
        return self.inner.records_max

    @property
    def bytes_max(self) -> int:
        return self.inner.bytes_max


@dataclass
class _DyingSink(_WrappedSink):
    death: _Countdown

    def open(self, opening: SinkOpening) -> SinkWriter:
        self.death.call()
        return _DyingWriter(self.inner.open(opening), self.death)


@dataclass
class _DyingWriter:
    inner: SinkWriter
    death: _Countdown

    @property
    def last(self) -> WrittenBatch | None:
        return self.inner.last

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        self.death.call()
        refused = self.inner.write(batch)
        self.death.call()
        return refused

    def close(self) -> None:
        self.inner.close()


@dataclass
class _Earlier(_WrappedSink):
    """A connector whose first batch is about to be written when ``later`` runs."""

    later: Callable[[], object]

    def open(self, opening: SinkOpening) -> SinkWriter:
        return _EarlierWriter(self.inner.open(opening), self.later)


@dataclass
class _EarlierWriter:
    inner: SinkWriter
    later: Callable[[], object] | None

    @property
    def last(self) -> WrittenBatch | None:
        return self.inner.last

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        if self.later is not None:
            later, self.later = self.later, None
            later()
        return self.inner.write(batch)

    def close(self) -> None:
        self.inner.close()
