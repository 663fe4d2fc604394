"""Physical removal: what was sealed, or was in clear before it was personal, is in no file; all else is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
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
from millstream.kernels.decode.archive_columns import ArchiveColumns
from millstream.kernels.decode.fields import Field
from millstream.kernels.decode.formats import JSON
from millstream.log.archive import RECORD_SCHEMA
from millstream.sourcing.event_types import EventTypes
from millstream.sourcing.store import EventStore

pytest.importorskip("cryptography")

DATA = pa.struct({"member": pa.string(), "name": pa.struct({"$sealed": pa.string()})})
TESTS = Path(__file__).resolve().parents[2]


def sealed_texts(log: ms.EventLog, member: str) -> list[str]:
    """Every ciphertext of a member's fields, from the log as it is."""
    found = []
    for record in log.consumer("club", follow=False):
        fields = record.json()["data"]
        if fields["member"] == member:
            found += [one["$sealed"] for one in fields.values() if isinstance(one, dict)]
    return [text.rsplit(":", 1)[1] for text in found]


def places(log: ms.EventLog) -> list[tuple]:
    """What of the records must stay: everything but the values of the forgotten."""
    return [
        (record.partition, record.offset, record.timestamp_ms, record.key, meta(record.json()))
        for record in log.consumer("club", follow=False)
    ]


def meta(event: dict) -> tuple:
    fields = event.pop("data")
    return event, fields["member"], fields["fee"], fields if fields["member"] != "m1" else None


def archive(log: ms.EventLog) -> None:
    columns = ArchiveColumns(JSON, (Field("data", DATA, required=True),), RECORD_SCHEMA.names)
    log.archive("club", columns, close_active=True)


def test_neither_plaintext_nor_ciphertext_is_in_any_file_and_the_rest_is_as_it_was(
    log: ms.EventLog, tmp_path: Path
) -> None:
    told = ms.Projection("told", {"told": "member TEXT, name TEXT"}, note, forget=erase)
    with open_club(log, tmp_path) as store, store.project(told, tmp_path / "views.db") as view:
        for at in range(30):
            store.handle(("london", "paris", "rome")[at % 3], ADA, who=f"clerk-{at}")
            store.handle("london", BOB)
            if at % 10 == 9:
                archive(log)  # and a new segment
        view.catch_up()
        store.lane(0).index.flush()
        store.lane(1).index.flush()
        ciphers = sealed_texts(log, "m1")
        others = sealed_texts(log, "m2")
        before = places(log)
        assert len(ciphers) == 60
        assert files_with(tmp_path, ciphers[0])  # they are found where they are
        assert "00000000000000000000.parquet" in files_with(tmp_path, ciphers[0])
        report = store.forget("m1", projections=[view], remove=True)
        for text in (*ciphers, *SECRETS):
            assert files_with(tmp_path, text) == []
        for text in others:
            assert files_with(tmp_path, text)
        assert places(log) == before
        assert [event.version for event in store.history("london")] == list(range(1, 41))
        assert store.load("paris").state == {"m1": "forgotten <> 7"}
        assert store.handle("paris", BOB).version == 11
    said = str(report)
    assert said.count("removed; ") == 2
    assert "sealed values and 0 in clear" in said
    assert "0 archives deleted" not in said
    assert not any("sealed values, which are noise" in one for one in report.remaining)
    with open_club(log, tmp_path, index=tmp_path / "anew") as store:
        assert store.load("paris").version == 11
        again = store.forget("m1", remove=True)
        assert str(again).count("0 sealed values and 0 in clear, in 0 records") == 2
    archive(log)
    for text in (*ciphers, *SECRETS):
        assert files_with(tmp_path, text) == []


def note(event, tables) -> None:
    tables.execute("INSERT INTO {told} VALUES (?, ?)", (event.data.member, event.data.name))


def erase(subject: str, tables) -> None:
    tables.execute("UPDATE {told} SET name = 'erased' WHERE member = ?", (subject,))


def test_what_was_in_clear_before_it_was_personal_is_said_and_removed(
    log: ms.EventLog, tmp_path: Path
) -> None:
    before = EventTypes()
    before.register("joined")(Joined)
    with EventStore(log, "club", CLUB, before, partitions=2) as store:
        store.handle("london", ADA)
        store.handle("london", BOB)
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
        assert len(files_with(tmp_path / "log", SECRETS[0])) == 1
        report = store.forget("m1")
        assert any("2 values in clear" in one for one in report.remaining)
        assert SECRETS[0] in next(store.history("london")).data.name
        report = store.forget("m1", remove=True)
        assert not any("in clear" in one for one in report.remaining)
        assert [event.data.name for event in store.history("london")] == [
            "forgotten",
            "Bob",
            "forgotten",
        ]
        assert "forgotten <>" in store.load("london").state["m1"]
    for secret in SECRETS:
        assert files_with(tmp_path, secret) == []
    assert files_with(tmp_path / "log", "bob@example")


