"""`millstream produce` and `millstream consume`: lines go in, records come out."""

from __future__ import annotations

import io
import json

import pytest

import millstream as ms
from millstream.cli.main import COMMANDS
from millstream.cli.produce import _ProgressLine

AD_LINES = b'{"user": "u1", "n": 1}\n\n{"user": "u2", "n": 2}\r\n'


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def topic(done):
    """Return a topic with one partition and the values 0 to 9, a minute apart."""
    done("topic", "create", "t")
    lines = [json.dumps({"n": n, "at": f"2026-11-21T10:{n:02}"}) for n in range(10)]
    done("produce", "t", "--timestamp-field", "at", stdin="\n".join(lines).encode())
    return "t"


def numbers(text: str) -> list[int]:
    return [row["n"] for row in rows(text)]


def test_lines_go_in_and_come_out_with_keys_and_positions(done):
    done("topic", "create", "clicks")
    assert "2 records" in done("produce", "clicks", "--key-field", "user", stdin=AD_LINES)
    assert "1 record " in done("produce", "clicks", "--key", "k", "--raw", stdin=b"plain")
    assert done("consume", "clicks").splitlines() == [
        '{"user": "u1", "n": 1}',
        '{"user": "u2", "n": 2}',
        "plain",
    ]
    found = rows(done("consume", "clicks", "--json"))
    assert [(row["offset"], row["key"]) for row in found] == [(0, "u1"), (1, "u2"), (2, "k")]
    assert found[0]["value"] == {"user": "u1", "n": 1}
    assert found[2]["value"] == "plain"
    assert done("consume", "clicks", "--keys", "--from", "1", "--count", "1") == (
        'u2\t{"user": "u2", "n": 2}\n'
    )


def test_a_stretch_is_read_by_offset_and_by_time(done, topic):
    def read(*options: str) -> list[int]:
        return numbers(done("consume", topic, *options))

    assert read() == read("--until", "end") == list(range(10))
    assert read("--from", "3", "--until", "6") == [3, 4, 5]
    assert read("--from", "2026-11-21T10:03", "--until", "2026-11-21T10:06Z") == [3, 4, 5]
    assert read("--from", "7", "--until", "100") == [7, 8, 9]
    assert read("--from", "4", "--until", "4") == []
    assert read("--from", "3", "--until", "6", "--count", "2") == [3, 4]
    assert read("--from", "2000-01-01", "--count", "10") == list(range(10))
    assert read("--from", "2999-01-01T00:00") == read("--from", "latest") == []
    assert read("--follow", "--count", "3") == [0, 1, 2]


def test_each_partition_is_read_up_to_its_own_end(done):
    done("topic", "create", "t", "--partitions", "3")
    for partition in "012":
        lines = b"".join(b"%d\n" % (int(partition) * 10 + n) for n in range(5))
        done("produce", "t", "--partition", partition, stdin=lines)
    assert sorted(done("consume", "t", "--until", "2").split()) == sorted(
        ["0", "1", "10", "11", "20", "21"]
    )
    assert len(done("consume", "t", "--until", "2", "--count", "3").split()) == 3
    assert sorted(
        done("consume", "t", "--partition", "0", "--partition", "2", "--from", "4").split()
    ) == ["24", "4"]


def test_the_time_of_a_record_comes_from_a_field(done):
    done("topic", "create", "t")
    lines = b'{"at": "2026-11-21T10:00:00.250+01:00"}\n{"at": 1000}\n'
    done("produce", "t", "--timestamp-field", "at", stdin=lines)
    assert [row["timestamp"] for row in rows(done("consume", "t", "--json"))] == [
        "2026-11-21T09:00:00.250+00:00",
        "1970-01-01T00:00:01.000+00:00",
    ]


