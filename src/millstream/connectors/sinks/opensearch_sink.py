"""``ms.to_opensearch``: a sink to an index of OpenSearch: a document for each key.

A document's id is the record's key. Its version is that of the batch: when this sink began, in seconds, and the batch's number.
The server takes a change only if the document has no later version (``external_gte``). So

==========================================  ==============================================================
a change                                    what the server does
==========================================  ==============================================================
of a batch that is written again            the same again
of a batch that comes late, after a         refuses it
later one of this sink
of another sink, which began earlier        refuses it: that sink ends, and says why
==========================================  ==============================================================

A deletion has a version as well, which the server keeps for ``index.gc_deletes`` (60 seconds): a batch that comes later than that,
though nobody waits for it any more, may bring a deleted document back.

Changes of a batch are sent in the order of the records, so the last one of a key holds, and of a refused one the one before.

Source: OpenSearch 2.19, "Bulk API", "Index document" (version_type).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from millstream.access.server_address import server_address
from millstream.connectors.sinks.connector import (
    RecordsToWrite,
    RefusedRecord,
    SinkGuarantee,
    SinkOpening,
    SinkRecord,
    WrittenBatch,
)
from millstream.connectors.sinks.opensearch_client import SCHEMES, OpenSearchClient, reason_of
from millstream.errors import ConfigError, FencedError, RetriableError

NOTES = "millstream-sinks"
"""The index that has when each sink began."""
_NAME = re.compile(r"(?![-_+.])[^\s\\/*?\"<>|,#:A-Z]+")
_NAME_BYTES_MAX = 255
_ID_BYTES_MAX = 512
_EPOCH_S = 1_577_836_800  # 2020-01-01: versions have 63 bits, of which the number has 32
_NUMBER_BITS = 32
_TARGET = "/_bulk?filter_path=items.*.status,items.*.error"
_FOUND, _NOT_FOUND, _CONFLICT, _TOO_LARGE = 200, 404, 409, 413
_REFUSED = 400


@dataclass(frozen=True)
class OpenSearchSink:
    """A sink connector, made by :func:`to_opensearch`."""

    url: str = field(repr=False)  # it may have a password
    index: str
    timeout_s: float
    records_max: int
    bytes_max: int = 4 << 20
    kind: str = "opensearch"
    guarantee: SinkGuarantee = "key"
    clock_s: Callable[[], float] = time.time

    @property
    def client(self) -> OpenSearchClient:
        """What asks the server."""
        return OpenSearchClient(self.url, self.timeout_s)

    @property
    def origin(self) -> str:
        """The address, without user and password, and the index."""
        return f"{self.client.shown}, index {self.index!r}"

    def open(self, opening: SinkOpening) -> OpenSearchWriter:
        """Return what writes; see :class:`~millstream.connectors.sinks.connector.SinkConnector`."""
        return OpenSearchWriter(self, opening)


class OpenSearchWriter:
    """Writes batches; see :class:`~millstream.connectors.sinks.connector.SinkWriter`."""

    last: WrittenBatch | None = None

    def __init__(self, sink: OpenSearchSink, opening: SinkOpening) -> None:
        self._sink = sink
        self._client = sink.client
        self._check_index()
        self._born_s = self._begun(f"{opening.name}:{opening.life}")

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Write a batch; see the protocol."""
        refused: list[RefusedRecord] = []
        version = (self._born_s - _EPOCH_S << _NUMBER_BITS) + batch.number
        changes: list[tuple[SinkRecord, bytes]] = []
        for record in batch.records:
            if reason := _why_no_id(record.key):
                refused.append(RefusedRecord(record.partition, record.offset, reason))
            else:
                changes.append((record, self._change(record, version)))
        if changes:
            self._send(changes, refused)
        return refused

    def close(self) -> None:
        """Do nothing: connections are kept for the next writer."""

    # ── changes ─────────────────────────────────────────────────────────────────────────────

    def _change(self, record: SinkRecord, version: int) -> bytes:
        assert record.key is not None, "it has an id"
        said = {
            "_index": self._sink.index,
            "_id": record.key.decode(),
            "version": version,
            "version_type": "external_gte",
        }
        if record.value is None:
            return json.dumps({"delete": said}).encode() + b"\n"
        # JSON that is written in several lines has its line ends between tokens: none is in a string.
        text = record.value.replace(b"\n", b" ").replace(b"\r", b" ")
        return json.dumps({"index": said}).encode() + b"\n" + text + b"\n"

    def _send(
        self, changes: Sequence[tuple[SinkRecord, bytes]], refused: list[RefusedRecord]
    ) -> None:
        """Send changes; where a request is too large, one half after the other."""
        status, found = self._client.ask("POST", _TARGET, b"".join(text for _, text in changes))
        if status == _TOO_LARGE:
            if len(changes) == 1:
                record = changes[0][0]
                refused.append(
                    RefusedRecord(
                        record.partition, record.offset, "it is larger than the server takes"
                    )
                )
                return
            half = len(changes) // 2
            self._send(changes[:half], refused)
            self._send(changes[half:], refused)
            return
        items = found.get("items", [])
        if status != _FOUND or len(items) != len(changes):
            raise ConfigError(
                f"{self._client.shown} responded {status} to a bulk of {len(changes)} changes, and not as OpenSearch does. "
                "Correct the address."
            )
        self._judge([next(iter(item.values())) for item in items], changes, refused)

    def _judge(
        self,
        items: Sequence[Mapping[str, Any]],
        changes: Sequence[tuple[SinkRecord, bytes]],
        refused: list[RefusedRecord],
    ) -> None:
        """Find what was refused for good. What has to be tried again comes first: then all of the batch is."""
        waiting = [item for item in items if item["status"] == 429 or item["status"] >= 500]
        if waiting:
            raise RetriableError(
                f"{self._sink.origin} did not take {len(waiting):,} of {len(items):,} changes"
                f"{reason_of(waiting[0])}. They are tried again."
            )
        for item, (record, _) in zip(items, changes, strict=True):
            status = item["status"]
            if status < _REFUSED or (status == _NOT_FOUND and "error" not in item):
                continue
            reason = reason_of(item).removeprefix(": ")
            if status == _CONFLICT:
                raise FencedError(
                    f"{self._sink.origin} has a later version of the document {_shown(record)} than this batch's ({reason}). "
                    "Another sink writes there, or a later run of this one, or the log was set back. This one ends; give one "
                    "index to one sink, or begin anew under another name."
                )
            if status != _REFUSED:
                raise ConfigError(
                    f"{self._sink.origin} refuses changes: {status}, {reason}. Correct the index, or what the user may do."
                )
            refused.append(
                RefusedRecord(record.partition, record.offset, f"OpenSearch refuses it: {reason}")
            )

    # ── the index ───────────────────────────────────────────────────────────────────────────

    def _check_index(self) -> None:
        """Make the index if it is not there; refuse one in which versions or acknowledgements would mean nothing."""
        name = self._sink.index
        status, found = self._client.ask("GET", f"/{quote(name)}?flat_settings=true")
        if status == _NOT_FOUND:
            self._client.ask("PUT", f"/{quote(name)}")
            return
        if len(found) != 1 or next(iter(found)).startswith(".ds-"):
            raise ConfigError(
                f"{name!r} of {self._client.shown} is {len(found)} indexes, or a data stream, and a document has a version in one "
                "index alone. Give the name of an index, or of an alias of one."
            )
        said = next(iter(found.values()))
        if not isinstance(said, Mapping) or "settings" not in said:
            raise ConfigError(f"{self._client.shown} is no OpenSearch. Correct the address.")
        if said["settings"].get("index.translog.durability", "").lower() == "async":
            raise ConfigError(
                f"the index {name!r} of {self._client.shown} has index.translog.durability async, so it would lose what it has "
                "acknowledged. Set it to request."
            )

    def _begun(self, sink: str) -> int:
        """Return when this sink began, in seconds: it is noted by the first run."""
        note = quote(sink, safe="")
        now_s = int(self._sink.clock_s())
        body = json.dumps({"index": self._sink.index, "begun_s": now_s}).encode()
        status, _ = self._client.ask("PUT", f"/{NOTES}/_create/{note}", body)
        if status != _CONFLICT:
            return now_s
        _, found = self._client.ask("GET", f"/{NOTES}/_doc/{note}")
        begun_s = found.get("_source", {}).get("begun_s")
        if type(begun_s) is not int or not _EPOCH_S <= begun_s < _EPOCH_S + 2**31:
            raise ConfigError(
                f"the note of this sink in the index {NOTES!r} of {self._client.shown} has begun_s {begun_s!r}. Delete the note, "
                f"{sink!r}; the sink then replaces what is there."
            )
        return begun_s


