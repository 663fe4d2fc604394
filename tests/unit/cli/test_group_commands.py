"""`millstream group` and `millstream lag`, and consuming as a group."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

import millstream as ms
from millstream.record import TopicPartition


@pytest.fixture
def clicks(done):
    """Return a topic of two partitions with ten records in each."""
    done("topic", "create", "clicks", "--partitions", "2")
    for partition in "01":
        lines = b"".join(b"%d\n" % (int(partition) * 100 + n) for n in range(10))
        done("produce", "clicks", "--partition", partition, stdin=lines)
    return "clicks"


@pytest.fixture
def shrinking(done, folder):
    """Return a topic whose retention keeps less than a group has still to read."""
    done(
        *("topic", "create", "shrinking", "--retention-bytes", "20KiB"),
        *("--set", "segment.bytes=4096"),
    )
    lines = b"".join(b'{"n":%d}\n' % n for n in range(100))
    # One batch per call, so that segments hold a known part of the records.
    for _ in range(4):
        done("produce", "shrinking", stdin=lines)
    done("consume", "shrinking", "--group", "slow", "--count", "10")
    return "shrinking"


def offsets(folder, group: str) -> dict[int, int]:
    with ms.connect(folder) as log:
        return {name.partition: at.offset for name, at in log.committed_offsets(group).items()}


def test_a_group_goes_on_where_it_was(done, clicks, folder):
    first = done("consume", clicks, "--group", "g", "--count", "7").split()
    rest = done("consume", clicks, "--group", "g").split()
    assert (len(first), len(rest)) == (7, 13)
    assert sorted(map(int, first + rest)) == [*range(10), *range(100, 110)]
    assert done("consume", clicks, "--group", "g", "--from", "earliest") == ""
    assert offsets(folder, "g") == {0: 10, 1: 10}
    done("produce", clicks, "--partition", "1", stdin=b"7\n")
    assert done("consume", clicks, "--group", "g", "--json").count('"value": 7') == 1
    assert done("consume", clicks, "--group", "other", "--from", "latest") == ""


def test_only_what_was_printed_is_committed(done, clicks, folder):
    done("consume", clicks, "--group", "g", "--until", "4")
    assert offsets(folder, "g") == {0: 4, 1: 4}
    done("consume", clicks, "--group", "g", "--partition", "1", "--until", "6")
    assert offsets(folder, "g") == {0: 4, 1: 6}
    assert done("consume", clicks, "--group", "g", "--until", "5").split() == ["4"]
    assert offsets(folder, "g") == {0: 5, 1: 6}


class FullAfter(io.RawIOBase):
    """An output that takes so many bytes, and then its reader has left."""

    def __init__(self, room: int) -> None:
        self.taken = b""
        self._room = room
        self._replaced = False

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        if not self._replaced:
            if len(self.taken) + len(data) > self._room:
                raise BrokenPipeError
            self.taken += bytes(data)
        return len(data)

    def fileno(self) -> int:
        self._replaced = True  # whoever asks puts something else in its place
        return os.open(os.devnull, os.O_WRONLY)


def test_what_the_output_took_is_committed_and_nothing_more(call, done, folder, monkeypatch):
    done("topic", "create", "t")
    done("produce", "t", stdin=b"".join(b"%04d\n" % n for n in range(1000, 3000)))
    monkeypatch.setattr("millstream.client.consumer.COMMIT_EVERY_S", 0)
    output = FullAfter(52)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(output)))
        assert call("consume", "t", "--group", "g") == (0, "", "")
    assert output.taken == b"".join(b"%04d\n" % n for n in range(1000, 1010))
    assert offsets(folder, "g") == {0: 10}


def test_groups_are_listed_and_described(done, clicks):
    assert "no groups" in done("group", "list")
    assert json.loads(done("group", "list", "--json")) == []
    done("consume", clicks, "--group", "g", "--until", "4")
    done("topic", "create", "other")
    done("group", "reset", "g", "--topic", "other", "--to", "latest", "--yes")
    assert json.loads(done("group", "list", "--json")) == [
        {
            "group": "g",
            "topics": ["clicks", "other"],
            "partitions": 3,
            "behind": 12,
            "at_risk": 0,
            "lost": 0,
            "state": "ok",
        }
    ]
    assert "clicks, other" in done("group", "list")
    described = json.loads(done("group", "describe", "g", "--json"))
    assert [
        (row["topic"], row["partition"], row["committed_offset"], row["end_offset"], row["behind"])
        for row in described
    ] == [("clicks", 0, 4, 10, 6), ("clicks", 1, 4, 10, 6), ("other", 0, 0, 0, 0)]
    assert all(row["committed_ms"] > 1_700_000_000_000 for row in described)
    assert "clicks/1" in done("group", "describe", "g")


def test_reset_shows_before_and_after_and_asks(call, done, clicks, folder):
    done("consume", clicks, "--group", "g", "--partition", "0", "--until", "4")
    ask = ["group", "reset", "g", "--topic", clicks, "--to", "latest"]
    code, out, err = call(*ask, stdin=b"\n")
    assert code == 130
    assert [line.split() for line in out.splitlines() if "clicks/" in line] == [
        ["clicks/0", "4", "10"],
        ["clicks/1", "-", "10"],
    ]
    assert "let group g continue there?" in err
    assert offsets(folder, "g") == {0: 4}
    assert "continues there" in done(*ask, stdin=b"yes\n")
    assert offsets(folder, "g") == {0: 10, 1: 10}
    rows = json.loads(done(*ask[:-1], "3", "--partition", "1", "--yes", "--json"))
    assert rows == [{"topic": "clicks", "partition": 1, "before": 10, "after": 3}]
    assert done("consume", clicks, "--group", "g", "--count", "1").split() == ["103"]


def test_reset_to_a_time_is_the_first_record_at_it_or_later(done, folder):
    done("topic", "create", "t")
    lines = b"".join(b'{"at": "2026-11-21T10:%02d"}\n' % n for n in range(10))
    done("produce", "t", "--timestamp-field", "at", stdin=lines)
    done("group", "reset", "g", "--topic", "t", "--to", "2026-11-21T10:06:30", "--yes")
    assert offsets(folder, "g") == {0: 7}
    done("group", "reset", "g", "--topic", "t", "--to", "2999-01-01", "--yes")
    assert offsets(folder, "g") == {0: 10}


def test_a_group_that_is_deleted_begins_anew(done, call, clicks):
    done("consume", clicks, "--group", "g")
    assert call("group", "delete", "g", stdin=b"no\n").code == 130
    assert "2 committed offsets" in done("group", "delete", "g", stdin=b"y\n")
    assert len(done("consume", clicks, "--group", "g").split()) == 20
    gone = json.loads(done("group", "delete", "g", "--yes", "--json"))
    assert gone == {"group": "g", "committed_offsets": 2}
    assert "no groups" in done("group", "list")


@pytest.mark.not_in_lane("thresholds", "so many lines take more room there")
def test_lag_tells_of_risk_before_loss_and_of_loss_after(done, call, shrinking, folder):
    assert call("lag", "--check").code == 0
    assert " ok" in done("lag", "slow")
    with ms.connect(folder) as log:
        end = log.end_offsets(shrinking)[0]
        while (risk := log.lag("slow")[0]).state == "ok":
            lines = b"".join(b'{"n":%d}\n' % n for n in range(100))
            done("produce", shrinking, stdin=lines)
            end += 100
        # Nothing is lost yet, and the first pass of housekeeping takes nothing below a risk.
        assert (risk.state, risk.lost, risk.log_start) == ("at risk", 0, 0)
        code, out, err = call("lag", "--check")
        assert (code, err) == (1, "")
        assert f"at risk {risk.at_risk}" in out
        assert f"millstream topic alter {shrinking}" in out
        assert call("lag").code == 0
        while log.lag("slow")[0].state != "lost":
            done("produce", shrinking, stdin=lines)
            log.run_maintenance()
        start = log.offsets(shrinking)[0][0]
    code, out, _ = call("lag", "slow", "--check")
    assert code == 1
    assert f"lost {start - 10}" in out
    assert f"millstream group reset slow --topic {shrinking} --to earliest --partition 0" in out
    (row,) = json.loads(done("lag", "--json"))
    assert (row["state"], row["lost"], row["log_start"]) == ("lost", start - 10, start)
    assert "lost" in done("group", "list")
    assert "--to earliest" in done("group", "describe", "slow")
    code, out, err = call("consume", shrinking, "--group", "slow")
    assert (code, out) == (1, "")
    assert "millstream group reset" in err
    done("group", "reset", "slow", "--topic", shrinking, "--to", "earliest", "--yes")
    assert done("consume", shrinking, "--group", "slow", "--json", "--count", "1").count(
        f'"offset": {start},'
    )


def test_lag_of_all_groups_without_any(done, folder):
    assert "no group" in done("lag")
    assert json.loads(done("lag", "--json")) == []
    assert not folder.exists()


def test_names_that_look_like_markup_are_printed_as_they_are(done, clicks):
    done("consume", clicks, "--group", "[red]x[/red]", "--count", "1")
    for command in (["lag"], ["group", "list"]):
        assert "[red]x[/red]" in done(*command)


def test_tables_fit_a_terminal_of_80_columns_and_numbers_stay_whole(done, folder, monkeypatch):
    name = "orders.by-customer.and.region"
    group = "the-billing-service-of-europe"
    with ms.connect(folder) as log:
        log.create_topic(name, partitions=2, retention="7 days", retention_bytes=10 << 30)
        log.commit_offsets(group, {TopicPartition(name, number): 0 for number in (0, 1)})
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, but
    monkeypatch.setenv("TERM", "dumb")  # one that knows no colours and has 80 columns
    for arguments in (
        ["topic", "list"],
        ["topic", "describe", name, "--all"],
        ["lag"],
        ["group", "list"],
        ["group", "describe", group],
        ["group", "reset", group, "--topic", name, "--to", "latest", "--yes"],
    ):
        shown = done(*arguments)
        assert max(len(line) for line in shown.splitlines()) <= 80, shown
        assert "\u2026" not in shown  # how a table shows that something was cut off
        if arguments[0] == "lag":
            assert name not in shown  # it was folded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lag", "nope"], "no group 'nope' has committed an offset (groups: g)"),
        (["group", "describe", "nope"], "no group 'nope'"),
        (["group", "delete", "nope", "--yes"], "no group 'nope'"),
        (["group", "delete", "g"], "give --yes"),
        (["group", "reset", "g", "--topic", "nope", "--to", "latest"], "no topic 'nope'"),
        (["group", "reset", "g", "--topic", "clicks", "--to", "end"], "--to is 'end'"),
        (
            ["group", "reset", "g", "--topic", "clicks", "--to", "11"],
            "clicks/0 holds offsets [0, 10)",
        ),
        (
            ["group", "reset", "g", "--topic", "clicks", "--to", "1", "--partition", "2"],
            "no partition 2",
        ),
        (
            ["group", "reset", "", "--topic", "clicks", "--to", "1", "--yes"],
            "the group has no name",
        ),
        (["group", "reset", "g", "--to", "1"], "'--topic'"),
    ],
)
def test_misuse_is_one_sentence_and_exit_code_2(call, done, clicks, arguments, words):
    done("consume", clicks, "--group", "g", "--count", "1")
    code, _, err = call(*arguments)
    assert code == 2
    sentence = err.splitlines()[-1]
    assert words in sentence
    assert sentence.startswith(("millstream: ", "Error: "))


@pytest.mark.parametrize("arguments", [["list"], ["describe", "g"], ["delete", "g", "--yes"]])
def test_looking_at_groups_leaves_no_folder_behind(call, folder, arguments):
    call("group", *arguments)
    assert not folder.exists()


def test_another_topic_of_the_same_name_begins_anew(done, clicks, folder):
    done("consume", clicks, "--group", "g")
    done("topic", "delete", clicks, "--yes")
    done("topic", "create", clicks)
    done("produce", clicks, stdin=b"1\n")
    with ms.connect(folder) as log:
        assert TopicPartition(clicks, 0) not in log.committed_offsets("g")
    assert done("consume", clicks, "--group", "g") == "1\n"
