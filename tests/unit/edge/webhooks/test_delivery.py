"""Webhooks: delivered in order for each key, retried, dead-lettered with a reason, signed, committed last."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import socket
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webhook_receiver import Receiver

import millstream as ms
from millstream.edge.webhooks import delivery as delivery_module
from millstream.edge.webhooks.delivery import Delivery, Webhook
from millstream.edge.webhooks.endpoint import EndpointConnection, parse_url
from millstream.edge.webhooks.header_file import read_headers
from millstream.edge.webhooks.offset_tracker import OffsetTracker
from millstream.edge.webhooks.retry_policy import (
    RetryDecision,
    RetryPolicy,
    retry_after_s,
    retry_decision,
)
from millstream.edge.webhooks.signature import read_secret, signature
from millstream.errors import (
    ConfigError,
    OffsetOutOfRangeError,
    TopicRecreatedError,
    UnknownTopicError,
)

WAIT_S = 60
QUICK = RetryPolicy(attempts_max=3, initial_s=0.01, max_s=0.02)


# The parts.


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, RetryDecision.ACCEPTED),
        (204, RetryDecision.ACCEPTED),
        (301, RetryDecision.GIVE_UP),
        (400, RetryDecision.GIVE_UP),
        (404, RetryDecision.GIVE_UP),
        (408, RetryDecision.RETRY),
        (410, RetryDecision.GIVE_UP),
        (425, RetryDecision.RETRY),
        (429, RetryDecision.RETRY),
        (500, RetryDecision.RETRY),
        (503, RetryDecision.RETRY),
        (None, RetryDecision.RETRY),
    ],
)
def test_an_answer_says_whether_to_try_again(status, verdict):
    assert retry_decision(status) is verdict


def test_waits_double_up_to_a_limit_and_are_spread_by_chance():
    backoff = RetryPolicy(initial_s=1, max_s=10)
    assert [
        backoff.wait_s(n, None, lambda: 0.999999) for n in (1, 2, 3, 4, 5, 500)
    ] == pytest.approx([1, 2, 4, 8, 10, 10], rel=1e-3)
    assert [backoff.wait_s(n, None, lambda: 0.0) for n in (1, 2, 5)] == [0.5, 1, 5]


def test_the_endpoint_may_ask_for_more_but_not_for_ever():
    backoff = RetryPolicy(initial_s=1, max_s=10, retry_after_max_s=100)
    assert backoff.wait_s(1, 30, lambda: 0.5) == 30
    assert backoff.wait_s(5, 2, lambda: 1.0) == 10
    assert backoff.wait_s(1, 1e9, lambda: 0.5) == 100


def test_retry_after_is_seconds_or_a_date():
    now = 1_800_000_000
    assert retry_after_s("17", now) == 17
    assert retry_after_s(formatdate(now + 90, usegmt=True), now) == 90
    assert retry_after_s(formatdate(now - 90, usegmt=True), now) == 0
    assert [retry_after_s(text, now) for text in (None, "", "soon", "-1", "1.5")] == [None] * 5


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_what_is_committed_lies_before_all_that_is_not_finished(chance, count):
    offsets = sorted(chance.sample(range(10, 200), count))
    progress = OffsetTracker({0: 10, 1: 7})
    for offset in offsets:
        progress.begin(0, offset)
    unfinished = offsets[:]
    chance.shuffle(unfinished)
    while unfinished:
        progress.finish(0, unfinished.pop())
        at = progress.committable()[0]
        assert all(offset >= at for offset in unfinished)
        first = min(unfinished, default=None)
        done = [offset for offset in offsets if first is None or offset < first]
        assert at == (done[-1] + 1 if done else 10)
    assert progress.committable()[1] == 7


def test_a_signature_is_that_of_standard_webhooks():
    """The example of that specification's reference libraries, which others check theirs by."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    found = signature([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signature([secret, b"x"], "m", 1, b"").split(" ")[0].startswith("v1,")
    assert len(signature([secret, b"x"], "m", 1, b"").split(" ")) == 2


def test_secrets_and_headers_are_read_from_files(tmp_path):
    path = tmp_path / "file"
    path.write_text("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n")
    assert read_secret(path) == base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    path.write_text("a long enough secret\n")
    assert read_secret(path) == b"a long enough secret"
    for bad in ("short", "whsec_%%%", "whsec_YQ=="):
        path.write_text(bad)
        with pytest.raises(ConfigError):
            read_secret(path)
    path.write_text("Authorization: Bearer x\n\nX-A:b\n")
    assert read_headers(path) == {"Authorization": "Bearer x", "X-A": "b"}
    for bad in ("no header", "a b: c", "Host: x", "webhook-id: 1", ": x"):
        path.write_text(bad)
        with pytest.raises(ConfigError):
            read_headers(path)


