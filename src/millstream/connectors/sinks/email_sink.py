"""``ms.to_email``: a sink that sends an e-mail for each row, or one with many, through a server of SMTP.

At least once: what was sent when a run is killed is sent again. The Message-ID is the same then, as it is made from the place of
the record in the topic, so mail programs may show it once.

==================================  ======================================================================
the server says                     what follows
==================================  ======================================================================
2xx                                 it has the e-mail
4xx, nothing                        it is sent again, to those alone who have not got it
5xx to a recipient or the e-mail    a dead letter, which names who has not got it
5xx to the sender or the log-in     the sink stops
==================================  ======================================================================

Source: RFC 5321 (SMTP), RFC 5322 (Message-ID).
"""

from __future__ import annotations

import hashlib
import smtplib
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import unquote, urlsplit

from millstream.choices import choose
from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkGuarantee,
    SinkOpening,
    SinkRecord,
    WrittenBatch,
)
from millstream.connectors.sinks.json_text import json_text
from millstream.connectors.sinks.mail_text import MailText, one_line
from millstream.connectors.sinks.sink_password import SINK_PASSWORD_VARIABLE, sink_password
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, RetriableError
from millstream.smtp import SmtpServer, is_mail_address, smtp_session

EmailOf = Literal["row", "digest"]
EmailEncryption = Literal["starttls", "none"]
_TIMEOUT_S = 30.0
_PORTS = {"smtp": 587, "smtps": 465}
_DIGEST_FIELDS = ("count", "topic")
_SENT = Mapping[str, tuple[int, bytes]]