def _why_no_id(key: bytes | None) -> str:
    """Return why a key cannot be the id of a document; "" if it can."""
    if not key:
        return "it has no key, and a document is named by the key"
    if len(key) > _ID_BYTES_MAX:
        return f"its key has {len(key):,} bytes, and an id has up to {_ID_BYTES_MAX}"
    try:
        key.decode()
    except UnicodeDecodeError:
        return "its key is no UTF-8, and an id is text"
    return ""


def _shown(record: SinkRecord) -> str:
    return repr((record.key or b"").decode())


def to_opensearch(
    url: str, *, index: str, batch: int = 5_000, timeout_s: float = 60.0
) -> OpenSearchSink:
    """Return a sink to an index of OpenSearch: a document for each key. A repeated or late batch changes nothing.

    A tombstone deletes its document. The index is made with the server's own mapping if it is not there: create it before, or a
    template, for another one. When documents can be searched is the index's refresh interval; nothing is forced.

    Args:
        url: ``opensearch://host:9200``, or ``opensearchs://user@host:9200`` for TLS. Leave a password to the variable
            MILLSTREAM_SINK_PASSWORD.
        index: Its name, or that of an alias of one index.
        batch: How many changes are in a request at most, 1 to 100,000.
        timeout_s: How long a response may take.

    Raises:
        ConfigError: the URL is not one of OpenSearch, or an option is not possible.
    """
    parts = server_address(url, SCHEMES)
    if parts is None or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(
            "the sink's URL is none of OpenSearch: give opensearch://host:9200, or opensearchs://user@host:9200 for TLS (? # / in "
            "a password as %3F %23 %2F)."
        )
    is_name = isinstance(index, str) and len(index.encode(errors="replace")) <= _NAME_BYTES_MAX
    if not is_name or not _NAME.fullmatch(index):
        raise ConfigError(
            f'index is {index!r}. Give up to 255 bytes without capital letters, spaces and \\ / * ? " < > | , # :, which do not '
            "begin with - _ + or a dot."
        )
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 100_000:
        raise ConfigError(f"batch is {batch!r}. Give 1 to 100,000 changes.")
    if not 0 < timeout_s <= 3600:
        raise ConfigError(f"timeout_s is {timeout_s!r}. Give seconds, up to 3,600.")
    return OpenSearchSink(url, index, timeout_s, batch)
