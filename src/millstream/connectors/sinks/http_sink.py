"""``ms.to_http``: a sink that sends batches of rows to an address, by POST.

A batch is sent under one ``Idempotency-Key`` for ever, so a receiver that keeps the keys takes each once; else at least once.

==================================  ======================================================================
response                            what follows
==================================  ======================================================================
2xx                                 the batch is written
408, 409, 425, 429, 5xx, none       it is sent again, not before ``Retry-After``
400, 413, 422                       it is divided, until the records that are refused are known
any other, also redirects that      the sink stops: the address, or who asks, is wrong
lead to another server
==================================  ======================================================================

Source: RFC 9110 (status codes, Retry-After); IETF, draft-ietf-httpapi-idempotency-key-header (409 while it is processed).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from millstream.choices import choose
from millstream.connectors.http_options import check_http_url, request_headers
from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkGuarantee,
    SinkOpening,
    SinkRecord,
    WrittenBatch,
)
from millstream.errors import ConfigError, RetriableError
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.lookups.http_client import (
    DEFAULT_PORTS,
    HttpAnswer,
    HttpRequest,
    Origin,
    exchange,
    retry_after_s,
)

AUTHORIZATION_VARIABLE = "MILLSTREAM_SINK_AUTHORIZATION"
HttpForm = Literal["array", "lines"]
HttpContent = Literal["row", "record"]
_LATER = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({400, 413, 422})
_RETRY_AFTER_S_MAX = 3600.0
_ANSWER_BYTES_MAX = 1 << 20
_OURS = ("content-type", "content-length", "idempotency-key")
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class HttpSink:
    """A sink connector, made by :func:`to_http`."""

    url: str = field(repr=False)  # its query may have a secret
    headers: Mapping[str, str] = field(repr=False)
    form: HttpForm
    content: HttpContent
    timeout_s: float
    records_max: int
    bytes_max: int = 4 << 20
    kind: str = "http"
    guarantee: SinkGuarantee = "at least once"

    @property
    def origin(self) -> str:
        """The address, without its query."""
        return self.url.partition("?")[0]

    def open(self, opening: SinkOpening) -> HttpWriter:
        """Return what writes; see :class:`~millstream.connectors.sinks.connector.SinkConnector`."""
        return HttpWriter(self, opening)


class HttpWriter:
    """Sends batches; see :class:`~millstream.connectors.sinks.connector.SinkWriter`."""

    last: WrittenBatch | None = None

    def __init__(self, sink: HttpSink, opening: SinkOpening) -> None:
        self._sink = sink
        self._topic = opening.topic
        url = urlsplit(sink.url)
        assert url.hostname is not None, "to_http has looked"
        self._origin = Origin(url.scheme, url.hostname, url.port or DEFAULT_PORTS[url.scheme])
        self._target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Send a batch, and parts of it where it is refused; see the protocol."""
        refused: list[RefusedRecord] = []
        records = list(batch.records)
        if self._sink.content == "row":
            records = [record for record in batch.records if record.row is not None]
            refused = [
                RefusedRecord(
                    record.partition,
                    record.offset,
                    'it is a tombstone, which has no row to send. With content="record" it is sent, too',
                )
                for record in batch.records
                if record.row is None
            ]
        if records:
            self._send(batch.id, records, refused)
        return refused

    def close(self) -> None:
        """Do nothing: connections are kept for the next writer."""

    def _send(self, key: str, records: list[SinkRecord], refused: list[RefusedRecord]) -> None:
        """Send records under a key. If they are refused, send both halves, under keys of their own."""
        answer = self._post(key, records)
        if 200 <= answer.status < 300:
            return
        where = f"{self._sink.origin} responded {answer.status}"
        if answer.status in _LATER or answer.status >= 500:
            error = RetriableError(f"{where}. It is tried again.")
            asked_s = retry_after_s(answer.headers.get("retry-after"), time.time())
            error.retry_after_s = min(asked_s, _RETRY_AFTER_S_MAX)
            raise error
        if answer.status not in _REFUSED:
            raise ConfigError(
                f"{where} to a POST of {len(records)} records, which is not about one of them. Correct the address, or the header "
                f"Authorization (${AUTHORIZATION_VARIABLE}), and start the sink again: it sends them again."
            )
        if len(records) == 1:
            one = records[0]
            refused.append(RefusedRecord(one.partition, one.offset, where))
            return
        half = len(records) // 2
        self._send(f"{key}-0", records[:half], refused)
        self._send(f"{key}-1", records[half:], refused)

    def _post(self, key: str, records: list[SinkRecord]) -> HttpAnswer:
        headers = {
            **self._sink.headers,
            "Content-Type": (
                "application/json" if self._sink.form == "array" else "application/x-ndjson"
            ),
            "Idempotency-Key": key,
            "Millstream-Topic": self._topic,
        }
        shown = self._sink.origin
        request = HttpRequest(
            "POST", self._origin, self._target, headers, self._body(records), shown
        )
        try:
            return exchange(request, self._sink.timeout_s, _ANSWER_BYTES_MAX)
        except LookupCallError as error:
            if error.retriable:
                raise RetriableError(f"{error}. It is tried again.") from None
            raise ConfigError(f"{error}. Correct the address, and start the sink again.") from None

    def _body(self, records: Sequence[SinkRecord]) -> bytes:
        texts = [self._text(record) for record in records]
        if self._sink.form == "array":
            return b"[" + b",".join(texts) + b"]"
        return b"".join(text + b"\n" for text in texts)

    def _text(self, record: SinkRecord) -> bytes:
        value = record.value
        # JSON that is written in several lines has its line ends between tokens: none is in a string.
        text = b"null" if value is None else value.replace(b"\n", b" ").replace(b"\r", b" ")
        if self._sink.content == "row":
            return text
        key = None if record.key is None else record.key.decode("utf-8", "backslashreplace")
        said: dict[str, Any] = {
            "partition": record.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            "key": key,
        }
        return _ENCODE(said).encode()[:-1] + b',"row":' + text + b"}"


def to_http(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    form: HttpForm = "array",
    content: HttpContent = "row",
    batch: int = 500,
    timeout_s: float = 30.0,
) -> HttpSink:
    """Return a sink that sends rows to an address, in batches, by POST.

    Each batch has a header ``Idempotency-Key``, which is the same whenever it is sent again.

    Args:
        url: ``https://host/path``, without user and password.
        headers: For each request. Leave a secret to the variable MILLSTREAM_SINK_AUTHORIZATION, which is the header
            Authorization.
        form: "array" is one array of JSON, "lines" a line for each row.
        content: "row" is the row alone; "record" is an object of partition, offset, timestamp_ms, key and row, which is null
            for a tombstone.
        batch: How many rows a request has at most.
        timeout_s: How long a response may take.

    Raises:
        ConfigError: the URL is not one of HTTP, or an option is not possible.
    """
    choose("form", form, get_args(HttpForm))
    choose("content", content, get_args(HttpContent))
    check_http_url(url, "sink", AUTHORIZATION_VARIABLE)
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 100_000:
        raise ConfigError(f"batch is {batch!r}. Give 1 to 100,000 rows.")
    if not 0 < timeout_s <= 3600:
        raise ConfigError(f"timeout_s is {timeout_s!r}. Give seconds, up to 3,600.")
    given = request_headers(headers or {}, _OURS, AUTHORIZATION_VARIABLE)
    return HttpSink(url, given, form, content, timeout_s, batch)
