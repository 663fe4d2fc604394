"""A server of SMTP that keeps what it takes, on a free port of this machine."""

import email
import email.policy
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from millstream.testing.free_ports import free_ports


@dataclass
class Taker:
    """What a server does with e-mail: it keeps it, or refuses some; ``replies`` are given to addresses, each once."""

    mails: list = field(default_factory=list)
    replies: dict = field(default_factory=dict)

    async def handle_RCPT(self, server, session, envelope, address, options):
        if reply := self.replies.pop(address, None):
            return reply
        envelope.rcpt_tos.append(address)
        return "250 ok"

    async def handle_DATA(self, server, session, envelope):
        content = envelope.content.replace(b"\r\n", b"\n")
        mail = email.message_from_bytes(content, policy=email.policy.default)
        if "bad" in mail["Subject"]:
            return "554 no such rows"
        self.mails.append((tuple(envelope.rcpt_tos), mail))
        return "250 taken"


class Server:
    def __init__(self, **options):
        self.taker, self.options, self.port = Taker(), options, free_ports(1)[0]
        self.start()

    def start(self):
        from aiosmtpd.controller import Controller

        self.controller = Controller(
            self.taker, hostname="127.0.0.1", port=self.port, ready_timeout=60, **self.options
        )
        self.controller.start()

    def stop(self):
        self.controller.stop()

    @property
    def url(self):
        return f"smtp://127.0.0.1:{self.port}"


@contextmanager
def started(**options):
    """Have a server; where there is none, the test is skipped."""
    pytest.importorskip("aiosmtpd", reason="a server of SMTP is not installed here")
    server = Server(**options)
    try:
        yield server
    finally:
        server.stop()
