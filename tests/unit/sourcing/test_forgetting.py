"""A forgotten subject: in no file is there anything to read of them, and everything else is as before."""

from __future__ import annotations

import os
import shutil
import threading
import traceback
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from unit.sourcing.club import (
    ADA,
    BOB,
    CLUB,
    SECRETS,
    Joined,
    event_types,
    files_with,
    open_club,
)

import millstream as ms
from millstream.sourcing.store import EventStore
from millstream.sourcing.subject_keys import SubjectKeys

pytest.importorskip("cryptography")

COLUMNS = {"members": "member TEXT, name TEXT"}


def note(event, tables) -> None:
    tables.execute(
        "INSERT INTO {members} VALUES (?, ?)", (event.data.member, f"{event.data.name}!")
    )


def erase(subject: str, tables) -> None:
    tables.execute("UPDATE {members} SET name = 'erased' WHERE member = ?", (subject,))


def test_no_file_has_anything_of_a_forgotten_subject(log: ms.EventLog, tmp_path: Path) -> None:
    views = tmp_path / "views.db"
    told = ms.Projection("told", {"told": COLUMNS["members"]}, tell, forget=tell_to_erase)
    rebuilt = ms.Projection("rebuilt", COLUMNS, note)
    with (
        open_club(log, tmp_path) as store,
        store.project(told, views) as one,
        store.project(rebuilt, views) as two,
    ):
        for stream_id in ("london", "paris"):
            store.handle(stream_id, ADA)
            store.handle(stream_id, BOB)
        one.catch_up()
        two.catch_up()
        for lane in (store.lane(0), store.lane(1)):
            lane.index.flush()
        assert files_with(tmp_path, SECRETS[0])  # in snapshots and views, and they are found
        shutil.copytree(
            tmp_path / "log/t", tmp_path / "backup"
        )  # of the log, before it was asked for
        report = store.forget("m1", projections=[one, two])
        assert len(report.places) == 7
        assert "1 keys destroyed" in str(report)
        assert sum("2 sealed values" in one for one in report.places) == 2
        assert sum("the bytes of 2 sealed values" in one for one in report.remaining) == 2
        assert two.query("SELECT name FROM members ORDER BY 1")[-1] == ("forgotten!",)
        assert ("erased",) in one.query("SELECT name FROM told")
        assert store.load("london").state == {
            "m1": "forgotten <> 7",
            "m2": "Bob <bob@example> 8",
        }
        for secret in SECRETS:
            assert files_with(tmp_path, secret) == []
        assert files_with(tmp_path, "Bob")  # in snapshots again: nobody else is touched
        assert store.forget("m1").places[0].endswith("0 keys destroyed")
    for secret in SECRETS:
        assert files_with(tmp_path, secret) == []


def tell(event, tables) -> None:
    tables.execute("INSERT INTO {told} VALUES (?, ?)", (event.data.member, event.data.name))


def tell_to_erase(subject: str, tables) -> None:
    tables.execute("UPDATE {told} SET name = 'erased' WHERE member = ?", (subject,))


def test_a_subject_who_comes_back_is_known_from_then_on_only(
    log: ms.EventLog, tmp_path: Path
) -> None:
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
        store.forget("m1")
        store.handle("london", Joined("m1", "Ada King", "", 9))
        names = [event.data.name for event in store.history("london")]
    assert names == ["forgotten", "Ada King"]


def note_again(event, tables) -> None:
    note(event, tables)


def test_a_rebuild_that_was_begun_before_is_not_continued_with_what_was_forgotten(
    log: ms.EventLog, tmp_path: Path, monkeypatch
) -> None:
    live = ms.Projection("members", COLUMNS, note, forget=erase)
    other = ms.Projection("members", COLUMNS, note_again, forget=erase)
    views = tmp_path / "views.db"
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
        with store.project(live, views) as view:
            view.catch_up()
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(type(view), "_show", lambda *_: 1 / 0)
                store.project(other, views, rebuild=True)
            store.forget("m1", projections=[view])
            assert view.query("SELECT name FROM members") == [("erased",)]
        with store.project(other, views, rebuild=True) as view:
            assert view.query("SELECT name FROM members") == [("forgotten!",)]


