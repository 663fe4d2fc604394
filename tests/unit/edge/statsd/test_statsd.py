"""StatsD: lines as metrics, real datagrams to records, and what was lost counted."""

from __future__ import annotations

import json
import math
import socket
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

import millstream as ms
from millstream.edge.server import EdgeSettings, serve
from millstream.edge.statsd.kernel_drops import kernel_drops
from millstream.edge.statsd.parser import parse_datagram
from millstream.edge.statsd.sequences import BEHIND_MAX, SENDERS_MAX, SequenceTracker

WAIT_S = 60


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"a:1|c", {"name": "a", "value": 1, "type": "counter", "rate": 1.0, "tags": {}}),
        (b"a.b:-2.5|ms|@0.1", {"value": -2.5, "type": "timer", "rate": 0.1}),
        (
            b"a:1e3|h|#x:1,y,x:2",
            {"value": 1000.0, "type": "histogram", "tags": {"x": "1,2", "y": ""}},
        ),
        (b"a:7|d|c:abc|T1656581400", {"value": 7, "type": "distribution"}),
        (b"a:u:1|s", {"value": "u:1", "type": "set"}),
        (b"a:+3|g", {"value": 3, "type": "gauge", "relative": True}),
        (b"a:3|g|#env:pr\xc3\xb6d", {"value": 3, "type": "gauge", "tags": {"env": "pröd"}}),
    ],
)
def test_a_line_is_a_metric(line, value):
    (metric,), malformed = parse_datagram(line)
    assert malformed == []
    assert json.loads(metric.to_json()) == json.loads(metric.to_json()) | value


def test_a_datagram_has_lines_and_a_line_values():
    metrics, malformed = parse_datagram(b"a:1:2|ms\n\nb:3|c|T17\r\n")
    assert [(metric.name, metric.value) for metric in metrics] == [("a", 1), ("a", 2), ("b", 3)]
    assert (metrics[2].timestamp_ms, malformed) == (17_000, [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"a", "no NAME:VALUE"),
        (b":1|c", "no NAME:VALUE"),
        (b"a:1", r"no \|TYPE"),
        (b"a:1|x", "type 'x' is not one of"),
        (b"a:one|c", "'one' is no number"),
        (b"a:|c", "'' is no number"),
        (b"a:|s", "'' is no number"),
        (b"a:1_0|c", "no number"),
        (b"a:nan|c", "no number"),
        (b"a:inf|g", "no number"),
        (b"a:1:|ms", "no number"),
        (b"a:1|c|@2", "not above 0 and at most 1"),
        (b"a:1|c|@0", "not above 0 and at most 1"),
        (b"a:1|c|", "part '' is not known"),
        (b"a:1|c|?", "part '\\?' is not known"),
        (b"\xff:1|c", "not UTF-8"),
        (b"_e{5,4}:title|text", "events and service checks"),
    ],
)
def test_a_line_that_is_none_is_told_why(line, reason):
    metrics, (malformed,) = parse_datagram(line)
    assert metrics == []
    assert malformed.line == line
    assert __import__("re").search(reason, malformed.reason)


@given(st.binary(max_size=200) | st.text("ab:|c1#@.,-g\nms", max_size=60).map(str.encode))
def test_every_datagram_is_taken_apart_and_no_line_is_lost(datagram):
    metrics, malformed = parse_datagram(datagram)
    lines = [line.strip() for line in datagram.split(b"\n") if line.strip()]
    assert len(malformed) <= len(lines) <= len(malformed) + len(metrics)
    for metric in metrics:
        assert metric.type == "set" or math.isfinite(metric.value)
        json.loads(metric.to_json())


# What was lost.


def test_what_is_missing_between_two_numbers_is_lost_unless_it_comes_late():
    books = SequenceTracker()
    for number in (5, 6, 9):
        books.observe("a", number)
    assert books.lost == 2
    books.observe("a", 7)
    books.observe("a", 7)
    assert (books.lost, books.repeated) == (1, 1)
    books.observe("b", 100)
    assert (books.lost, books.senders) == (1, 2)


def test_a_sender_that_begins_anew_has_lost_nothing():
    books = SequenceTracker()
    for number in (100_000, 100_001, 0, 1, 3):
        books.observe("a", number)
    assert (books.lost, books.restarts, books.repeated) == (1, 1, 0)
    books.observe("a", 10**9)
    assert (books.lost, books.restarts) == (1, 2)