def test_a_timestamp_that_no_calendar_has_is_shown_in_milliseconds(done, folder):
    done("topic", "create", "t")
    with ms.connect(folder) as log, log.producer() as producer:
        producer.send("t", b"x", timestamp_ms=1 << 62).result()
    (found,) = rows(done("consume", "t", "--json"))
    assert (found["timestamp"], found["timestamp_ms"]) == (None, 1 << 62)


def test_headers_come_back_in_their_order(done, folder):
    done("topic", "create", "t")
    given = ["--header", "host=web=1", "--header", "empty=", "--header", "host=ä"]
    done("produce", "t", "--raw", *given, stdin=b"x\n")
    with ms.connect(folder) as log, log.producer() as producer:
        producer.send("t", b"y", headers=[("bytes", b"\xff"), ("null", None)]).result()
    assert [row["headers"] for row in rows(done("consume", "t", "--json"))] == [
        [
            {"name": "host", "value": "web=1"},
            {"name": "empty", "value": ""},
            {"name": "host", "value": "ä"},
        ],
        [{"name": "bytes", "value_base64": "/w=="}, {"name": "null", "value": None}],
    ]


def test_keys_and_tombstones_survive_being_copied_line_by_line(done, folder):
    done("topic", "create", "a")
    done("topic", "create", "b")
    with ms.connect(folder) as log, log.producer() as producer:
        for key, value in [("k", b"1"), ("k", None), (None, b"x\ty"), ("l", b"not json")]:
            producer.send("a", value, key=key)
    lines = done("consume", "a", "--keys")
    assert lines == "k\t1\nk\t\n\tx\ty\nl\tnot json\n"
    assert done("consume", "a") == "1\n\nx\ty\nnot json\n"
    done("produce", "b", "--keys", stdin=lines.encode())
    assert done("consume", "b", "--keys") == lines
    with ms.connect(folder) as log:
        assert [record.value for record in log.consumer("b", follow=False)][1] is None


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("durability", ["synced", "written", "periodic"])
def test_every_compression_and_durability_gives_the_same_records(done, compression, durability):
    done("topic", "create", "t")
    chosen = ["--compression", compression, "--durability", durability]
    lines = b"".join(b'{"n":%d}\n' % n for n in range(500))
    assert "500 records" in done("produce", "t", *chosen, stdin=lines)
    assert done("consume", "t").encode() == lines


def test_uncommitted_shows_what_a_transaction_has_not_committed_yet(done, folder):
    done("topic", "create", "t")
    with ms.connect(folder) as log, log.producer(transactional_id="x") as producer:
        with producer.transaction():
            producer.send("t", "seen", key="k")
        with producer.transaction():
            producer.send("t", "open", key="k")
            producer.flush()
            assert done("consume", "t") == "seen\n"
            assert done("consume", "t", "--uncommitted") == "seen\nopen\n"


def test_bytes_that_are_not_text_are_shown_in_base64(done):
    done("topic", "create", "t")
    done("produce", "t", "--keys", stdin=b"\xfe\t\xff\xfe\n")
    (found,) = rows(done("consume", "t", "--json"))
    assert (found["key_base64"], found["value_base64"]) == ("/g==", "//4=")
    assert "value" not in found


