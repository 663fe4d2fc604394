"""By what alerts are told: a real HTTP server, a real SMTP server, a real program."""

from __future__ import annotations

import email
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from webhook_receiver import Receiver

import millstream as ms
from millstream.cli.main import run
from millstream.errors import ConfigError, RetriableError
from millstream.views.alerts.rules_file import read_rules
from millstream.views.alerts.targets import AlertMessage, CommandTarget

MESSAGE = AlertMessage("shop/behind/1/firing", "firing", "behind", "shop", "Behind: 400 s é", 0.0)
AS_JSON = {
    "id": "shop/behind/1/firing",
    "kind": "firing",
    "alert": "behind",
    "scope": "shop",
    "text": "Behind: 400 s é",
    "at": "1970-01-01T00:00:00Z",
}


@contextmanager
def receiving(answer=lambda _request: 200):
    receiver = Receiver(answer)
    receiver.thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        receiver.thread.join()


def test_a_webhook_gets_json_and_a_key_that_is_the_same_again():
    with receiving() as receiver:
        target = ms.tell_webhook(receiver.url, headers={"Authorization": "Bearer secret"})
        target.send(MESSAGE)
        target.send(MESSAGE)
    first, second = receiver.requests
    assert json.loads(first["body"]) == AS_JSON
    assert first["idempotency-key"] == second["idempotency-key"] == MESSAGE.id
    assert first["authorization"] == "Bearer secret"
    assert "secret" not in repr(target) + target.name


@pytest.mark.parametrize("status", [404, 500, 503])
def test_a_webhook_that_refuses_has_not_been_told(status):
    with receiving(lambda _: status) as receiver, pytest.raises(RetriableError, match=str(status)):
        ms.tell_webhook(receiver.url).send(MESSAGE)


def test_a_webhook_that_redirects_has_not_been_told_and_its_headers_go_nowhere_else():
    with receiving() as other:
        moved = 302, {"Location": other.url}
        with receiving(lambda _: moved) as receiver, pytest.raises(RetriableError, match="302"):
            ms.tell_webhook(receiver.url, headers={"Authorization": "Bearer x"}).send(MESSAGE)
    assert not other.requests


def test_two_targets_that_look_alike_are_two_and_none_shows_its_path():
    pairs = [
        (ms.tell_webhook("http://h:1/x"), ms.tell_webhook("http://h:2/x")),
        (ms.tell_webhook("http://h/secret?a"), ms.tell_webhook("http://h/secret?b")),
        (ms.tell_command("page", "--team=secret"), ms.tell_command("page", "--team=b")),
    ]
    for one, other in pairs:
        assert one.name != other.name
        assert "secret" not in one.name + other.name


def test_a_webhook_that_is_not_there_has_not_been_told():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RetriableError, match="did not respond"):
        ms.tell_webhook(f"http://127.0.0.1:{port}/x").send(MESSAGE)


class SmtpServer:
    """Takes mail as RFC 5321 says: each command has its reply, and data end with a dot."""

    def __init__(self, *, refuses=False, once=None):
        self.once = dict(once or {})  # address → the reply that it gets once
        self.refuses, self.mails, self.recipients = refuses, [], []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                self.talk(stream)

    def talk(self, stream):
        def reply(text):
            stream.write(text.encode() + b"\r\n")
            stream.flush()

        reply("220 here")
        while line := stream.readline().decode().strip():
            word = line.split()[0].upper()
            if word == "RCPT":
                self.recipients.append(line)
                said = self.once.pop(line.partition("<")[2].partition(">")[0], None)
                reply("550 no such user" if self.refuses else said or "250 ok")
            elif word == "DATA":
                reply("354 go on")
                lines = list(iter(stream.readline, b".\r\n"))
                self.mails.append(email.message_from_bytes(b"".join(lines)))
                reply("250 taken")
            elif word == "QUIT":
                reply("221 bye")
                return
            else:
                reply("250 ok")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


def test_an_email_has_the_alert_and_an_id_that_is_the_same_again():
    with SmtpServer() as server:
        target = ms.tell_email(["a@example.com", "b@example.com"], server=server.address)
        target.send(MESSAGE)
        target.send(MESSAGE)
    first, second = server.mails
    assert first["Subject"] == "[firing] shop: behind"
    assert first["To"] == "a@example.com, b@example.com"
    assert first["Message-ID"] == second["Message-ID"]
    assert "Behind: 400 s é" in first.get_payload(decode=True).decode()
    assert len(server.recipients) == 4


def test_an_email_goes_again_to_who_was_refused_for_now_alone(caplog):
    with SmtpServer(once={"b@x": "451 later", "c@x": "550 unknown"}) as server:
        target = ms.tell_email(["a@x", "b@x", "c@x"], server=server.address)
        with pytest.raises(RetriableError, match="not sent to b@x"):
            target.send(MESSAGE)
        target.send(MESSAGE)
    again = [line.partition("<")[2].partition(">")[0] for line in server.recipients[3:]]
    assert again == ["b@x"]
    assert "is not told to c@x: 550 unknown" in caplog.text


def test_an_email_that_is_refused_has_not_been_told():
    with SmtpServer(refuses=True) as server, pytest.raises(RetriableError, match="was not sent"):
        ms.tell_email("a@example.com", server=server.address).send(MESSAGE)


