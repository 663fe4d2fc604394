"""By what an alert is told: an HTTP request, an e-mail, or a command. Each says when it has not been told."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import smtplib
import subprocess
import tempfile
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import EmailMessage
from http.client import HTTPException
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from millstream.access.secret_values import resolved, resolved_url
from millstream.access.server_address import server_address
from millstream.errors import ConfigError, RetriableError
from millstream.smtp import SmtpEncryption, SmtpServer, is_mail_address, smtp_session

TIMEOUT_S = 10.0
_SAID_MAX = 1 << 16  # bytes of a program's errors that are looked at
_URL_TEXT = re.compile(r"[!-~]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_log = logging.getLogger(__name__)
PASSWORD_VARIABLE = "MILLSTREAM_SMTP_PASSWORD"  # noqa: S105 - its name


class AlertMessage(NamedTuple):
    """What is told. ``id`` is the same each time a notice is told; ``scope`` is the app, or the log."""

    id: str
    kind: str
    alert: str
    scope: str
    text: str
    at_s: float

    def to_json(self) -> bytes:
        """Return it as JSON; ``at`` is RFC 3339."""
        at = datetime.fromtimestamp(self.at_s, UTC).isoformat().replace("+00:00", "Z")
        values = {**self._asdict(), "at": at}
        del values["at_s"]
        return json.dumps(values, ensure_ascii=False).encode()

    @property
    def subject(self) -> str:
        """One line."""
        return f"[{self.kind}] {self.scope}: {self.alert}"


class AlertTarget(ABC):
    """Tells alerts. ``name`` is its identity in stored notices: it has no secret."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def send(self, message: AlertMessage) -> None:
        """Tell it.

        Raises:
            RetriableError: it may not have been told.
        """


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: followed, it would be a GET without the alert, with the headers, to anywhere."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _digest(text: str) -> str:
    """Return what tells targets apart without showing them."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class WebhookTarget(AlertTarget):
    """Sends alerts to a URL: made by :func:`tell_webhook`."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        # The path and the query are the secret, with many receivers.
        parts = urlsplit(self.url)
        return f"webhook {parts.scheme}://{parts.netloc} ({_digest(self.url)})"

    def send(self, message: AlertMessage) -> None:
        headers = {
            **self.headers,
            "Content-Type": "application/json",
            "Idempotency-Key": message.id.encode("ascii", "backslashreplace").decode(),
        }
        request = urllib.request.Request(  # noqa: S310 - http or https: checked
            self.url, message.to_json(), headers, method="POST"
        )
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S):
                return
        except urllib.error.HTTPError as error:
            with error:
                raise RetriableError(f"{self.name} responded with {error.code}") from None
        except (OSError, HTTPException) as error:
            raise RetriableError(f"{self.name} did not respond: {error}") from None