def test_produce_says_what_it_did_as_json(done):
    done("topic", "create", "t")
    assert json.loads(done("produce", "t", "--json", stdin=b"1\n2\n")) == {
        "topic": "t",
        "records": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["produce", "nope"], b"1\n", "no topic 'nope'"),
        (["produce", "t"], b"1\nnot json\n", "line 2 is not JSON"),
        (["produce", "t", "--key-field", "id"], b'{"id": null}\n', "'id'"),
        (["produce", "t", "--key-field", "id"], b"[1]\n", "'id'"),
        (["produce", "t", "--timestamp-field", "at"], b'{"at": "soon"}\n', "'at'"),
        (["produce", "t", "--timestamp-field", "at"], b'{"at": true}\n', "'at'"),
        (["produce", "t", "--timestamp-field", "at"], b"7\n", "'at'"),
        (["produce", "t", "--timestamp-field", "at"], b'{"at": 1763719200000000}\n', "'at'"),
        (["produce", "t", "--keys"], b"a\tb\nab\n", "line 2 has no TAB"),
        (["produce", "t", "--header", "host"], b"1\n", "--header is 'host'"),
        (["produce", "t", "--header", "=x"], b"1\n", "--header is '=x'"),
        (["produce", "t", "--key", "a", "--key-field", "b"], b"", "--key and --key-field"),
        (["produce", "t", "--key", "a", "--keys"], b"", "--key and --keys"),
        (["produce", "t", "--raw", "--key-field", "b"], b"", "--key-field needs JSON lines"),
        (["produce", "t", "--keys", "--timestamp-field", "b"], b"", "leave out --keys"),
        (["produce", "t", "--partition", "1"], b"1\n", "no partition 1"),
        (["produce", "t", "--compression", "rar"], b"", "'rar'"),
        (["produce", "t", "--durability", "maybe"], b"", "'maybe'"),
        (["consume", "nope"], b"", "no topic 'nope'"),
        (["consume", "t", "--from", "soon"], b"", "--from is 'soon'"),
        (["consume", "t", "--from", "end"], b"", "--from is 'end'"),
        (["consume", "t", "--from", "1"], b"", "--from is 1, but t/0 holds offsets [0, 0)"),
        (["consume", "t", "--until", "latest"], b"", "--until is 'latest'"),
        (["consume", "t", "--from", "3", "--until", "2"], b"", "--until 2 lies before --from 3"),
        (["consume", "t", "--follow", "--until", "2"], b"", "leave out one of them"),
        (["consume", "t", "--json", "--keys"], b"", "leave out --keys"),
        (["consume", "t", "--partition", "3"], b"", "no partition 3"),
        (["consume", "t", "--group", ""], b"", "the group has no name"),
    ],
)
def test_misuse_is_one_sentence_and_exit_code_2(call, done, arguments, stdin, words):
    done("topic", "create", "t")
    code, out, err = call(*arguments, stdin=stdin)
    assert (code, out) == (2, "")
    sentence = err.splitlines()[-1]
    assert words in sentence
    assert sentence.startswith(("millstream: ", "Error: "))


def test_the_lines_before_a_wrong_one_are_appended(call, done):
    done("topic", "create", "t")
    assert call("produce", "t", stdin=b"1\n2\n{\n4\n").code == 2
    assert done("consume", "t") == "1\n2\n"


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_an_unknown_topic_leaves_no_folder_behind(call, folder, command):
    code, _, err = call(command, "t", stdin=b"1\n")
    assert code == 2
    assert "no topic 't' (topics: none yet)" in err
    assert not folder.exists()


@pytest.mark.parametrize("name", ["topic", "produce", "consume", "group", "lag"])
def test_help_has_an_example_and_the_list_of_commands_has_a_sentence(done, name):
    assert f"  millstream {name}" in done(name, "--help")
    assert COMMANDS[name].split(",")[0] in done("--help")


def test_progress_is_told_every_second_and_wiped_away():
    now_s = 0.0
    stream = io.StringIO()
    progress = _ProgressLine(stream, shown=True, clock_s=lambda: now_s)
    with progress:
        for sent in range(1, 3073):
            now_s += 1 / 1024  # a binary fraction, so that the sums are exact
            progress.update(sent)
    told = stream.getvalue().split("\r")
    assert [text.strip() for text in told if text.strip()] == [
        "1,024 records, 1,024 a second",
        "2,048 records, 1,024 a second",
        "3,072 records, 1,024 a second",
    ]
    assert not told[-2].strip()
    assert len(told[-2]) == len(told[-3])


def test_progress_is_silent_without_a_terminal():
    now_s = iter(range(100))
    stream = io.StringIO()
    progress = _ProgressLine(stream, shown=False, clock_s=lambda: next(now_s))
    with progress:
        progress.update(1)
        progress.update(2)
    assert stream.getvalue() == ""