@given(st.lists(st.booleans(), max_size=300), st.randoms(use_true_random=False))
def test_the_books_agree_with_what_was_dropped(kept, chance):
    """Any datagrams dropped, the others mixed up a little: what never came is what is lost."""
    numbers = [number for number, keep in enumerate(kept, start=1) if keep]
    mixed = sorted(numbers, key=lambda number: number + chance.random() * 20)
    mixed = [0, *mixed, len(kept) + 1]
    books = SequenceTracker()
    for number in mixed:
        books.observe("a", number)
    assert (books.lost, books.repeated) == (kept.count(False), 0)


def test_what_is_kept_of_senders_has_a_bound():
    books = SequenceTracker()
    books.observe("a", 0)
    books.observe("a", 500_000)
    assert len(books._senders["a"].missing) <= BEHIND_MAX
    for number in range(SENDERS_MAX + 5):
        books.observe(f"sender {number}", 0)
    assert books.senders == SENDERS_MAX


# Real datagrams.


def send(address, *datagrams):
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for datagram in datagrams:
            sender.sendto(datagram, (host, int(port)))


def until(counts, **wanted):
    deadline_s = time.monotonic() + WAIT_S
    while any(counts()[name] != value for name, value in wanted.items()):
        assert time.monotonic() < deadline_s, counts()
        time.sleep(0.01)


def test_datagrams_become_records_and_malformed_lines_too(folder):
    settings = EdgeSettings(statsd_topic="metrics", malformed_topic="dead")
    with serve(folder, http=None, statsd="127.0.0.1:0", settings=settings) as up:
        send(
            up.statsd,
            b"requests:1|c|@0.5|#env:prod\nlatency:12.5|ms",
            b"what is this?\ndatagram.sequence:1|g|#sender:web-1",
            b"datagram.sequence:4|g|#sender:web-1",
            b"datagram.sequence:soon|g",
        )
        until(up.statsd_counts, datagrams=4, appended=4, malformed=2)
        counts = up.statsd_counts()
    assert (counts["metrics"], counts["lost_in_sequence"], counts["not_appended"]) == (2, 2, 0)
    with ms.connect(folder) as log:
        first, second = log.consumer("metrics", follow=False)
        bad, number = log.consumer("dead", follow=False)
    assert first.key == b"requests"
    assert first.json() == {
        "name": "requests",
        "value": 1,
        "type": "counter",
        "rate": 0.5,
        "tags": {"env": "prod"},
    }
    assert second.json()["value"] == 12.5
    assert bad.value == b"what is this?"
    assert dict(bad.headers)["reason"] == b"it has no NAME:VALUE"
    assert number.value == b"datagram.sequence:soon|g"


def test_what_the_kernel_drops_is_counted(folder):
    """A socket that nobody reads from fills up; the kernel says how many it could not keep."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as full:
        full.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        full.bind(("127.0.0.1", 0))
        inode = __import__("os").fstat(full.fileno()).st_ino
        if kernel_drops(inode) is None:
            pytest.skip("this kernel does not tell of datagrams that it drops")
        assert kernel_drops(inode) == 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(50):
                sender.sendto(b"x" * 1000, full.getsockname())
        full.setblocking(False)
        got = 0
        while True:
            try:
                full.recv(2000)
            except BlockingIOError:
                break
            got += 1
        assert 0 < got < 50
        assert kernel_drops(inode) == 50 - got


def test_a_kernel_that_does_not_tell_is_not_believed_to_drop_none(tmp_path):
    assert kernel_drops(17, tmp_path) is None
    title = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops"
    row = "  1: 0100007F:1FBD 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 17 2 0000000000000000 42"
    (tmp_path / "udp6").write_text(f"{title}\n{row}\n")
    assert kernel_drops(17, tmp_path) == 42
    assert kernel_drops(18, tmp_path) is None


def test_what_the_log_does_not_take_is_counted(folder, monkeypatch):
    from millstream.errors import DiskFullError

    def refuse(*args, **kwargs):
        raise DiskFullError("there is no room")

    settings = EdgeSettings(statsd_topic="metrics")
    with serve(folder, http=None, statsd="127.0.0.1:0", settings=settings) as up:
        with monkeypatch.context() as disk:
            disk.setattr("millstream.client.folder.producer.FolderProducer.send", refuse)
            send(up.statsd, b"a:1|c\nb:2|c")
            until(up.statsd_counts, not_appended=2)
        send(up.statsd, b"c:3|c")
        until(up.statsd_counts, appended=1)