def test_the_mark_of_what_was_removed_is_read_without_any_key(
    log: ms.EventLog, tmp_path: Path
) -> None:
    with open_club(log, tmp_path) as store:
        store.handle("london", ADA)
        store.forget("m1", remove=True)
    with open_club(log, tmp_path, keys=tmp_path / "other.db") as store:
        assert store.load("london").state == {"m1": "forgotten <> 7"}


def refuse(command: Joined, _: object) -> list[Joined]:
    if command.fee > 100:
        raise ms.CommandRejectedError(f"{command.name} pays too much")
    return [command]


def test_recorded_rejections_that_name_the_subject_are_emptied(
    log: ms.EventLog, tmp_path: Path
) -> None:
    club = ms.Decider(dict, refuse, CLUB.evolve)
    options = {"keys": tmp_path / "apart/keys.db", "rejections": "record"}
    with EventStore(log, "club", club, event_types(), **options) as store:
        for member, name in (("m1", SECRETS[0]), ("m11", "Eleven")):
            with pytest.raises(ms.CommandRejectedError):
                store.handle("london", Joined(member, name, "", 101))
        report = store.forget("m1")
        assert any("1 values in clear" in one for one in report.remaining)
        store.forget("m1", remove=True)
        first, second = log.consumer("club.rejections", follow=False)
    assert (first.json()["command"], first.json()["reason"]) == (None, "forgotten")
    assert second.json()["command"]["name"] == "Eleven"
    assert files_with(tmp_path, SECRETS[0]) == []


def test_a_refused_command_is_emptied_if_only_its_stream_or_the_reason_names_the_subject(
    log: ms.EventLog, tmp_path: Path
) -> None:
    club = ms.Decider(dict, refuse_all, CLUB.evolve)
    options = {"keys": tmp_path / "apart/keys.db", "rejections": "record"}
    with EventStore(log, "club", club, event_types(), **options) as store:
        for stream, reason in (("m1", "full"), ("london", "m1 was here"), ("m2", "full")):
            with pytest.raises(ms.CommandRejectedError):
                store.handle(stream, {"name": SECRETS[0], "reason": reason})
        report = store.forget("m1", remove=True)
        assert any("2 in clear, in 2 records, removed" in one for one in report.places)
        again = store.forget("m1", remove=True)
        assert any("rejections" in one and "0 in clear" in one for one in again.places)
    commands = [one.json()["command"] for one in log.consumer("club.rejections", follow=False)]
    assert [one is None for one in commands] == [True, True, False]


def refuse_all(command: dict[str, str], _: object) -> list[Joined]:
    raise ms.CommandRejectedError(command["reason"])


@dataclass(frozen=True)
class Entered:
    user: str
    name: str


@dataclass(frozen=True)
class EnteredNow:
    member: str
    name: str


@pytest.mark.parametrize("says", [False, True])
def test_earlier_versions_whose_subject_has_another_name_are_said_or_emptied_if_declared(
    log: ms.EventLog, tmp_path: Path, says: bool
) -> None:
    before = EventTypes()
    before.register("entered")(Entered)
    decider = ms.Decider(list, lambda new, _: [new], lambda state, event: [*state, event])
    with EventStore(log, "club", decider, before) as store:
        store.handle("london", Entered("m1", SECRETS[0]))
        store.handle("london", Entered("m2", "Bob"))
    now = EventTypes()
    register = now.register("entered", version=2, subject="member", personal={"name": ""})
    register(EnteredNow)
    declared = {"subject": "user", "personal": {"name": "?"}} if says else {}
    now.upcaster("entered", from_version=1, **declared)(
        lambda old: {"member": old["user"], "name": old["name"]}
    )
    with EventStore(log, "club", decider, now, keys=tmp_path / "keys.db") as store:
        report = store.forget("m1", remove=True)
        names = [event.data.name for event in store.history("london")]
    assert any("1 events of earlier versions" in one for one in report.remaining) is not says
    assert names == (["?", "Bob"] if says else [SECRETS[0], "Bob"])
    assert bool(files_with(tmp_path, SECRETS[0])) is not says