def test_a_program_gets_the_alert(tmp_path):
    program = (
        "import os, sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read() + b'|' + "
        "os.environb[b'MILLSTREAM_ALERT_ID'])"
    )
    ms.tell_command(sys.executable, "-c", program, str(tmp_path / "told")).send(MESSAGE)
    content, _, identity = (tmp_path / "told").read_bytes().partition(b"|")
    assert json.loads(content) == AS_JSON
    assert content.endswith(b"\n")  # so that `tee -a` writes one alert a line
    assert identity.decode() == MESSAGE.id


def test_a_program_has_ended_although_what_it_left_behind_has_not(tmp_path):
    left = tmp_path / "left"
    ms.tell_command("/bin/sh", "-c", f"sleep 600 & echo $! > {left}; exit 0").send(MESSAGE)
    os.kill(int(left.read_text()), signal.SIGKILL)  # it still runs


def test_a_program_whose_time_is_over_is_ended_with_what_it_started(tmp_path):
    child = f"(sleep 0.6; touch {tmp_path / 'late'}) & wait"
    with pytest.raises(RetriableError, match="timed out"):
        CommandTarget(("/bin/sh", "-c", child), timeout_s=0.2).send(MESSAGE)
    time.sleep(0.6)
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [((sys.executable, "-c", "exit('no')"), "ended with 1: no"), (("/no/such",), "did not run")],
)
def test_a_program_that_fails_has_not_been_told(command, said):
    with pytest.raises(RetriableError, match=said):
        ms.tell_command(*command).send(MESSAGE)


@pytest.mark.parametrize(
    "made",
    [
        lambda: ms.tell_webhook("ftp://host/x"),
        lambda: ms.tell_webhook("https://me:secret@host/x"),
        lambda: ms.tell_webhook("https://host:http/x"),
        lambda: ms.tell_webhook("https://host/a b"),
        lambda: ms.tell_webhook("https://host/x", headers={"Authorization": "Bearer secret\n"}),
        lambda: ms.tell_webhook("https://host/x", headers={"Authorization": "secret\u20ac"}),
        lambda: ms.tell_webhook("https://host/x", headers={"A b": "secret"}),
        lambda: ms.tell_email("ops", server="h:25"),
        lambda: ms.tell_email("ops@example.com\nBcc: x@y", server="h:25"),
        lambda: ms.tell_email("ops@example.com", server="host"),
        lambda: ms.tell_email((), server="h:25"),
        lambda: ms.tell_email("ops@example.com", server="h:25", user="me"),
        ms.tell_command,
        lambda: ms.tell_command(["page", "--token=secret"]),
        lambda: ms.tell_command("page", 7),
    ],
)
def test_a_target_that_cannot_be_is_refused_without_its_secret(made):
    with pytest.raises(ConfigError) as refused:
        made()
    assert "secret" not in str(refused.value)


# The operator's command.

RULES = """
[tell.here]
webhook = "{url}"

[[rule]]
name = "disk"
metric = "log_disk_free_bytes"
{limit}
tell = ["here"]
"""


def test_the_command_tells_what_is_wrong_once_and_when_it_is_over(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    rules = tmp_path / "rules.toml"
    command = ["alert", str(rules), "--log", str(tmp_path / "data"), "--once"]
    with receiving() as receiver:
        rules.write_text(RULES.format(url=receiver.url, limit="above = 0"))
        assert run(command) == 1
        assert run(command) == 1
        assert "firing: disk" in capsys.readouterr().out
        rules.write_text(RULES.format(url=receiver.url, limit="below = 0"))
        assert run(command) == 0
    told = [json.loads(one["body"]) for one in receiver.requests]
    assert [one["kind"] for one in told] == ["firing", "resolved"]
    (first, *_, firing), (second, *_, resolved) = ([*one["id"].split("/")] for one in told)
    assert (first, firing, second, resolved) == ("data", "firing", "data", "resolved")
    assert told[0]["id"].rpartition("/")[0] == told[1]["id"].rpartition("/")[0]


def test_the_command_says_that_there_is_no_log_and_makes_none(tmp_path, capsys):
    (tmp_path / "rules.toml").write_text(RULES.format(url="http://h/", limit="above = 0"))
    command = ["alert", str(tmp_path / "rules.toml"), "--log", str(tmp_path / "typo"), "--once"]
    assert run(command) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rule"),
        ("[[rule]]\nname = 1", "not possible|tell"),
        ("[[rule]]\nnmae = 'a'", "name"),
        ("[tell.a]\nwebhok = 'x'", "webhook, email, command"),
        ("[tell.a]\nwebhook = 'http://h/'\nheader_variables = {A = 'NO_SUCH_VARIABLE'}", "not set"),
        ("rule = 3", "Give tables"),
        ("tell = 3", "Give a table"),
        ("[[rule]]\nname='a'\nmetric='log_bytes'\nabove=1\ntell='b'\n[tell.a]\ncommand='x'", "'b'"),
        ("[tell", "cannot be read"),
        ("[[rule]]\nname='a'\nmetric='log_bytes'\nabove=1\ntell=5", "Give names"),
        ("[[rule]]\nname='a'\nmetric='log_bytes'\nabove=1\ntell=[['b']]", "none of .tell"),
        (
            "[[rule]]\nname='a'\nmetric='broker_log_writable'\nbelow=1\ntell='b'\n[tell.b]\ncommand='x'",
            "`millstream alert` cannot",
        ),
    ],
)
def test_a_file_of_rules_that_cannot_be_is_refused(tmp_path, text, said):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_rules(tmp_path / "rules.toml")
