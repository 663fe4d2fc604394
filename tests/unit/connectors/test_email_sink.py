"""Sinks by e-mail: the contract, and what is sent to a real server of SMTP."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import certificate
import pytest
import smtp_server
from sink_tables import reasons, send

import millstream as ms
from millstream.connectors.sinks.connector import RecordsToWrite, SinkOpening, SinkRecord
from millstream.connectors.sinks.urls import sink_connector_of
from millstream.errors import ConfigError, RetriableError
from millstream.testing.connectors import SinkContract
from millstream.testing.free_ports import free_ports

_KILLED = """
import sys
from dataclasses import replace
import millstream as ms
made = ms.to_email(sys.argv[1], to="a@x", sender="m@x", subject="{n}", encryption="none", batch=7)
print("begun", flush=True)
ms.sink(made, topic="t", log=sys.argv[2], name="out").run(until="caught-up")
"""


@pytest.fixture
def server():
    with smtp_server.started() as started:
        yield started


@dataclass
class Outside:
    server: smtp_server.Server
    of: str
    keyed = False

    def connector(self):
        subject = "{count} rows" if self.of == "digest" else "Row {n}"
        return ms.to_email(
            self.server.url,
            to="ops@example.com",
            sender="millstream@example.com",
            subject=subject,
            of=self.of,
            batch=7,
            encryption="none",
        )

    def rows(self):
        bodies = [mail.get_content().removesuffix("\n") for _, mail in self.server.taker.mails]
        if self.of == "digest":
            return [json.loads(line) for body in bodies for line in body.split("\n")]
        parts = (body.removeprefix("n: ").partition("\ntext: ") for body in bodies)
        return [{"n": n, "text": text} for n, _, text in parts]

    def bad_row(self):
        return {"n": "bad", "text": ""} if self.of == "row" else None

    @contextmanager
    def down(self):
        self.server.stop()
        yield
        self.server.start()


class TestEmailOfRows(SinkContract):
    of = "row"
    rounds = 4

    @contextmanager
    def outside(self, folder):
        with smtp_server.started() as server:
            yield Outside(server, self.of)


@pytest.mark.thorough
class TestDigests(TestEmailOfRows):
    of = "digest"


def _email(server, **options):
    given = {"to": "a@x", "sender": "m@x", "encryption": "none", **options}
    return ms.to_email(server.url, **given)


def _run(server, log, **options):
    made = _email(server, **options)
    return ms.sink(made, topic="t", log=log, name="out").run(until="caught-up")


def test_an_email_has_the_fields_of_its_row(tmp_path, server):
    row = {"id": 7, "mail": "b@example.com", "name": "Zoë {x}", "sum": 1.5}
    send(tmp_path, (None, json.dumps(row).replace("1.5", "1.50").encode()), (None, row))
    status = _run(
        server,
        tmp_path,
        to="{mail}, ops@x",
        subject="Order {id}: {sum}",
        text="Dear {name},\nhello",
    )
    assert status.records == 2
    (to, first), (_, second) = server.taker.mails
    assert to == ("b@example.com", "ops@x")
    assert (first["Subject"], first["From"]) == ("Order 7: 1.50", "m@x")
    assert first.get_content() == "Dear Zoë {x},\nhello\n"
    assert first["Message-ID"].endswith(".0.0@millstream.invalid>")
    assert second["Message-ID"].endswith(".0.1@millstream.invalid>")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"mail": "b@x\nBcc: c@x", "s": "s"}, "is no address"),
        ({"mail": "b@x, c@x", "s": "s"}, "is no address"),
        ({"mail": "b@x\r\n", "s": "s"}, "is no address"),
        ({"mail": "b@x", "s": "s\nBcc: c@x"}, "line end"),
        ({"mail": "b@x", "s": "s\rX"}, "line end"),
        ({"mail": "b@x", "s": "s\u2028X"}, "line end"),
        ({"mail": "b@x", "s": None}, "needs the field 's'"),
        ({"s": "s"}, "needs the field 'mail'"),
        ({"mail": "b@x", "s": "\ud800"}, "not printed"),
        (None, "a tombstone"),
    ],
)
def test_what_would_break_a_header_is_a_dead_letter(tmp_path, server, row, why):
    send(tmp_path, (b"k", row), (b"k", {"mail": "b@x", "s": "good"}))
    assert _run(server, tmp_path, to="{mail}", subject="{s}").dead == 1
    assert why in reasons(tmp_path)[0]
    assert [mail["Subject"] for _, mail in server.taker.mails] == ["good"]


def test_who_was_refused_for_now_alone_gets_it_again(tmp_path, server):
    server.taker.replies = {"b@x": "451 later", "c@x": "550 unknown"}
    send(tmp_path, (None, {"n": 1}), (None, {"n": 2}))
    made = ms.sink(_email(server, to=["a@x", "b@x", "c@x"], subject="{n}"), topic="t", log=tmp_path)
    seen = []
    status = made.run(until="caught-up", on_status=seen.append)
    assert (seen[0].state, status.records, status.dead) == ("retrying", 2, 0)
    assert "451 later" in seen[0].problem
    got = [(mail["Subject"], to) for to, mail in server.taker.mails]
    assert got == [("1", ("a@x",)), ("1", ("b@x", "c@x")), ("2", ("a@x", "b@x", "c@x"))]


def test_sinks_that_share_a_connector_do_not_take_the_others_emails_for_their_own(server):
    made = _email(server, to=["a@x", "b@x"], subject="{of}")

    def batch(topic):
        row = {"of": topic}
        record = SinkRecord(0, 0, 0, None, json.dumps(row).encode(), row)
        return RecordsToWrite("1", 1, [record], {0: 1})

    first, second = (made.open(SinkOpening(f"to-{topic}", topic, "L", "T")) for topic in ("t", "u"))
    server.taker.replies = {"b@x": "451 later"}
    with pytest.raises(RetriableError, match="451 later"):
        first.write(batch("t"))
    assert second.write(batch("u")) == first.write(batch("t")) == []
    got = [(mail["Subject"], to) for to, mail in server.taker.mails]
    assert got == [("t", ("a@x",)), ("u", ("a@x", "b@x")), ("t", ("b@x",))]


def test_a_recipient_that_there_is_not_is_a_dead_letter(tmp_path, server):
    server.taker.replies = {"c@x": "550 unknown"}
    send(tmp_path, (None, {"n": 1}))
    assert _run(server, tmp_path, to="a@x,c@x").dead == 1
    assert reasons(tmp_path) == {0: "it was not sent to c@x: 550 unknown"}
    assert [to for to, _ in server.taker.mails] == [("a@x",)]


def test_digests_are_no_more_often_than_was_asked(tmp_path, server):
    send(tmp_path, (None, {"n": 0}))
    made = ms.sink(_email(server, of="digest", every="2 seconds"), topic="t", log=tmp_path)
    thread = threading.Thread(target=made.run)
    thread.start()
    end_s, times = time.monotonic() + 120, []
    n = 1
    while len(times) < 3 and time.monotonic() < end_s:
        if len(server.taker.mails) > len(times):
            times.append(time.monotonic())
        send(tmp_path, (None, {"n": n}))
        n += 1
        time.sleep(0.1)
    made.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert len(times) == 3
    # The first is seen up to a moment late.
    assert times[2] - times[0] > 3.0
    rows = [json.loads(line)["n"] for _, mail in server.taker.mails for line in mail.get_content().splitlines()]  # fmt: skip
    assert rows == list(range(len(rows)))
    assert server.taker.mails[1][1]["Subject"].endswith("rows of t")


def _authenticator(server, session, envelope, mechanism, data):
    from aiosmtpd.smtp import AuthResult

    return AuthResult(success=(data.login, data.password) == (b"me", b"hush/hush"), handled=False)


def test_a_session_is_encrypted_and_logged_in(tmp_path, monkeypatch):
    certificate.write(tmp_path)
    path = tmp_path / "server.crt"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path, tmp_path / "server.key")
    options = {"tls_context": context, "require_starttls": True, "authenticator": _authenticator}
    send(tmp_path / "log", (None, {"n": 1}))

    def run(server, password):
        monkeypatch.setenv("SECRET", password)
        url = f"smtp://me:${{env:SECRET}}@127.0.0.1:{server.port}"
        made = sink_connector_of(url, {"to": "a@x", "sender": "m@x"})
        assert password not in repr(made)
        return ms.sink(made, topic="t", log=tmp_path / "log").run(until="caught-up")

    with smtp_server.started(auth_required=True, **options) as server:
        with pytest.raises(ConfigError, match="certificate is not trusted"):
            run(server, "hush/hush")
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        with pytest.raises(ConfigError, match="refuses the user: 535") as raised:
            run(server, "wrong")
        assert "wrong" not in str(raised.value)
        assert run(server, "hush/hush").records == 1
        assert len(server.taker.mails) == 1


def test_a_server_without_starttls_gets_no_password(server):
    made = ms.to_email(f"smtp://me:hush@127.0.0.1:{server.port}", to="a@x", sender="m@x")
    writer = made.open(SinkOpening("out", "t", "l", "x"))
    with pytest.raises(ConfigError, match="STARTTLS"):
        writer.write(RecordsToWrite("i", 0, [SinkRecord(0, 0, 0, None, b"{}", {"n": 1})], {0: 1}))


def test_a_server_that_is_not_there_is_waited_for():
    made = ms.to_email(
        f"smtp://127.0.0.1:{free_ports(1)[0]}", to="a@x", sender="m@x", encryption="none"
    )
    writer = made.open(SinkOpening("out", "t", "l", "x"))
    with pytest.raises(RetriableError, match="ConnectionRefusedError"):
        writer.write(RecordsToWrite("i", 0, [SinkRecord(0, 0, 0, None, b"{}", {"n": 1})], {0: 1}))


def test_a_sink_that_is_killed_sends_all_and_again_under_the_same_id(tmp_path, server):
    send(tmp_path, *((None, {"n": n}) for n in range(200)))
    for wait_s in (0.05, 0.1, 0.2):
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED, server.url, str(tmp_path)], stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            time.sleep(wait_s)
            process.kill()
    _run(server, tmp_path, subject="{n}", batch=7)
    ids = {mail["Subject"]: set() for _, mail in server.taker.mails}
    for _, mail in server.taker.mails:
        ids[mail["Subject"]].add(mail["Message-ID"])
    assert ids.keys() == {str(n) for n in range(200)}
    assert all(len(found) == 1 for found in ids.values())


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("smtp://h", {"to": "a", "sender": "m@x"}, "'a' is no address"),
        ("smtp://h", {"to": "a@x", "sender": "m@x\nBcc: b@x"}, "is no address"),
        ("smtp://h", {"to": "a@x", "sender": "m@x", "subject": "a\nb"}, "Give one line"),
        ("smtp://h", {"to": "a@x", "sender": "m@x", "subject": "{a"}, "in braces"),
        ("smtp://h", {"to": "a@x", "sender": "m@x", "of": "digest", "subject": "{id}"}, "'id'"),
        ("smtp://h", {"to": "a@x", "sender": "m@x", "every": "1 hour"}, "of='digest'"),
        ("smtp://h", {"to": "a@x", "sender": "m@x", "of": "digest", "text": "x"}, "a line of JSON"),
        ("smtp://me:hush@h", {"to": "a@x", "sender": "m@x", "encryption": "none"}, "in the clear"),
        ("smtp://h/path", {"to": "a@x", "sender": "m@x"}, "none of SMTP"),
        ("smtp://h", {"sender": "m@x"}, "needs to: -o to="),
        ("smtp://h", {"to": "a@x", "sender": "m@x", "batch": "0"}, "batch is 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(url, options, words):
    with pytest.raises(ConfigError, match=words) as raised:
        sink_connector_of(url, options)
    assert "hush" not in str(raised.value)