@dataclass(frozen=True)
class JoinedNow:
    member: str
    full_name: str


@pytest.mark.parametrize("says", [False, True])
def test_earlier_versions_whose_fields_have_other_names_are_said_or_emptied_if_declared(
    log: ms.EventLog, tmp_path: Path, says: bool
) -> None:
    before = EventTypes()
    before.register("joined")(Joined)
    with EventStore(log, "club", CLUB, before) as store:
        store.handle("london", ADA)
    now = EventTypes()
    declared = {"personal": {"name": "?", "email": ""}} if says else {}
    register = now.register("joined", version=2, subject="member", personal={"full_name": ""})
    register(JoinedNow)
    now.upcaster("joined", from_version=1, **declared)(
        lambda old: {"member": old["member"], "full_name": old["name"]}
    )
    decider = ms.Decider(list, lambda new, _: [new], lambda state, event: [*state, event])
    with EventStore(log, "club", decider, now, keys=tmp_path / "keys.db") as store:
        report = store.forget("m1", remove=True)
        assert next(store.history("london")).data.full_name == ("?" if says else SECRETS[0])
    assert any("1 events of earlier versions" in one for one in report.remaining) is not says
    assert bool(files_with(tmp_path, SECRETS[0])) is not says


@pytest.mark.parametrize(
    ("subject", "stream", "command", "emptied"),
    [
        ("1", "hall-1", {"seats": 1, "note": "1 of 1"}, False),
        ("1", "hall", {"member": 1}, True),
        ("1", "hall", {"member": "1"}, True),
        ("1", "hall", {"deep": [{"friend": "1"}]}, True),
        ("1", "1", {}, True),
        ("ada", "hall", {"mail": "ada@example.org"}, False),
        ("ada", "ada-2", {"file": "c/ada/x"}, False),
        ("ada", "hall", {"note": "for ada."}, True),
        ("ada@example.org", "hall", {"note": "write to ada@example.org."}, True),
        ("a.b", "hall", {"note": "x.a.b and a.b.c"}, False),
    ],
)
def test_only_refused_commands_that_name_the_subject_are_emptied(
    log: ms.EventLog, tmp_path: Path, subject: str, stream: str, command: dict, emptied: bool
) -> None:
    club = ms.Decider(dict, refuse_all, CLUB.evolve)
    options = {"keys": tmp_path / "apart/keys.db", "rejections": "record"}
    with EventStore(log, "club", club, event_types(), **options) as store:
        with pytest.raises(ms.CommandRejectedError):
            store.handle(stream, {"reason": "no", **command})
        report = store.forget(subject, remove=True)
    (record,) = log.consumer("club.rejections", follow=False)
    assert (record.json()["command"] is None) is emptied
    said = any("1 refused commands have the number of a subject" in one for one in report.remaining)
    assert said is (stream == "hall-1")


def test_events_of_types_that_are_not_registered_are_said(log: ms.EventLog, tmp_path: Path) -> None:
    before = EventTypes()
    before.register("entered")(Entered)
    decider = ms.Decider(list, lambda new, _: [new], lambda state, event: [*state, event])
    with EventStore(log, "club", decider, before) as store:
        store.handle("london", Entered("m1", SECRETS[0]))
    with EventStore(log, "club", decider, event_types(), keys=tmp_path / "keys.db") as store:
        report = store.forget("m1", remove=True)
    assert any("or of types that are not registered" in one for one in report.remaining)


def test_a_damaged_segment_and_quarantined_bytes_are_said(log: ms.EventLog, tmp_path: Path) -> None:
    with open_club(log, tmp_path, partitions=1) as store:
        for _ in range(3):
            store.handle("london", ADA)
        (kept,) = (path for path in (tmp_path / "log").rglob("*.log") if path.stat().st_size)
        folder = tmp_path / "log/quarantine"
        folder.mkdir(exist_ok=True)
        (folder / "bytes").write_bytes(kept.read_bytes()[:400])
        archive(log)
        (kept,) = (path for path in (tmp_path / "log").rglob("*.log") if path.stat().st_size)
        content = bytearray(kept.read_bytes())
        content[200] ^= 0xFF
        kept.write_bytes(content)
        report = store.forget("m1", remove=True)
    said = "\n".join(report.remaining)
    assert "bytes that were damaged hold something of it; delete the file" in said
    assert "is damaged: its bytes do not match its CRC-32C" in said