@dataclass(frozen=True)
class EmailTarget(AlertTarget):
    """Sends alerts by e-mail: made by :func:`tell_email`."""

    server: str
    sender: str
    to: tuple[str, ...]
    user: str | None
    starttls: bool
    _taken: dict[str, set[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"email {', '.join(self.to)}"

    def send(self, message: AlertMessage) -> None:
        mail = EmailMessage()
        mail["Subject"] = " ".join(message.subject.split())
        mail["From"], mail["To"] = self.sender, ", ".join(self.to)
        taken = self._taken.setdefault(message.id, set())  # by whom, when it was sent before
        to = [address for address in self.to if address not in taken]
        # The same each time: mail programs show a message with a known id once.
        digest = hashlib.sha256(message.id.encode()).hexdigest()[:32]
        mail["Message-ID"] = f"<{digest}@millstream.invalid>"
        mail.set_content(f"{message.text}\n\n{message.to_json().decode()}\n")
        try:
            with smtp_session(self._server(), TIMEOUT_S) as smtp:
                refused = smtp.send_message(mail, to_addrs=to)
        except (OSError, smtplib.SMTPException) as error:
            raise RetriableError(f"{self.name} was not sent: {error}") from None
        later = _refused_for_now(message, refused)
        if later:
            taken.update(set(to) - later)
            raise RetriableError(f"{self.name} was not sent to {', '.join(sorted(later))}")
        del self._taken[message.id]

    def _server(self) -> SmtpServer:
        host, _, port = self.server.rpartition(":")
        password = os.environ.get(PASSWORD_VARIABLE, "")
        encryption: SmtpEncryption = "starttls" if self.starttls else "none"
        return SmtpServer(host.strip("[]"), int(port), encryption, self.user, password)


def _refused_for_now(message: AlertMessage, refused: Mapping[str, tuple[int, bytes]]) -> set[str]:
    """Return to which of the refused addresses it is to be sent again; log those that are refused for good."""
    later = {address for address, (code, _) in refused.items() if code < 500}
    for address in refused.keys() - later:
        code, said = refused[address]
        _log.error(
            "%s is not told to %s: %d %s", message.id, address, code, said.decode(errors="replace")
        )
    return later


@dataclass(frozen=True)
class CommandTarget(AlertTarget):
    """Runs a program for each alert: made by :func:`tell_command`."""

    command: tuple[str, ...]
    timeout_s: float = 30.0

    @property
    def name(self) -> str:
        return f"command {self.command[0]} ({_digest(chr(0).join(self.command))})"

    def send(self, message: AlertMessage) -> None:
        told = {
            "MILLSTREAM_ALERT_ID": message.id,
            "MILLSTREAM_ALERT_KIND": message.kind,
            "MILLSTREAM_ALERT": message.alert,
            "MILLSTREAM_ALERT_TEXT": message.text,
        }
        try:
            # Not a pipe: what the program leaves behind may hold it open for longer than the program lives.
            with tempfile.TemporaryFile() as errors:
                code = self._run(message.to_json() + b"\n", {**os.environ, **told}, errors)
                errors.seek(0)
                said = errors.read(_SAID_MAX).decode(errors="replace").strip()[-200:]
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise RetriableError(f"{self.name} did not run: {error}") from None
        if code:
            raise RetriableError(f"{self.name} ended with {code}: {said}")

    def _run(self, given: bytes, environment: Mapping[str, str], errors: IO[bytes]) -> int:
        """Run the program; end it, and what it has started, when its time is over."""
        with subprocess.Popen(  # noqa: S603 - what the user asked for, without a shell
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                process.communicate(given, self.timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.command[0], self.timeout_s) from None
        return process.returncode


def tell_webhook(url: str, *, headers: Mapping[str, str] | None = None) -> WebhookTarget:
    """Tell alerts by a POST with JSON: ``id``, ``kind``, ``alert``, ``scope``, ``text``, ``at``. Told is any 2xx.

    The header ``Idempotency-Key`` is the id, and the same when it is sent again.

    Args:
        headers: Further ones, such as ``Authorization``; they are never shown.

    Raises:
        ConfigError: it is no such URL.
    """
    url = resolved_url(url, "the URL of an alert's webhook")
    sent = {
        name: resolved(value, f"the header {name!r} of an alert's webhook")
        for name, value in (headers or {}).items()
    }
    if not _is_webhook_url(url):
        raise ConfigError(
            "The URL of an alert's webhook must be as https://example.com/hook, without a name or password in "
            "it, in ASCII without spaces: give name and password as headers."
        )
    for name, value in sent.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(
                f"The header {name!r} of an alert's webhook cannot be sent. Give a name of letters, digits and '-', and "
                "a value in Latin-1 without line breaks, also at its end."
            )
    return WebhookTarget(url, sent)


def _is_webhook_url(url: str) -> bool:
    parts = server_address(url, ("http", "https"))
    return parts is not None and parts.username is None and _URL_TEXT.fullmatch(url) is not None


def tell_email(
    to: str | Sequence[str],
    *,
    server: str,
    sender: str = "millstream@localhost",
    user: str | None = None,
    starttls: bool = False,
) -> EmailTarget:
    """Tell alerts by e-mail, through an SMTP server. The Message-ID is the same when it is sent again.

    Args:
        to: One address, or several.
        server: ``HOST:PORT``.
        user: Log in with this name, and the password in MILLSTREAM_SMTP_PASSWORD.
        starttls: Encrypt the connection; the server's certificate is checked.

    Raises:
        ConfigError: an address is not possible.
    """
    addresses = (to,) if isinstance(to, str) else tuple(to)
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"The SMTP server of an alert is {server!r}. Give HOST:PORT.")
    for address in (*addresses, sender):
        if not is_mail_address(address):
            raise ConfigError(
                f"{address!r} is no address for the e-mail of an alert. Give such as ops@example.com."
            )
    if not addresses:
        raise ConfigError("The e-mail of an alert goes to nobody. Give an address.")
    if user is not None and not starttls:
        raise ConfigError("The password for SMTP would be sent in the clear. Use starttls=True.")
    return EmailTarget(server, sender, addresses, user, starttls)


def tell_command(*command: str) -> CommandTarget:
    """Tell alerts by a program: it gets the alert as JSON on standard input, and told is the exit code 0.

    ``MILLSTREAM_ALERT_ID``, ``…_KIND``, ``…_TEXT`` and ``MILLSTREAM_ALERT`` are in its environment. No shell takes part.

    Raises:
        ConfigError: there is no program, or a part of the command is no text.
    """
    wrong = [part for part in command if not isinstance(part, str)]
    if wrong:
        raise ConfigError(
            f"A part of the command of an alert is a {type(wrong[0]).__name__}. Give the program and each argument as a text "
            'of its own: tell_command("/usr/local/bin/page", "--team", "data").'
        )
    if not command or not command[0]:
        raise ConfigError("The command of an alert is empty. Give the program and its arguments.")
    return CommandTarget(command)
