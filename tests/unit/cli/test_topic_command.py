"""`millstream topic` makes topics, tells what they are, and changes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.cli.byte_sizes import describe_bytes, parse_bytes
from millstream.errors import ConfigError
from millstream.log.config import TopicConfig


def test_topics_are_created_listed_described_and_deleted(done, call):
    assert "no topics" in done("topic", "list")
    assert "4 partitions" in done("topic", "create", "clicks", "--partitions", "4")
    done("produce", "clicks", "--raw", stdin=b"a\nb\n")
    (listed,) = json.loads(done("topic", "list", "--json"))
    size = listed.pop("bytes")
    assert listed == {
        "topic": "clicks",
        "partitions": 4,
        "records_at_most": 2,
        "cleanup": "delete",
        "retention_ms": None,
        "retention_bytes": None,
    }
    described = json.loads(done("topic", "describe", "clicks", "--json"))
    assert described["settings"] == {}
    assert [row["partition"] for row in described["partitions"]] == [0, 1, 2, 3]
    assert sum(row["records_at_most"] for row in described["partitions"]) == 2
    assert sum(row["bytes"] for row in described["partitions"]) == size > 0
    assert "forever" in done("topic", "list")
    code, out, err = call("topic", "delete", "clicks", stdin=b"n\n")
    assert (code, out) == (130, "")
    assert "its 2 records for good? [y/N]" in err
    assert "2 records" in done("topic", "delete", "clicks", stdin=b"y\n")
    assert json.loads(done("topic", "list", "--json")) == []


def test_settings_are_given_in_units_that_people_use(done, folder):
    done(
        *("topic", "create", "t", "--retention", "7 days", "--retention-bytes", "10GiB"),
        *("--cleanup", "compact,delete", "--set", "segment.bytes=1048576"),
        *("--set", "min.cleanable.dirty.ratio = 0.1"),
    )
    with ms.connect(folder) as log:
        assert log.topic_settings("t") == TopicConfig().settings() | {
            "retention.ms": "604800000",
            "retention.bytes": "10737418240",
            "cleanup.policy": "compact,delete",
            "segment.bytes": "1048576",
            "min.cleanable.dirty.ratio": "0.1",
        }
    said = done("topic", "describe", "t")
    for words in ["604800000", "1 week", "10 GiB", "1 MiB", "compact,delete", "-1 (no limit)"]:
        assert words in said
    assert "segment.ms" not in said
    assert "segment.ms" in done("topic", "describe", "t", "--all")
    shown = json.loads(done("topic", "describe", "t", "--all", "--json"))["settings"]
    assert set(shown) == set(TopicConfig().settings())
    assert "1 week, 10 GiB" in done("topic", "list")
    assert json.loads(done("topic", "list", "--json"))[0]["retention_ms"] == 604_800_000


def test_alter_shows_what_was_and_what_is(done, folder):
    done("topic", "create", "t", "--retention", "1 day", "--set", "segment.ms=1000")
    said = done("topic", "alter", "t", "--retention", "2 days", "--unset", "segment.ms")
    for words in [
        "86400000 (1 day)",
        "172800000 (2 days)",
        "1000 (1 second)",
        "604800000 (1 week)",
    ]:
        assert words in said
    changed = json.loads(done("topic", "alter", "t", "--partitions", "3", "--json"))
    assert changed == [{"setting": "partitions", "before": "1", "after": "3"}]
    done("topic", "alter", "t", "--cleanup", "compact")
    done("topic", "alter", "t", "--cleanup", "delete", "--retention-bytes", "1 KiB")
    assert "like that already" in done("topic", "alter", "t", "--cleanup", "delete")
    with ms.connect(folder) as log:
        assert log.topics()["t"].partitions == 3
        assert log.topic_settings("t") == TopicConfig().settings() | {
            "retention.ms": "172800000",
            "retention.bytes": "1024",
        }


def test_a_table_in_a_pipe_cuts_nothing_off(done):
    name = "a" * 200
    done("topic", "create", name, "--retention", "7 days 3 hours 2 minutes 1 second")
    assert name in done("topic", "list")
    assert "7 days 3 hours 2 minutes 1 second" in done("topic", "list")


def test_what_was_done_is_told_as_json(done):
    made = json.loads(done("topic", "create", "t", "--retention", "1 day", "--json"))
    assert made["settings"] == {"retention.ms": "86400000"}
    assert len(made["topic_id"]) == 32
    gone = json.loads(done("topic", "delete", "t", "--yes", "--json"))
    assert gone == {"topic": "t", "records_at_most": 0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "t"], "topic 't' already"),
        (["create", "a b"], "'a b'"),
        (["create", "u", "--partitions", "0"], "'--partitions'"),
        (["create", "u", "--retention", "7"], "retention is '7'"),
        (["create", "u", "--retention-bytes", "10 gigs"], "--retention-bytes is '10 gigs'"),
        (["create", "u", "--retention-bytes", "-1"], "--retention-bytes is '-1'"),
        (["create", "u", "--cleanup", "compress"], "cleanup.policy is 'compress'"),
        (["create", "u", "--set", "segment.bytes"], "--set is 'segment.bytes'"),
        (["create", "u", "--set", "=1"], "--set is '=1'"),
        (["create", "u", "--set", "segments=1"], "setting is 'segments'"),
        (["create", "u", "--set", "segment.bytes=x"], "segment.bytes is 'x'"),
        (["create", "u", "--set", "segment.ms=1", "--set", "segment.ms=2"], "given twice"),
        (["create", "u", "--retention", "1 day", "--set", "retention.ms=2"], "given twice"),
        (["create", "u", "--cleanup", "delete", "--set", "cleanup.policy=compact"], "given twice"),
        (["describe", "nope"], "no topic 'nope'"),
        (["delete", "nope"], "no topic 'nope'"),
        (["delete", "t"], "give --yes"),
        (["alter", "nope", "--partitions", "2"], "no topic 'nope'"),
        (["alter", "t"], "nothing was said to change"),
        (["alter", "t", "--partitions", "1"], "cannot have 1"),
        (["alter", "t", "--unset", "segments"], "--unset is 'segments'"),
        (["alter", "t", "--set", "segment.ms=1", "--unset", "segment.ms"], "set and unset"),
    ],
)
def test_misuse_is_one_sentence_and_exit_code_2(call, done, arguments, words):
    done("topic", "create", "t", "--partitions", "2")
    code, out, err = call("topic", *arguments)
    assert (code, out) == (2, "")
    sentence = err.splitlines()[-1]
    assert words in sentence
    assert sentence.startswith(("millstream: ", "Error: "))


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["describe", "t"],
        ["delete", "t", "--yes"],
        ["alter", "t", "--partitions", "2"],
        ["create", "a b"],
        ["create", "t", "--set", "segments=1"],
    ],
)
def test_what_has_nothing_to_work_on_leaves_no_folder_behind(call, folder, arguments):
    call("topic", *arguments)
    assert not folder.exists()


@given(st.integers(0, 1 << 60), st.sampled_from(["", "B", "KiB", "mib", "GB", "TB"]))
def test_every_number_with_a_unit_is_read_exactly(number, unit):
    sizes = {"": 1, "B": 1, "KiB": 1024, "mib": 1024**2, "GB": 10**9, "TB": 10**12}
    assert parse_bytes(f"{number} {unit}", what="x") == number * sizes[unit]


@given(st.integers(0, 1 << 60))
def test_what_is_said_of_a_size_is_within_a_twentieth_of_it(size):
    said = parse_bytes(describe_bytes(size), what="x")
    assert abs(said - size) <= max(size / 20, 0)


@pytest.mark.parametrize("text", ["", "KiB", "1 kibi", "-1", "1e3", "1,5 GiB", "\u0661"])
def test_what_is_no_size_is_refused_with_the_units_there_are(text):
    with pytest.raises(ConfigError, match="GiB"):
        parse_bytes(text, what="--retention-bytes")


APP = """
from dataclasses import dataclass
import millstream as ms