@dataclass(frozen=True)
class EmailSink:
    """A sink connector, made by :func:`to_email`."""

    server: SmtpServer
    to: tuple[MailText, ...]
    sender: str
    subject: MailText
    text: MailText | None
    of: EmailOf
    records_max: int
    every_s: float = 0.0
    bytes_max: int = 4 << 20
    kind: str = "email"
    guarantee: SinkGuarantee = "at least once"
    # Who has which e-mail of the batch that is written, while this process lives. Several sinks may have one connector: of each that is
    # the topic's place, and then the e-mail's id.
    _taken: dict[str, dict[str, set[str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def origin(self) -> str:
        """The server, and to whom."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return f"{host}:{self.server.port}, to {', '.join(one.text for one in self.to)}"

    def open(self, opening: SinkOpening) -> EmailWriter:
        """Return what writes; see :class:`~millstream.connectors.sinks.connector.SinkConnector`."""
        return EmailWriter(self, opening)


class _Mail(NamedTuple):
    """An e-mail, to whom, and the records that it is of."""

    id: str
    message: EmailMessage
    to: tuple[str, ...]
    records: Sequence[SinkRecord]


class EmailWriter:
    """Sends e-mails; see :class:`~millstream.connectors.sinks.connector.SinkWriter`."""

    last: WrittenBatch | None = None

    def __init__(self, sink: EmailSink, opening: SinkOpening) -> None:
        self._sink = sink
        self._topic = opening.topic
        place = f"{opening.topic} {opening.life}".encode()
        self._place = hashlib.sha256(place).hexdigest()[:16]
        self._taken = sink._taken.setdefault(self._place, {})  # noqa: SLF001 - of this module

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Send the e-mails of a batch; see the protocol."""
        refused: list[RefusedRecord] = []
        mails = list(self._mails(batch, refused))
        if mails:
            with self._translated(), smtp_session(self._sink.server, _TIMEOUT_S) as smtp:
                for mail in mails:
                    if reason := self._send(smtp, mail):
                        refused += (_refused(record, reason) for record in mail.records)
        self._taken.clear()
        return refused

    def close(self) -> None:
        """Do nothing: a session is closed after each batch."""

    # ── what is sent ────────────────────────────────────────────────────────────────────────

    def _mails(self, batch: RecordsToWrite, refused: list[RefusedRecord]) -> Iterator[_Mail]:
        rows = []
        for record in batch.records:
            if record.row is None:
                refused.append(_refused(record, "it is a tombstone, which has no row to send"))
            elif self._sink.of == "digest":
                rows.append(record)
            else:
                try:
                    yield self._of_row(record, record.row)
                except (ValueError, RecursionError) as error:
                    refused.append(_refused(record, str(error)))
        if rows:
            yield self._of_many(batch, rows)

    def _of_row(self, record: SinkRecord, row: Mapping[str, Any]) -> _Mail:
        text = self._sink.text
        body = _fields_text(row) if text is None else text.filled(row)
        identity = f"{record.partition}.{record.offset}"
        return self._mail(identity, row, body, [record])

    def _of_many(self, batch: RecordsToWrite, records: Sequence[SinkRecord]) -> _Mail:
        fields = {"count": len(records), "topic": self._topic}
        lines = (_line(record.value or b"") for record in records)
        return self._mail(f"batch.{batch.number}", fields, "\n".join(lines), records)

    def _mail(
        self, identity: str, fields: Mapping[str, Any], body: str, records: Sequence[SinkRecord]
    ) -> _Mail:
        to = tuple(dict.fromkeys(_address(one, fields) for one in self._sink.to))
        message = EmailMessage()
        message["From"], message["To"] = self._sink.sender, ", ".join(to)
        message["Subject"] = one_line("the subject", self._sink.subject.filled(fields))
        message["Message-ID"] = f"<{self._place}.{identity}@millstream.invalid>"
        message["Date"] = formatdate(localtime=False)
        message["Auto-Submitted"] = "auto-generated"  # so that no absence note answers it
        try:
            body.encode()
        except UnicodeEncodeError:
            raise ValueError("its text has half of a surrogate pair") from None
        message.set_content(body)
        return _Mail(identity, message, to, records)

    # ── sending ─────────────────────────────────────────────────────────────────────────────

    def _send(self, smtp: smtplib.SMTP, mail: _Mail) -> str:
        """Send an e-mail to those who have not got it; return why some never will, or nothing.

        Raises:
            RetriableError: some have not got it, and may later.
        """
        taken = self._taken.setdefault(mail.id, set())
        to = [address for address in mail.to if address not in taken]
        refused: _SENT = {}
        if to:
            try:
                refused = smtp.send_message(mail.message, self._sink.sender, to)
            except smtplib.SMTPRecipientsRefused as error:
                refused = error.recipients
            except (smtplib.SMTPDataError, smtplib.SMTPSenderRefused) as error:
                refused = self._of_all(error, to)
        later = {address for address, (code, _) in refused.items() if code < 500}
        taken.update(address for address in to if address not in refused)
        if later:
            raise RetriableError(
                f"{self._sink.origin}: an e-mail was not taken for {', '.join(sorted(later))}: "
                f"{_said(*refused[min(later)])}. It is tried again."
            )
        return "; ".join(
            f"it was not sent to {address}: {_said(*why)}" for address, why in refused.items()
        )

    def _of_all(
        self, error: smtplib.SMTPDataError | smtplib.SMTPSenderRefused, to: Sequence[str]
    ) -> _SENT:
        """Return that an e-mail was refused for everybody; one that is too large may be refused with its sender.

        Raises:
            ConfigError: the server takes no e-mail of this sender.
        """
        said = (
            error.smtp_error
            if isinstance(error.smtp_error, bytes)
            else str(error.smtp_error).encode()
        )
        is_size = error.smtp_code == 552
        if isinstance(error, smtplib.SMTPSenderRefused) and error.smtp_code >= 500 and not is_size:
            raise ConfigError(
                f"{self._sink.origin} refuses e-mail of {self._sink.sender}: {_said(error.smtp_code, said)}. Give another sender=."
            )
        return dict.fromkeys(to, (error.smtp_code, said))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        shown = self._sink.origin
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{shown}: the server's certificate is not trusted: {error.verify_message}. Correct it, or the address."
            ) from None
        except smtplib.SMTPNotSupportedError as error:
            raise ConfigError(
                f"{shown}: {error} Use smtps://, or encryption='none' and no user where nobody else can listen."
            ) from None
        except smtplib.SMTPAuthenticationError as error:
            if error.smtp_code < 500:
                raise RetriableError(
                    f"{shown} does not log in now: {error.smtp_code}. It is tried again."
                ) from None
            raise ConfigError(
                f"{shown} refuses the user: {error.smtp_code}. Correct the user or the password (${SINK_PASSWORD_VARIABLE})."
            ) from None
        except (OSError, smtplib.SMTPException) as error:
            raise RetriableError(
                f"{shown} does not respond as it should: {type(error).__name__}: {error}. It is tried again."
            ) from None


def _refused(record: SinkRecord, reason: str) -> RefusedRecord:
    return RefusedRecord(record.partition, record.offset, reason)


def _said(code: int, said: bytes) -> str:
    return f"{code} {said.decode(errors='replace')[:200]}".replace("\n", " ")


def _address(to: MailText, fields: Mapping[str, Any]) -> str:
    address = to.filled(fields)
    if not is_mail_address(address):
        raise ValueError(f"{address!r:.80} is no address for e-mail such as ops@example.com")
    return address


def _fields_text(row: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json_text(value)}"
        for name, value in row.items()
    )


def _line(value: bytes) -> str:
    return value.decode().replace("\n", " ").replace("\r", " ")


def to_email(
    url: str,
    *,
    to: str | Sequence[str],
    sender: str,
    subject: str | None = None,
    text: str | None = None,
    of: EmailOf = "row",
    batch: int | None = None,
    every: Duration | None = None,
    encryption: EmailEncryption = "starttls",
) -> EmailSink:
    """Return a sink that sends e-mail, at least once; what is sent again has the same Message-ID.

    Args:
        url: ``smtp://user@host:587``, ``smtps://user@host:465``. Leave the password to the variable MILLSTREAM_SINK_PASSWORD, or name
            it: ``smtp://user:${env:NAME}@host``.
        to: An address, or several (in one text with commas between them); with fields of the row, such as ``{email}``.
        sender: The address that it is from.
        subject: With fields of the row, such as ``Order {id}``; of a digest, with ``{count}`` and ``{topic}``.
        text: The body, with fields of the row; by default all fields, one a line. A digest has a line of JSON for each row.
        of: What an e-mail is of: "row" is one for each row, "digest" one for up to ``batch`` rows.
        batch: By default 100 rows, or 1,000 of a digest.
        every: A digest is sent no more often than that, such as "1 hour".
        encryption: Of smtp://: "starttls", or "none", which is for a server on this machine.

    Raises:
        ConfigError: an option is not possible.
    """
    choose("of", of, get_args(EmailOf))
    choose("encryption", encryption, get_args(EmailEncryption))
    server = _server(url, encryption)
    addresses = tuple(to.split(",")) if isinstance(to, str) else tuple(to)
    texts = tuple(MailText("to", address.strip()) for address in addresses)
    default = "{count} rows of {topic}" if of == "digest" else "A row"
    titled = MailText("the subject", default if subject is None else subject)
    body = None if text is None else MailText("the text", text)
    _check_texts(texts, sender, titled, body, of)
    rows = (1000 if of == "digest" else 100) if batch is None else batch
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= 100_000:
        raise ConfigError(f"batch is {batch!r}. Give 1 to 100,000 rows.")
    if every is not None and of == "row":
        raise ConfigError(
            f"every is {every!r}, which is for of='digest': a row is sent when it comes."
        )
    every_s = 0.0 if every is None else to_us(every, what="every") / 1e6
    return EmailSink(server, texts, sender, titled, body, of, rows, every_s)


def _server(url: str, encryption: EmailEncryption) -> SmtpServer:
    try:
        parts = urlsplit(url)
        port = _PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit(""), 0
    if not parts.hostname or not port or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(
            "the sink's address is none of SMTP. Give smtp://user@host:587 or smtps://user@host:465, with other characters than "
            "letters and digits in user and password as %40 is for @."
        )
    user = unquote(parts.username) if parts.username else None
    used = "tls" if parts.scheme == "smtps" else encryption
    if user is not None and used == "none":
        raise ConfigError(
            "the password for SMTP would be sent in the clear. Use encryption='starttls', or smtps://."
        )
    return SmtpServer(parts.hostname, port, used, user, sink_password(url) or "")


def _check_texts(
    to: Sequence[MailText], sender: str, subject: MailText, text: MailText | None, of: EmailOf
) -> None:
    for address in [one.text for one in to if not one.fields] + [sender]:
        if not is_mail_address(address):
            raise ConfigError(
                f"{address!r} is no address for e-mail. Give such as ops@example.com; to= may be a field of the row: '{{email}}'."
            )
    if not subject.text.isprintable():
        raise ConfigError(f"the subject is {subject.text!r}. Give one line.")
    if of == "digest" and text is not None:
        raise ConfigError("text is for of='row': a digest has a line of JSON for each row.")
    wrong = [name for one in to for name in one.fields]
    wrong += [name for name in subject.fields if name not in _DIGEST_FIELDS]
    if of == "digest" and wrong:
        raise ConfigError(
            f"a digest is of many rows, and {wrong[0]!r} is a field of one. Its subject may have {', '.join(_DIGEST_FIELDS)}."
        )