@pytest.mark.parametrize(
    "url", ["", "example.com/hook", "ftp://example.com", "http://", "http://u:p@h/", "http://h:x/"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError):
        parse_url(url)


def test_a_kept_connection_that_was_closed_is_no_failure():
    with Receiver(
        lambda request: (200, {"Connection": "close"} if request["body"] == b"1" else {})
    ) as it:
        link = EndpointConnection(parse_url(it.url), 10)
        assert [link.post(body, {}).status for body in (b"0", b"1", b"2")] == [200] * 3
        link.close()
    assert [request["path"] for request in it.requests] == ["/hook?a=b"] * 3


def test_an_answer_that_drips_is_cut_off():
    """One that sends a byte now and then never lets a read time out."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                try:
                    for _ in range(10_000):
                        connection.sendall(b"H")
                        time.sleep(0.01)
                except OSError:
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        link = EndpointConnection(parse_url(f"http://127.0.0.1:{server.getsockname()[1]}/"), 0.3)
        ended = threading.Event()

        def watch():
            while not ended.wait(0.02):
                link.cut_if_overdue()

        watcher = threading.Thread(target=watch)
        watcher.start()
        answer = link.post(b"", {})
        ended.set()
        watcher.join()
        thread.join()
    assert (answer.status, answer.reason) == (None, "no response within 0.3 s")


# Delivering.


@contextmanager
def delivered(folder, url, *, report=None, **options):
    """Deliver while the block runs."""
    options = {"group": "g", "dead_letter_topic": "dead", "retry_policy": QUICK, **options}
    topic = options.pop("topic", "clicks")
    reports = [] if report is None else report
    delivery = Delivery(
        folder,
        Webhook(topic, url, **options),
        report=reports.append,
        random_unit=random.Random(1).random,
    )
    failed = []

    def run():
        try:
            delivery.run()
        except BaseException as error:  # noqa: BLE001 - it is raised where the block ends
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield delivery
    finally:
        delivery.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        if failed:
            raise failed[0]


def append(folder, topic, *records):
    with ms.connect(folder) as log, log.producer() as producer:
        for key, value in records:
            producer.send(topic, value, key=key).result()


def committed(folder, group="g"):
    with ms.connect(folder) as log:
        return {name.partition: at.offset for name, at in log.committed_offsets(group).items()}


def until(condition):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def dead(folder):
    with ms.connect(folder) as log:
        return list(log.consumer("dead", follow=False))


def test_a_record_comes_whole_signed_and_with_a_key_of_its_own(folder):
    append(folder, "one", ("kä", {"n": 1}))
    secret = b"a secret of some length"
    with (
        Receiver() as it,
        delivered(
            folder, it.url, topic="one", secrets=[secret], headers={"Authorization": "Bearer x"}
        ),
    ):
        (request,) = it.wait(1)
    with ms.connect(folder) as log:
        topic_id = log.topics()["one"].topic_id
    assert json.loads(request["body"])["value"] == {"n": 1}
    assert json.loads(request["body"])["key"] == "kä"
    name = f"msg_{topic_id}_0_0"
    assert (request["idempotency-key"], request["webhook-id"]) == (name, name)
    assert abs(int(request["webhook-timestamp"]) - time.time()) < 60
    signed = f"{name}.{request['webhook-timestamp']}.".encode() + request["body"]
    expected = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    assert request["webhook-signature"] == f"v1,{expected}"
    assert request["authorization"] == "Bearer x"
    assert request["content-type"] == "application/json"
    assert (request["millstream-offset"], request["millstream-key"]) == ("0", "k%C3%A4")
    assert committed(folder) == {0: 1}


def test_values_can_be_sent_as_they_are(folder):
    append(folder, "one", (None, b"\xff"), ("k", None))
    with (
        Receiver() as it,
        delivered(folder, it.url, topic="one", content="value", content_type="image/png"),
    ):
        # Two keys, so in any order.
        second, first = sorted(it.wait(2), key=lambda request: request["body"])
    assert (first["body"], first["content-type"]) == (b"\xff", "image/png")
    assert (second["body"], second["millstream-tombstone"]) == (b"", "true")


def test_what_failed_is_tried_again_with_the_same_key_and_holds_up_only_its_own(folder):
    append(folder, "clicks", *[(f"k{n % 8}", n) for n in range(40)])
    failures = {3: 2, 11: 1}

    def answer(request):
        n = json.loads(request["body"])["value"]
        if failures.get(n):
            failures[n] -= 1
            return 503
        return 200

    reports = []
    with Receiver(answer) as it, delivered(folder, it.url, report=reports) as delivery:
        requests = it.wait(43)
        until(lambda: delivery.totals.delivered == 40)
    assert (delivery.totals.failed_attempts, delivery.totals.undeliverable) == (3, 0)
    order = [json.loads(request["body"])["value"] for request in requests]
    for key in range(8):
        mine = [n for n in order if n % 8 == key]
        first = [n for i, n in enumerate(mine) if n not in mine[:i]]
        assert first == list(range(key, 40, 8))
        assert mine == sorted(mine)  # what is tried again comes before those after it
    keys = {request["idempotency-key"] for request in requests}
    assert len(keys) == 40
    assert [r["millstream-attempt"] for r in requests if b'"value": 3,' in r["body"]] == [
        "1",
        "2",
        "3",
    ]
    assert sum(committed(folder).values()) == 40
    assert any("fails (503" in line for line in reports)
    assert any("accepts records again" in line for line in reports)


def test_one_bad_record_is_given_up_with_its_reason_and_the_stream_goes_on(folder):
    append(folder, "one", ("k", 1), ("k", 2), ("k", 3), ("k", 4))
    answers = {2: 422, 3: 500}
    with Receiver(lambda request: answers.get(json.loads(request["body"])["value"], 200)) as it:
        with delivered(folder, it.url, topic="one") as delivery:
            until(lambda: delivery.totals.undeliverable == 2 and delivery.totals.delivered == 2)
        assert committed(folder) == {0: 4}
    assert [json.loads(r["body"])["value"] for r in it.requests] == [1, 2, 3, 3, 3, 4]
    first, second = dead(folder)
    assert (first.key, first.value) == (b"k", b"2")
    assert dict(first.headers) == {
        "topic": b"one",
        "partition": b"0",
        "offset": b"1",
        "step": b"webhook g",
        "reason": b"undeliverable after 1 attempt: 422 Unprocessable Entity: as told",
    }
    assert dict(second.headers)["reason"].startswith(b"undeliverable after 3 attempts: 500 ")


def test_a_record_that_the_dead_letter_topic_has_no_room_for_is_given_up_without_its_value(folder):
    with ms.connect(folder) as log:
        log.alter_topic("dead", settings={"max.message.bytes": "600"})
    append(folder, "one", ("k", 1), ("k", "x" * 600), ("k", 3))
    with Receiver(lambda request: 422 if len(request["body"]) > 600 else 200) as it:
        with delivered(folder, it.url, topic="one") as delivery:
            until(lambda: delivery.totals.undeliverable == 1 and delivery.totals.delivered == 2)
        assert committed(folder) == {0: 3}
    (given_up,) = dead(folder)
    headers = dict(given_up.headers)
    assert (given_up.key, given_up.value) == (b"k", None)
    assert (headers["offset"], headers["value-omitted"]) == (b"1", b"600 bytes")


def test_a_record_whose_key_alone_is_too_large_for_the_topic_is_given_up_without_it(folder):
    with ms.connect(folder) as log:
        log.alter_topic("dead", settings={"max.message.bytes": "600"})
    append(folder, "one", ("k" * 700, 1), ("k", 2))
    with (
        Receiver(lambda request: 422 if json.loads(request["body"])["value"] == 1 else 200) as it,
        delivered(folder, it.url, topic="one") as delivery,
    ):
        until(lambda: delivery.totals.undeliverable == 1 and delivery.totals.delivered == 1)
    (given_up,) = dead(folder)
    assert (given_up.key, given_up.value) == (None, None)
    assert dict(given_up.headers)["value-omitted"] == b"1 bytes"


def test_one_bad_endpoint_does_not_stop_another(folder):
    append(folder, "one", *[("k", n) for n in range(5)])
    with socket.socket() as closed:  # a port that nobody listens on
        closed.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        slow = RetryPolicy(attempts_max=100, initial_s=30)
        with (
            Receiver() as it,
            delivered(folder, away, topic="one", group="bad", retry_policy=slow),
            delivered(folder, it.url, topic="one", group="good"),
        ):
            it.wait(5)
    assert committed(folder, "good") == {0: 5}
    assert committed(folder, "bad") == {0: 0}


def test_an_endpoint_that_is_away_comes_back_and_nothing_is_left_out(folder):
    append(folder, "clicks", *[(str(n), n) for n in range(20)])
    with Receiver() as before:
        port = before.port
    patient = RetryPolicy(attempts_max=1000, initial_s=0.02, max_s=0.05)
    reports = []
    with delivered(folder, before.url, retry_policy=patient, report=reports) as delivery:
        until(lambda: delivery.totals.failed_attempts > 5)
        assert committed(folder) == {0: 0, 1: 0}
        with Receiver(port=port) as it:
            requests = it.wait(20)
            until(lambda: delivery.totals.delivered == 20)
    assert sorted(json.loads(request["body"])["value"] for request in requests) == list(range(20))
    assert reports[0].startswith(f"127.0.0.1:{port} fails (ConnectionRefusedError")


def test_retry_after_lets_all_lanes_rest(folder):
    append(folder, "clicks", *[(str(n), n) for n in range(20)])
    first = threading.Lock()

    def answer(request):
        return (429, {"Retry-After": "1"}) if first.acquire(blocking=False) else 200

    with Receiver(answer) as it, delivered(folder, it.url, workers=1):
        requests = it.wait(21)
    assert requests[1]["at"] - requests[0]["at"] >= 0.99
    assert requests[0]["idempotency-key"] == requests[1]["idempotency-key"]


def test_a_slow_record_stops_the_reading_only_when_too_much_is_in_hand(folder, monkeypatch):
    monkeypatch.setattr(delivery_module, "_UNFINISHED_MAX", 10)
    append(folder, "one", *[(f"k{n}", n) for n in range(60)])
    go = threading.Event()

    def answer(request):
        if json.loads(request["body"])["value"] == 0:
            go.wait(WAIT_S)
        return 200

    with Receiver(answer) as it, delivered(folder, it.url, topic="one", workers=4) as delivery:
        it.wait(3)
        time.sleep(0.3)
        assert len(it.requests) <= 10
        assert committed(folder) == {0: 0}
        go.set()
        until(lambda: delivery.totals.delivered == 60)
    assert committed(folder) == {0: 60}


def test_who_begins_at_the_end_leaves_nothing_out_after_that(folder):
    append(folder, "one", ("k", 1))
    with Receiver() as it:
        with delivered(folder, it.url, topic="one", start="latest"):
            pass
        append(folder, "one", ("k", 2))  # while nobody delivers
        with delivered(folder, it.url, topic="one", start="latest"):
            (request,) = it.wait(1)
    assert json.loads(request["body"])["value"] == 2


def test_what_cannot_be_buried_yet_waits_for_the_folder(folder, monkeypatch):
    """Another process owns the folder: dead letters wait, and are neither dropped nor committed."""
    append(folder, "one", ("k", 1), ("k", 2))
    from millstream.errors import FolderOwnedError

    owned = True
    real = ms.EventLog.__subclasses__()[0].producer

    def producer(self, **options):
        if owned:
            raise FolderOwnedError("somebody else owns it")
        return real(self, **options)

    monkeypatch.setattr("millstream.client.folder.log.FolderLog.producer", producer)
    reports = []
    with (
        Receiver(lambda request: 400 if b'"value": 1,' in request["body"] else 200) as it,
        delivered(folder, it.url, topic="one", report=reports) as delivery,
    ):
        until(lambda: reports)
        assert "cannot be appended to 'dead' yet" in reports[0]
        assert committed(folder) == {0: 0}
        owned = False
        until(lambda: delivery.totals.undeliverable == 1 and delivery.totals.delivered == 1)
    monkeypatch.undo()
    assert [record.value for record in dead(folder)] == [b"1"]
    assert committed(folder) == {0: 2}


def test_what_cannot_work_is_said_at_the_start(folder):
    def start(**options):
        options = {
            "topic": "one",
            "url": "http://h/",
            "group": "g",
            "dead_letter_topic": "dead",
            **options,
        }
        Delivery(folder, Webhook(**options), report=print)

    with pytest.raises(UnknownTopicError):
        start(topic="none")
    with pytest.raises(UnknownTopicError):
        start(dead_letter_topic="none")
    with pytest.raises(ConfigError, match="give another one"):
        start(dead_letter_topic="one")
    with pytest.raises(ConfigError, match="such as https"):
        start(url="h")


def test_records_that_are_gone_are_told_of_not_passed_over(folder):
    append(folder, "one", *[("k", n) for n in range(5)])
    with ms.connect(folder) as log:
        log.commit_offsets("g", {ms.record.TopicPartition("one", 0): 1})
        log.delete_records("one", 0, 3)
    with pytest.raises(OffsetOutOfRangeError, match="2 records were removed unread"):
        Delivery(folder, Webhook("one", "http://h/", "g", "dead"), report=print)


def test_a_topic_that_is_made_anew_ends_the_delivery_and_nothing_is_committed_for_it(folder):
    append(folder, "clicks", *[("k", "old")] * 3)
    with Receiver() as it:
        # It may look just while there is none.
        with (
            pytest.raises((TopicRecreatedError, UnknownTopicError)),
            delivered(folder, it.url, content="value"),
        ):
            it.wait(3)
            with ms.connect(folder) as log:
                log.delete_topic("clicks")
                log.create_topic("clicks", partitions=2)
            append(folder, "clicks", *[("k", "new")] * 9)
        assert {request["body"] for request in it.requests} == {b"old"}
    assert committed(folder) == {}


def test_what_requests_are_signed_and_let_in_with_is_not_shown():
    headers = {"Authorization": "Bearer hidden"}
    webhook = Webhook("a", "http://b", "c", "d", headers=headers, secrets=[b"hidden"])
    assert "hidden" not in repr(webhook)