@dataclass
class Click:
    ad: int

app = ms.App("ads", log={log!r})
app.topic("clicks", Click)
"""


def test_a_topic_is_archived_by_the_schema_of_an_app(done, call, folder, tmp_path):
    program = tmp_path / "app.py"
    program.write_text(APP.format(log=str(folder)))
    done("topic", "create", "clicks", "--partitions", "2")
    done("produce", "clicks", "--raw", stdin=b'{"ad": 1}\n{"ad": 2}\nbad\n')
    archive = ("topic", "archive", "clicks", "--app", str(program))
    rows = json.loads(done(*archive, "--json"))
    assert [(row["segments"], row["rows"]) for row in rows] == [(0, 0), (0, 0)]
    rows = json.loads(done(*archive, "--close-active", "--json"))
    assert sum(row["made"] for row in rows) == sum(row["segments"] for row in rows) > 0
    assert (sum(row["rows"] for row in rows), sum(row["undecodable"] for row in rows)) == (3, 1)
    assert sum(row["archive_bytes"] for row in rows) == sum(
        path.stat().st_size for path in folder.glob("t/*/*/*.parquet")
    )
    said = done(*archive)
    assert "undecodable" in said
    assert "B" in said
    code, _, err = call("topic", "archive", "clocks", "--app", str(program))
    assert code == 2
    assert "declares no topic 'clocks' (topics: clicks)" in err
