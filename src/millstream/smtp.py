"""Sessions at a server of SMTP, as alerts and sinks send e-mail: encrypted and logged in as was asked.

Source: RFC 5321 (SMTP), RFC 3207 (STARTTLS), RFC 8314 (TLS from the beginning).
"""

from __future__ import annotations

import re
import smtplib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

SmtpEncryption = Literal["none", "starttls", "tls"]
# A part of RFC 5322's: no quotes, no comments, no domains in brackets. What a header could be broken with is not among it.
_ADDRESS = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*"
)


@dataclass(frozen=True, slots=True)
class SmtpServer:
    """Where a server is, and how it is asked. "starttls" encrypts before anything is told, "tls" from the beginning."""

    host: str
    port: int
    encryption: SmtpEncryption
    user: str | None = None
    password: str = field(default="", repr=False)


def is_mail_address(text: str) -> bool:
    """Whether a text is one address of e-mail, such as ``ops@example.com``."""
    return len(text) <= 254 and _ADDRESS.fullmatch(text) is not None


@contextmanager
def smtp_session(server: SmtpServer, timeout_s: float) -> Iterator[smtplib.SMTP]:
    """Return a session. With encryption, the server's certificate is checked.

    Raises:
        OSError: the server does not respond, or its certificate is not one that is trusted.
        SMTPException: it refuses the session.
    """
    if server.encryption == "tls":
        opened: smtplib.SMTP = smtplib.SMTP_SSL(
            server.host, server.port, timeout=timeout_s, context=ssl.create_default_context()
        )
    else:
        opened = smtplib.SMTP(server.host, server.port, timeout=timeout_s)
    with opened as smtp:
        if server.encryption == "starttls":
            smtp.starttls(context=ssl.create_default_context())
        if server.user is not None:
            smtp.login(server.user, server.password)
        yield smtp
