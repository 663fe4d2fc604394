"""The check of histories: it finds nothing in a correct one, and every planted anomaly."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from soak.anomalies import findings
from soak.generated_histories import GROUP, INPUT, OUTPUT, PLAIN, World
from soak.history import History, Journal, Operation, Place, Read, Sent, read_journals

SEEDS = range(25)
P = Place("p", 0)


def kinds(history: History) -> set[str]:
    return {one.kind for one in findings(history)}


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_found_where_all_is_right(seed: int) -> None:
    assert findings(World(seed).history) == []


def test_worlds_have_everything_in_them() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        for one in World(seed).history.operations:
            seen[f"{one.kind} {one.outcome}"] += 1
    for kind in ("send ok", "send info", *(f"transaction {x}" for x in ("ok", "fail", "info"))):
        assert seen[kind] > 50, kind
    assert min(seen[f"{kind} ok"] for kind in ("poll", "assign", "committed")) > 50


# -- planted: each takes a history and returns whether there was a place for the anomaly ------

Plant = Callable[[History, random.Random], bool]


def reads_of(history: History, isolation: str = "") -> list[Operation]:
    return [one for one in history.operations if one.read and isolation in ("", one.isolation)]


def forget(history: History, value: str) -> None:
    """Let nobody have read a value."""
    for one in history.operations:
        one.read = [read for read in one.read if read.value != value]


def acknowledged(history: History, chance: random.Random, kind: str) -> Operation | None:
    found = [one for one in history.operations if one.kind == kind and one.outcome == "ok"]
    return chance.choice(found) if found else None


def lost_write(history: History, chance: random.Random) -> bool:
    one = acknowledged(history, chance, "send")
    if one is None:
        return False
    (sent,) = one.sent
    ends = [read.offset for by in reads_of(history) for read in by.read if read.place == sent.place]
    if sent.offset >= max(ends):
        return False
    forget(history, sent.value)
    return True


def unseen(history: History, chance: random.Random) -> bool:
    for one in history.operations:
        if one.kind == "send" and one.outcome == "ok":
            for later in history.operations:
                later.read = [
                    read
                    for read in later.read
                    if read.place != one.sent[0].place or read.offset < one.sent[0].offset
                ]
            return True
    return False


def duplicate(history: History, chance: random.Random) -> bool:
    one = chance.choice(reads_of(history))
    read = chance.choice(one.read)
    one.read.append(read._replace(offset=read.offset + 10_000))
    return True


def invented(history: History, chance: random.Random) -> bool:
    one = chance.choice(reads_of(history))
    one.read[-1] = one.read[-1]._replace(value="nobody's")
    return True


def duplicate_offset(history: History, chance: random.Random) -> bool:
    sends = [
        one
        for one in history.operations
        if one.kind == "send" and one.outcome == "ok" and one.sent[0].place == PLAIN[0]
    ]
    if len(sends) < 2:
        return False
    one, other = chance.sample(sends, 2)
    one.sent[0].offset = other.sent[0].offset
    return True


def inconsistent_offset(history: History, chance: random.Random) -> bool:
    one = chance.choice([one for one in reads_of(history, "committed") if len(one.read) > 1])
    first, *_ = one.read
    others = [x for x in one.read if x.place == first.place and x.value != first.value]
    if not others:
        return False
    one.read[0] = first._replace(value=others[0].value)
    return True


def aborted_read(history: History, chance: random.Random) -> bool:
    aborted = [
        sent
        for one in history.operations
        if one.outcome == "fail"
        for sent in one.sent
        if sent.offset is not None
    ]
    if not aborted:
        return False
    sent = chance.choice(aborted)
    last = reads_of(history, "committed")[-1]
    last.read.append(Read(sent.place, sent.offset, sent.value))
    return True


def precommitted_read(history: History, chance: random.Random) -> bool:
    one = acknowledged(history, chance, "transaction")
    if one is None:
        return False
    readers = [
        by
        for by in reads_of(history, "committed")
        if any(read.value == one.sent[0].value for read in by.read)
    ]
    readers[0].ended = one.commit_began - 1
    return True


def torn_transaction(history: History, chance: random.Random) -> bool:
    one = acknowledged(history, chance, "transaction")
    if one is None or len(one.sent) < 2:
        return False
    forget(history, one.sent[0].value)
    return True


def poll_skip(history: History, chance: random.Random) -> bool:
    polls = [one for one in reads_of(history, "committed") if one.kind == "poll"]
    for one in polls:
        assigned = [
            by
            for by in history.operations
            if (by.process, by.kind) == (one.process, "assign") and by.number < one.number
        ]
        before = [by for by in polls if by.process == one.process and by.number < one.number]
        first = one.read[0]
        since = [by for by in before if by.number > assigned[-1].number]
        place_count = sum(read.place == first.place for read in one.read)
        starts = first.offset == assigned[-1].offsets[first.place]
        if not since and place_count > 1 and starts and is_known(history, one):
            del one.read[0]
            return True
    return False


def is_known(history: History, one: Operation, at: int = 0) -> bool:
    """Return whether others have read it, too."""
    return any(one.read[at] in by.read for by in reads_of(history) if by is not one)


def int_poll_skip(history: History, chance: random.Random) -> bool:
    for one in reads_of(history, "committed"):
        for at in range(len(one.read) - 2):
            places = {read.place for read in one.read[at : at + 3]}
            if len(places) == 1 and one.kind == "poll" and is_known(history, one, at + 1):
                del one.read[at + 1]
                return True
    return False


def nonmonotonic_poll(history: History, chance: random.Random) -> bool:
    one = chance.choice([one for one in reads_of(history) if one.kind == "poll"])
    again = copy.deepcopy(one)
    again.number = one.number + 0.5  # before what came next
    history.operations.insert(history.operations.index(one) + 1, again)
    return True


def int_nonmonotonic_poll(history: History, chance: random.Random) -> bool:
    one = chance.choice([one for one in reads_of(history) if one.kind == "poll"])
    one.read.append(one.read[-1])
    return True


def nonmonotonic_send(history: History, chance: random.Random) -> bool:
    by_process: dict[tuple[str, Place], list[Operation]] = {}
    for one in history.operations:
        if one.kind == "send" and one.outcome == "ok":
            by_process.setdefault((one.process, one.sent[0].place), []).append(one)
    for sends in by_process.values():
        if len(sends) > 1:
            sends[0].number, sends[1].number = sends[1].number, sends[0].number
            return True
    return False


def int_nonmonotonic_send(history: History, chance: random.Random) -> bool:
    for one in history.operations:
        known = [sent for sent in one.sent if sent.offset is not None]
        whole = one.outcome == "ok" and len(known) == len(one.sent) > 1
        if one.kind == "transaction" and whole and len({sent.place for sent in known}) == 1:
            one.sent.reverse()
            return True
    return False


def offset_regression(history: History, chance: random.Random) -> bool:
    fetched = [one for one in history.operations if one.kind == "committed"]
    offsets = [
        one.offsets[INPUT]
        for one in history.operations
        if one.kind == "transaction" and one.group and one.outcome == "ok"
    ]
    if len(set(offsets)) < 2:
        return False
    fetched[-1].offsets = {INPUT: min(offsets)}
    return True


def offset_invented(history: History, chance: random.Random) -> bool:
    fetched = [one for one in history.operations if one.kind == "committed"]
    fetched[-1].offsets = {INPUT: 12_345}
    return True


def aborted_offsets(history: History, chance: random.Random) -> bool:
    done, failed = set(), set()
    for one in history.operations:
        if one.kind == "transaction" and one.group:
            (failed if one.outcome == "fail" else done).add(one.offsets[INPUT])
    if not failed - done:
        return False
    fetched = [one for one in history.operations if one.kind == "committed"]
    fetched[-1].offsets = {INPUT: max(failed - done)}
    return True


def twice_transformed(history: History, chance: random.Random) -> bool:
    done = [
        one
        for one in history.operations
        if one.kind == "transaction" and one.group and one.outcome == "ok"
    ]
    if not done:
        return False
    one = done[-1]
    one.sent.append(Sent(OUTPUT, "again", 20_000, one.sent[0].source))
    return True


def never_transformed(history: History, chance: random.Random) -> bool:
    for one in history.operations:
        if one.kind == "transaction" and one.group and one.outcome == "ok":
            one.sent = one.sent[1:]
            return True
    return False


def circular(history: History, chance: random.Random) -> bool:
    done = [one for one in history.operations if one.kind == "transaction" and one.outcome == "ok"]
    if len(done) < 2:
        return False
    one, other = chance.sample(done, 2)
    for reader, writer in ((one, other), (other, one)):
        sent = writer.sent[0]
        reader.read = [*reader.read, Read(sent.place, sent.offset, sent.value)]
    return True


PLANTS: dict[str, Plant] = {
    one.__name__.replace("_", "-"): one
    for one in (
        lost_write,
        unseen,
        duplicate,
        invented,
        duplicate_offset,
        inconsistent_offset,
        aborted_read,
        precommitted_read,
        torn_transaction,
        poll_skip,
        int_poll_skip,
        nonmonotonic_poll,
        int_nonmonotonic_poll,
        nonmonotonic_send,
        int_nonmonotonic_send,
        offset_regression,
        offset_invented,
        aborted_offsets,
        twice_transformed,
        never_transformed,
        circular,
    )
}


@pytest.mark.parametrize("kind", PLANTS)
def test_what_is_planted_is_found(kind: str) -> None:
    planted = 0
    for seed in SEEDS:
        history = World(seed).history
        if PLANTS[kind](history, random.Random(seed)):
            planted += 1
            assert kind in kinds(history), f"seed {seed}"
    assert planted >= 5


def test_every_finding_of_the_table_has_been_planted() -> None:
    import soak.anomalies as module

    rows = [line for line in (module.__doc__ or "").splitlines() if line.startswith("``")]
    assert {row.split("``")[1] for row in rows} == {
        kind for kind in PLANTS if not kind.startswith("int-")
    }


# -- what is not known is held against nobody -------------------------------------------------


def history_of(*operations: Operation, complete: bool = True) -> History:
    return History(list(operations), complete=complete)


def test_a_send_that_was_never_answered_may_be_there_or_not() -> None:
    sent = Operation("s", 0, "send", sent=[Sent(P, "a")])
    assert kinds(history_of(sent)) == set()
    read = Operation("r", 0, "poll", "ok", ended=5, read=[Read(P, 0, "a")])
    assert kinds(history_of(sent, read)) == set()


def test_a_transaction_nobody_knows_the_end_of_is_all_there_or_not_at_all() -> None:
    one = Operation("t", 0, "transaction", commit_began=3, sent=[Sent(P, "a", 0), Sent(P, "b", 1)])
    both = Operation("r", 0, "poll", "ok", ended=5, read=[Read(P, 0, "a"), Read(P, 1, "b")])
    half = Operation("r", 0, "poll", "ok", ended=5, read=[Read(P, 0, "a")])
    assert kinds(history_of(one)) == set()
    assert kinds(history_of(one, both)) == set()
    assert kinds(history_of(one, half)) == {"torn-transaction"}
    assert kinds(history_of(one, half, complete=False)) == set()  # the other may yet be read


def test_an_aborted_record_is_no_secret_from_uncommitted_readers() -> None:
    one = Operation("t", 0, "transaction", "fail", ended=4, sent=[Sent(P, "a", 0)])
    read = Operation("r", 0, "poll", "ok", ended=3, read=[Read(P, 0, "a")], isolation="uncommitted")
    assert kinds(history_of(one, read)) == set()


def test_journals_come_back_as_they_were_written_without_what_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "p.0.jsonl"
    journal = Journal(path)
    sent = Sent(P, "a", None, "source")
    number = journal.begin("transaction", sent=[sent], group=GROUP, offsets={P: 3})
    journal.commit_began(number)
    sent.offset = 7
    journal.end(number, "ok", sent=[sent])
    journal.note("poll", 5, read=[Read(P, 7, "a")], isolation="uncommitted")
    journal.begin("send", sent=[Sent(P, "b")])
    with path.open("ab") as file:
        file.write(b'{"n":3,"k":"se')  # killed in the middle of a line
    one, two, three = read_journals([path])
    assert (one.process, one.outcome, one.group, one.offsets) == ("p.0", "ok", GROUP, {P: 3})
    assert one.sent == [Sent(P, "a", 7, "source")]
    assert one.began <= one.commit_began <= one.ended
    assert (two.read, two.isolation, two.began) == ([Read(P, 7, "a")], "uncommitted", 5)
    assert (three.outcome, three.sent[0].offset) == ("info", None)