def test_a_projection_that_was_rebuilt_elsewhere_says_so_when_it_is_told_to_forget(
    log: ms.EventLog, tmp_path: Path
) -> None:
    members = ms.Projection("members", COLUMNS, note, forget=erase)
    views = tmp_path / "views.db"
    with open_club(log, tmp_path) as store, store.project(members, views) as view:
        store.handle("london", ADA)
        store.project(members, views, rebuild=True).close()
        with pytest.raises(ms.FencedError, match="was rebuilt by other code, or anew"):
            store.forget("m1", projections=[view])
        with store.project(members, views) as again:
            store.forget("m1", projections=[again])
            assert again.query("SELECT name FROM members") == [("erased",)]


def test_events_that_were_read_before_are_not_applied_after_forgetting(
    log: ms.EventLog, tmp_path: Path, monkeypatch
) -> None:
    members = ms.Projection("members", COLUMNS, note, forget=erase)
    views = tmp_path / "views.db"
    with open_club(log, tmp_path) as store, open_club(log, tmp_path) as other:
        store.handle("london", ADA)
        with store.project(members, views) as one, other.project(members, views) as two:
            read = two._events_from

            def read_slowly(*place):
                found = read(*place)
                monkeypatch.undo()
                store.forget("m1", projections=[one])
                return found

            monkeypatch.setattr(two, "_events_from", read_slowly)
            two.catch_up()
            assert one.query("SELECT name FROM members") == [("forgotten!",)]


def test_a_snapshot_of_a_state_from_before_forgetting_is_never_used(
    log: ms.EventLog, tmp_path: Path, monkeypatch
) -> None:
    """It is kept after another process forgot, by one that is killed before it hears of that."""
    with open_club(log, tmp_path) as one, open_club(log, tmp_path) as two:
        two.handle("london", ADA)
        lane = two.lane_of("london")
        keep = lane._keep

        def keep_late(draft):
            forgetting = threading.Thread(target=one.forget, args=("m1",))
            forgetting.start()
            forgetting.join()
            keep(draft)
            lane.index.flush()

        monkeypatch.setattr(lane, "_keep", keep_late)
        two.handle("london", BOB)
        with open_club(log, tmp_path) as three:
            assert three.load("london").state["m1"] == "forgotten <> 7"


def test_forgetting_nobody_is_refused_and_empties_nothing(log: ms.EventLog, tmp_path: Path) -> None:
    def refuse(command, _):
        raise ms.CommandRejectedError("no")

    options = {"keys": tmp_path / "keys.db", "rejections": "record"}
    club = ms.Decider(dict, refuse, CLUB.evolve)
    with EventStore(log, "club", club, event_types(), **options) as store:
        with pytest.raises(ms.CommandRejectedError):
            store.handle("london", -30)
        with pytest.raises(ms.ConfigError, match="nobody"):
            store.forget([], remove=True)
    (record,) = log.consumer("club.rejections", follow=False)
    assert record.json()["command"] == -30


def test_another_process_that_had_the_state_in_memory_forgets_too(
    log: ms.EventLog, tmp_path: Path
) -> None:
    with open_club(log, tmp_path) as one, open_club(log, tmp_path) as other:
        one.handle("london", ADA)
        other.handle("london", BOB)
        other.forget("m1")
        assert one.handle("london", BOB).version == 3
        assert one.load("london").state["m1"] == "forgotten <> 7"
    assert files_with(tmp_path, SECRETS[0]) == []