def write(store: EventStore) -> None:
    store.handle("london", BOB)


def read(store: EventStore) -> None:
    versions = [event.version for event in store.history("london")]
    assert versions == list(range(1, len(versions) + 1))
    assert {event.data.name for event in store.history("rome")} <= {SECRETS[0], "forgotten"}


def test_others_read_and_write_meanwhile(log: ms.EventLog, tmp_path: Path) -> None:
    stopped = threading.Event()
    failures: list[BaseException] = []

    def run(action) -> None:
        try:
            with open_club(log, tmp_path, index=tmp_path / action.__name__) as store:
                # With pauses: otherwise the stream may grow faster than a busy machine lets others read it.
                while not stopped.wait(0.005):
                    action(store)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failures.append(error)

    with open_club(log, tmp_path) as store:
        for _ in range(20):
            store.handle("london", ADA)
            store.handle("rome", ADA)
        running = [threading.Thread(target=run, args=(action,)) for action in (write, read)]
        for one in running:
            one.start()
        ciphers = sealed_texts(log, "m1")
        for _ in range(5):
            store.handle("london", ADA)
            ciphers += sealed_texts(log, "m1")[-2:]
            store.forget("m1", remove=True)
        stopped.set()
        for one in running:
            one.join()
        assert failures == []
        versions = [event.version for event in store.history("london")]
        assert versions == list(range(1, len(versions) + 1))
        assert store.load("london").version == len(versions) > 30
    for text in (*ciphers, *SECRETS):
        assert files_with(tmp_path, text) == []


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from unit.sourcing.club import open_club
from unit.sourcing.test_removal import note, erase
import millstream as ms
from millstream.log.files import DiskFiles

def forget(folder, left):
    def dying(real):
        def step(*given, **named):
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return real(*given, **named)
        return step
    told = ms.Projection("told", {"told": "member TEXT, name TEXT"}, note, forget=erase)
    with ms.connect(folder / "log") as log, open_club(log, folder) as store, store.project(
        told, folder / "views.db") as view:
        for name in ("pwrite", "truncate", "sync", "sync_folder", "rename", "remove"):
            setattr(DiskFiles, name, dying(getattr(DiskFiles, name)))
        for kind, name in ((type(view), "forget"), (type(store.lane(0)), "forget_states"),
            (type(store._keys), "destroy"), (type(store._keys), "announce")):
            setattr(kind, name, dying(getattr(kind, name)))
        store.forget("m1", projections=[view], remove=True)

for folder in sorted(Path(sys.argv[2]).iterdir()):
    child = os.fork()  # nothing is open yet, and no thread runs
    if not child:
        forget(folder, int(folder.name))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if not code:
        break
"""


@pytest.mark.thorough
def test_killed_at_every_write_it_is_finished_by_asking_again(tmp_path: Path) -> None:
    told = ms.Projection("told", {"told": "member TEXT, name TEXT"}, note, forget=erase)
    first = tmp_path / "first"
    with (
        ms.connect(first / "log") as log,
        open_club(log, first) as store,
        store.project(told, first / "views.db") as view,
    ):
        for _ in range(3):
            store.handle("london", ADA)
            store.handle("rome", ADA)
        store.handle("london", BOB)
        archive(log)
        store.handle("london", ADA)
        view.catch_up()
        ciphers, before = sealed_texts(log, "m1"), places(log)
    for step in range(1, 200):
        shutil.copytree(first, tmp_path / "copies" / f"{step:03}")
    command = [sys.executable, "-c", KILLED, str(TESTS), str(tmp_path / "copies")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    codes = [int(line) for line in done.stdout.split()]
    assert codes == [9] * (len(codes) - 1) + [0], done.stderr
    assert len(codes) > 60
    for folder in sorted((tmp_path / "copies").iterdir())[: len(codes)]:
        with (
            ms.connect(folder / "log") as log,
            open_club(log, folder) as store,
            store.project(told, folder / "views.db") as view,
        ):
            assert places(log) == before, folder.name
            assert len(list(store.history("london"))) == 5
            store.forget("m1", projections=[view], remove=True)
            assert places(log) == before
            assert store.load("rome").state == {"m1": "forgotten <> 7"}
            assert view.query("SELECT name FROM told WHERE member = 'm1'") == [("erased",)] * 7
        for text in (*ciphers, *SECRETS):
            assert files_with(folder, text) == [], folder.name
