"""A topic that was deleted and made anew, and a log that was restored, are not the ones that were read before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from unit.sourcing.club import ADA, CLUB, SECRETS, event_types, files_with, open_club
from unit.sourcing.ledger import ACCOUNT, Balance, before_its_append, open_store
from unit.sourcing.ledger import event_types as ledger_types
from unit.sourcing.test_projection import ALL, TOTALS, truth

import millstream as ms
from millstream.errors import TopicRecreatedError
from millstream.sourcing import projection as module
from millstream.sourcing.store import EventStore


@pytest.fixture
def second(log: ms.EventLog, tmp_path: Path) -> Iterator[ms.EventLog]:
    """Another connection to the folder of ``log``."""
    with ms.connect(tmp_path / "log") as opened:
        yield opened


def make_anew(log: ms.EventLog, events: int = 0) -> None:
    log.delete_topic("ledger")
    with open_store(log, partitions=1) as store:
        for _ in range(events):
            store.handle("bob", [100])


def pay(store: EventStore) -> object:
    return store.handle("ada", [1])


def load(store: EventStore) -> object:
    return store.load("ada")


def history(store: EventStore) -> object:
    return list(store.history("ada"))


def stream_ids(store: EventStore) -> object:
    return store.stream_ids()


def follow(store: EventStore) -> object:
    return list(store.subscribe({0: 1}, follow=False))


@pytest.mark.parametrize("events", [0, 1, 5])
@pytest.mark.parametrize("call", [pay, load, history, stream_ids, follow])
def test_a_topic_made_anew_behind_an_open_store_is_noticed_by_every_call(
    log: ms.EventLog, second: ms.EventLog, call: Callable[[EventStore], object], events: int
) -> None:
    with open_store(log, partitions=1) as store:
        store.handle("ada", [5])
        make_anew(second, events)
        for _ in range(2):
            with pytest.raises(TopicRecreatedError, match="was deleted and created again"):
                call(store)
    assert log.offsets("ledger") == [(0, events)]
    with open_store(log, partitions=1) as store:
        assert store.handle("ada", [7]).version == 1
        assert store.load("ada").state == Balance(7, 1)


def test_a_topic_that_is_made_anew_between_the_last_look_and_the_append_gets_nothing(
    log: ms.EventLog, second: ms.EventLog, monkeypatch
) -> None:
    """It ends where the old one did: the end alone would not tell them apart."""
    with open_store(log, partitions=1) as store:
        before_its_append(store, monkeypatch, lambda: make_anew(second))
        with pytest.raises(TopicRecreatedError):
            store.handle("ada", [5])
    assert log.offsets("ledger") == [(0, 0)]


def test_projections_of_a_topic_made_anew_are_stopped_and_then_refused_until_rebuilt(
    log: ms.EventLog, second: ms.EventLog, tmp_path: Path
) -> None:
    views = tmp_path / "views.db"
    with open_store(log, partitions=1) as store, store.project(TOTALS, views) as view:
        done = store.handle("ada", [5])
        view.catch_up()
        make_anew(second, events=3)
        with pytest.raises(TopicRecreatedError):
            view.catch_up()
        with pytest.raises(TopicRecreatedError):
            view.wait_for(done.position._replace(offset=3))
        assert view.query(ALL) == [("ada", 5)]
    with open_store(log, partitions=1) as store:
        with pytest.raises(ms.ConfigError, match="from another topic than today's"):
            store.project(TOTALS, views)
        with store.project(TOTALS, views, rebuild=True) as view:
            assert view.query(ALL) == truth(store) == [("bob", 300)]


def test_a_process_manager_sends_nothing_that_events_of_the_deleted_topic_asked_for(
    log: ms.EventLog, second: ms.EventLog, tmp_path: Path
) -> None:
    def react(event):
        return [ms.Send(f"{event.stream_id}-fee", [1])] if event.version == 1 else []

    with (
        open_store(log, partitions=1) as store,
        EventStore(log, "fees", ACCOUNT, ledger_types()) as fees,
        ms.ProcessManager("fee", store, react, state=tmp_path / "f.db", target=fees) as manager,
    ):
        store.handle("ada", [5])
        manager._run.catch_up()
        make_anew(second, events=2)
        with pytest.raises(TopicRecreatedError):
            manager.run_due()
        assert fees.stream_ids() == []


def test_the_snapshots_of_a_deleted_topic_go_with_the_next_store_of_its_log(
    log: ms.EventLog, tmp_path: Path
) -> None:
    with ms.connect(tmp_path / "elsewhere") as other:
        for one in (log, other):
            with open_club_without_keys(one, tmp_path / "index") as store:
                store.handle("london", ADA)
        log.delete_topic("club")
        other.delete_topic("club")
        assert len(files_with(tmp_path / "index", SECRETS[0])) == 2
        with open_store(log, index=tmp_path / "index"):
            assert len(files_with(tmp_path / "index", SECRETS[0])) == 1  # of the other log
        with open_store(other, index=tmp_path / "index"):
            assert files_with(tmp_path / "index", SECRETS[0]) == []


def open_club_without_keys(log: ms.EventLog, index: Path) -> EventStore:
    types = event_types(subject=None, personal=None)
    return EventStore(log, "club", CLUB, types, index=index, snapshot_every=1, partitions=1)


def test_forgetting_removes_the_index_of_a_topic_deleted_meanwhile_and_says_so(
    log: ms.EventLog, second: ms.EventLog, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
        with open_store(second, snapshot_every=1) as deleted:
            deleted.handle("Ada Lovelace", [1])
            topic_id = deleted.topic_id
        second.delete_topic("ledger")
        report = store.forget("m1")
    assert f"index of the deleted topic with id {topic_id}: removed" in report.places
    assert not (tmp_path / "log/sourcing" / topic_id).exists()


def test_a_store_whose_index_was_removed_goes_on_to_say_that_its_topic_is_gone(
    log: ms.EventLog, second: ms.EventLog
) -> None:
    with open_store(log, partitions=1, snapshot_every=1) as store:
        store.handle("ada", [5])
        make_anew(second, events=1)  # the store that makes it removes the index of the deleted one
        for _ in range(2):
            with pytest.raises(TopicRecreatedError):
                store.handle("ada", [1])


# -- a restored log ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """A command that its sender sends again, with its id, after the log was restored."""

    stream: str
    amount: int

    def to(self, store: EventStore) -> None:
        store.handle(self.stream, [self.amount], command_id=f"{self.stream}-{self.amount}")


SENT = [Sent("ada", 1), Sent("bob", 20), Sent("ada", 300)]
AGAIN = [Sent("bob", 20), Sent("ada", 1), Sent("ada", 300)]
FIXED = {"partitions": 1, "clock_ms": lambda: 1_800_000_000_000}


def restored(tmp_path: Path, before: Callable[[EventStore], object]) -> ms.EventLog:
    """A log that is as its backup was, before the commands; ``before`` was called after them."""
    folder, index = tmp_path / "kept", tmp_path / "index"
    with ms.connect(folder) as log, open_store(log, **FIXED, index=index):
        pass
    shutil.copytree(folder, tmp_path / "backup", ignore=shutil.ignore_patterns("owner.sock"))
    with ms.connect(folder) as log, open_store(log, **FIXED, index=index) as store:
        for one in SENT:
            one.to(store)
        before(store)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    return ms.connect(folder)


def test_an_index_of_a_log_that_was_restored_and_has_the_same_last_event_is_made_anew(
    tmp_path: Path,
) -> None:
    """The same commands come again, with their ids, and in another order: only what lies before differs."""
    with (
        restored(tmp_path, lambda _: None) as log,
        open_store(log, **FIXED, index=tmp_path / "other") as store,
    ):
        for one in AGAIN:
            one.to(store)
        last = list(store.history("ada"))[-1]
        assert (last.version, last.position.offset) == (2, 3)  # as it was before
        with open_store(log, **FIXED, index=tmp_path / "index") as old:
            assert [event.data.amount for event in old.history("bob")] == [20]
            assert [event.data.amount for event in old.history("ada")] == [1, 300]
            assert old.load("ada").state == Balance(301, 2)


def test_a_projection_of_a_log_that_was_restored_and_has_the_same_last_event_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "BEHIND_S", 0.05)
    views = tmp_path / "views.db"

    def fill(store: EventStore) -> None:
        with store.project(TOTALS, views) as view:
            view.catch_up()

    with restored(tmp_path, fill) as log, open_store(log, **FIXED) as store:
        for one in AGAIN:
            one.to(store)
        with (
            store.project(TOTALS, views) as view,
            pytest.raises(ms.ConfigError, match="was restored from an older backup"),
        ):
            view.catch_up()


def test_the_events_of_a_command_without_an_id_have_no_nonce(log: ms.EventLog) -> None:
    with open_store(log, partitions=1) as store:
        store.handle("ada", [1])
        store.handle("ada", [2, 3], command_id="c")
    one, two, three = (record.json() for record in log.consumer("ledger", follow=False))
    assert "nonce" not in one
    assert two["nonce"] == three["nonce"] != ""