def test_a_lost_key_store_is_said_loudly_and_nothing_else_is_lost(
    log: ms.EventLog, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    with open_club(log, tmp_path) as store:
        store.handle("london", BOB)
    shutil.copytree(tmp_path / "apart", old)
    with open_club(log, tmp_path) as store:
        store.handle("paris", ADA)
    with open_club(log, tmp_path, keys=tmp_path / "new.db") as store:
        with pytest.raises(ms.ConfigError, match="is another one, or an older copy"):
            store.load("london")
        store.handle("rome", BOB)
    with open_club(log, tmp_path, keys=old / "keys.db", index=tmp_path / "i") as store:
        assert "Bob" in store.load("london").state["m2"]
        with pytest.raises(ms.ConfigError, match="which it never had"):
            store.load("paris")
    with open_club(log, tmp_path) as store:
        assert SECRETS[0] in store.load("paris").state["m1"]


def test_an_old_copy_of_the_keys_that_is_used_on_takes_nobody_else_along(
    log: ms.EventLog, tmp_path: Path
) -> None:
    options = {"snapshot_every": None}
    with open_club(log, tmp_path, **options) as store:
        store.handle("london", ADA)
    shutil.copytree(tmp_path / "apart", tmp_path / "backup")
    with open_club(log, tmp_path, **options) as store:
        store.handle("london", BOB)
    shutil.move(tmp_path / "apart", tmp_path / "newest")
    shutil.move(tmp_path / "backup", tmp_path / "apart")
    with open_club(log, tmp_path, **options) as store:
        store.handle("paris", Joined("m3", "Cyd", "", 9))
        store.forget("m3", remove=True)
        with pytest.raises(ms.ConfigError, match="it is another one, or an older copy"):
            store.load("london")
    shutil.move(tmp_path / "apart", tmp_path / "older")
    shutil.move(tmp_path / "newest", tmp_path / "apart")
    with open_club(log, tmp_path, **options) as store:
        assert store.load("london").state["m2"] == "Bob <bob@example> 8"


def test_what_was_sealed_as_one_field_opens_as_no_other(tmp_path: Path) -> None:
    types = event_types()
    keys = SubjectKeys(tmp_path / "keys.db")
    with_keys = types.sealed_with(keys)
    fields = with_keys.encode(ADA).fields
    assert with_keys.decode("joined", 1, fields, "here") == ADA
    swapped = {**fields, "name": fields["email"], "email": fields["name"]}
    with pytest.raises(ms.MillstreamError, match="its bytes were changed"):
        with_keys.decode("joined", 1, swapped, "here")
    keys.close()


def test_personal_fields_need_keys_and_a_subject(log: ms.EventLog, tmp_path: Path) -> None:
    with pytest.raises(ms.ConfigError, match="'joined' have personal fields; give the store"):
        open_club(log, tmp_path, keys=None)
    for wrong in ({"subject": None}, {"subject": "name"}, {"personal": {"age": 0}}):
        with pytest.raises(ms.ConfigError, match="give both, of these fields"):
            event_types(**wrong)
    plain = ms.EventTypes()
    plain.register("joined")(Joined)
    with (
        EventStore(log, "plain", CLUB, plain) as store,
        pytest.raises(ms.ConfigError, match="has no keys"),
    ):
        store.forget("m1")
    (tmp_path / "bad.db").write_bytes(b"no database" * 100)
    with pytest.raises(ms.ConfigError, match="restore it from its backup"):
        open_club(log, tmp_path, keys=tmp_path / "bad.db")


def test_no_file_of_keys_can_be_read_by_other_users(tmp_path: Path) -> None:
    keys = SubjectKeys(tmp_path / "keys.db")
    keys.seal("m1", "Ada", "here")
    rights = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    keys.close()
    assert "keys.db-wal" in rights
    assert set(rights.values()) == {0o600}


def test_what_is_sealed_is_not_read_without_keys(log: ms.EventLog, tmp_path: Path) -> None:
    """The declaration was removed, and the keys with it; the fields are sealed in the log."""
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
    plain = ms.EventTypes()
    plain.register("joined")(Joined)
    with EventStore(log, "club", CLUB, plain) as store:
        for read in (
            lambda: store.load("london"),
            lambda: list(store.history("london")),
            lambda: list(store.subscribe(follow=False)),
        ):
            with pytest.raises(
                ms.ConfigError, match="'name' of the event 'joined' of version 1 at"
            ):
                read()
        assert store.handle("paris", BOB).version == 1


@dataclass(frozen=True)
class JoinedNow:
    member: str
    full_name: str


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("remove", [False, True])
def test_a_personal_field_that_was_renamed_is_read_as_it_was_declared_once_forgotten(
    log: ms.EventLog, tmp_path: Path, says: bool, remove: bool
) -> None:
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
        store.handle("paris", BOB)
    now = ms.EventTypes()
    declared = {"personal": {"name": "nobody", "email": ""}} if says else {}
    now.register("joined", version=2, subject="member", personal={"full_name": "?"})(JoinedNow)
    now.upcaster("joined", from_version=1, **declared)(
        lambda old: {"member": old["member"], "full_name": old["name"]}
    )
    decider = ms.Decider(list, lambda new, _: [new], lambda state, event: [*state, event])
    with EventStore(log, "club", decider, now, keys=tmp_path / "apart/keys.db") as store:
        assert store.load("london").state == [JoinedNow("m1", SECRETS[0])]
        store.handle("rome", JoinedNow("m1", SECRETS[0]))
        store.forget("m1", remove=remove)
        assert store.load("rome").state == [JoinedNow("m1", "?")]
        assert store.load("paris").state == [JoinedNow("m2", "Bob")]
        if says:
            assert store.load("london").state == [JoinedNow("m1", "nobody")]
        else:
            with pytest.raises(ms.ConfigError, match="nothing says what it is read as"):
                store.load("london")


def test_personal_fields_of_an_earlier_version_need_keys_too(log: ms.EventLog) -> None:
    now = ms.EventTypes()
    now.register("joined", version=2)(Joined)
    now.upcaster("joined", from_version=1, subject="member", personal={"name": ""})(dict)
    with pytest.raises(ms.ConfigError, match="'joined' have personal fields; give the store"):
        EventStore(log, "club", CLUB, now)


@pytest.mark.parametrize("subject", [True, None, "", 1.5, ["m1"]])
def test_a_subject_that_is_nobody_is_refused_and_nothing_is_stored(
    log: ms.EventLog, tmp_path: Path, subject: object
) -> None:
    types = ms.EventTypes()
    register = types.register("noted", subject="member", personal={"name": ""})
    register(make_dataclass("Noted", [("member", Any), ("name", str)], frozen=True))
    kind = next(iter(types._by_class))
    decider = ms.Decider(list, lambda new, _: [new], lambda state, event: [*state, event.member])
    with EventStore(log, "n", decider, types, keys=tmp_path / "k.db", partitions=1) as store:
        with pytest.raises(ms.ConfigError, match="the subject 'member' of an event 'noted' is"):
            store.handle("a", kind(subject, "Ada"))
        assert log.offsets("n") == [(0, 0)]
        store.handle("a", kind(1, "Ada"))
        store.handle("a", kind("True", "Bob"))
        store.forget("1")
        assert [event.data.name for event in store.history("a")] == ["", "Bob"]


def test_an_event_that_cannot_be_read_does_not_have_its_personal_fields_in_the_error(
    log: ms.EventLog, tmp_path: Path
) -> None:
    with open_club(log, tmp_path) as store:
        store.handle("club", ADA)
    types = event_types(version=2)

    @types.upcaster("joined", from_version=1)
    def _(fields):
        return {**fields, "name": int(fields["name"])}

    keys = tmp_path / "apart" / "keys.db"
    with (
        EventStore(log, "club", CLUB, types, keys=keys) as store,
        pytest.raises(ms.UserCodeError, match="cannot be read: ValueError") as raised,
    ):
        store.load("club")
    assert SECRETS[0] not in "".join(traceback.format_exception(raised.value))


def test_an_interrupt_while_keys_are_destroyed_leaves_them_and_forgetting_can_be_repeated(
    log: ms.EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with open_club(log, tmp_path) as store:
        store.handle("club", ADA)
        with monkeypatch.context() as patched:
            patched.setattr(SubjectKeys, "_announce", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.forget("m1")
        assert [event.data for event in store.history("club")] == [ADA]
        store.handle("club", BOB)
        store.forget("m1")
        assert SECRETS[0] not in str(store.load("club").state)


def test_a_forked_child_is_refused_before_it_destroys_keys(
    log: ms.EventLog, tmp_path: Path
) -> None:
    with open_club(log, tmp_path) as store:
        store.handle("club", ADA)
        child = os.fork()
        if not child:
            try:
                store.forget("m1")
            except ms.FencedError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert [event.data for event in store.history("club")] == [ADA]
