"""HttpPollSource: rows of an address that is asked again and again, by GET.

A *round* asks for the address and the pages that follow it. Which rows were taken before is in the position, which is
stored with the rows; see ``row_cursor.py``. So each row is taken once, as far as the server gives it:

======================================  ===================================================================
stopped                                 the next run
======================================  ===================================================================
before the log's commit                 asks for the same rows again
after it                                does not take them again, whatever the server gives
the server does not respond, or says    asks again later, not before ``Retry-After``
429 or 5xx
======================================  ===================================================================

Source: RFC 9110 (conditional requests, Retry-After), RFC 8288 (``Link``, relation ``next``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.connector import Guarantee, Position, SourceBatch
from millstream.connectors.json_page import JsonPage, PageRow
from millstream.connectors.record_fields import RecordFields
from millstream.connectors.row_cursor import RowCursor, RowSet, TakenRows
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

SPLIT = "rows"
_PAGE_BYTES_MAX = 64 << 20
_PAGES_MAX = 10_000
_RETRY_AFTER_S_MAX = 3600.0
_LATER = frozenset({408, 425, 429})
_NOT_MODIFIED = 304
_NEXT_LINK = re.compile(r'<([^>]*)>((?:\s*;\s*[^;,="]+(?:="[^"]*"|=[^;,"]*)?)*)')
_IS_NEXT = re.compile(
    r';\s*rel\s*=\s*(?:"(?:[^"]*\s)?next(?:\s[^"]*)?"|next\s*(?:;|$))', re.IGNORECASE
)


@dataclass(frozen=True)
class HttpPollSource:
    """A source connector, made by :func:`millstream.connectors.http_poll.http_poll`."""

    url: str = field(repr=False)  # its query may have a secret
    rows: str
    every_s: float
    fields: RecordFields
    cursor: str | None
    since: str | None
    start: str | None
    id: str | None
    next: str | None
    next_param: str | None
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float
    kind: str = "http-poll"
    guarantee: Guarantee = "each once"
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def origin(self) -> str:
        """The address, without its query, and where its rows are."""
        return (
            f"{self.url.partition('?')[0]}, {self.rows}"
            if self.rows
            else self.url.partition("?")[0]
        )

    def open(self, positions: Mapping[str, Position]) -> HttpPollReader:
        """Return what reads on; see :class:`~millstream.connectors.connector.SourceConnector`."""
        return HttpPollReader(self, positions)


class HttpPollReader:
    """Asks for rows; see :class:`~millstream.connectors.connector.SourceReader`."""

    alarm = ""

    def __init__(self, source: HttpPollSource, positions: Mapping[str, Position]) -> None:
        self._source = source
        url = urlsplit(source.url)
        assert url.hostname is not None, "http_poll has looked"
        self._origin = Origin(url.scheme, url.hostname, url.port or DEFAULT_PORTS[url.scheme])
        self._target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        self._shown = f"{self._origin.shown}{url.path}"
        self._stored = positions.get(SPLIT)
        self._taken: TakenRows = (
            RowSet.of(source.id, self._stored)
            if source.cursor is None
            else RowCursor.of(source.cursor, source.id, self._stored)
        )
        self._rows = BatchRows(source.fields)
        self._due_s = source.monotonic_s()
        self._next: str | None = None  # the page that follows in this round
        self._seen: set[str] = set()  # pages of this round
        self._unchanged: dict[str, str] = {}  # what makes the server say that nothing has changed
        self._asked = ""  # ... of this target
        self._brought = 0  # rows of this round

    @property
    def _may_be_cut(self) -> bool:
        """Whether a server that is asked for what follows a row, and names no pages, may have more than the last round brought."""
        source = self._source
        return source.since is not None and source.next is None and self._brought > 0

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return new rows of a page, or of a round; see the protocol."""
        if self._next is None:
            left_s = self._due_s - self._source.monotonic_s()
            if left_s > 0:
                self._source.sleep(min(left_s, wait_s))
            if left_s > wait_s:
                # After rows, an answer by cursor may have left some out: only one without new rows says that none is left.
                return SourceBatch() if self._may_be_cut else None
            self._begin()
        assert self._next is not None, "a round has begun"
        target, self._next = self._next, None
        try:
            answer = self._ask(target)
            self._next = None if answer is None else self._take(target, answer)
        finally:
            self._due_s = self._source.monotonic_s() + self._source.every_s
        return self._batch()

    def stored(self, batch: SourceBatch) -> None:
        """See the protocol: the server is told nothing."""

    def close(self) -> None:
        """Do nothing: connections are kept for the next reader."""

    def _begin(self) -> None:
        self._seen.clear()
        self._brought = 0
        self._taken.begin()
        self._next = self._first_target()

    def _first_target(self) -> str:
        source = self._source
        value = self._taken.value if isinstance(self._taken, RowCursor) else None
        value = source.start if value is None else value
        if source.since is None or value is None:
            return self._target
        return _with_param(self._target, source.since, str(value))

    def _batch(self) -> SourceBatch | None:
        """Return what there is to store: of a round of all rows only when it is over."""
        is_over = self._next is None
        if not is_over and isinstance(self._taken, RowSet):
            return SourceBatch()
        position = self._taken.position()
        if position == self._stored and not self._rows.count:
            return None if is_over else SourceBatch()
        self._stored = position
        return self._rows.take({SPLIT: position})

    def _take(self, target: str, answer: HttpAnswer) -> str | None:
        """Take the rows of a page, and return the page that follows."""
        number = len(self._seen)
        page = JsonPage(answer.body, f"GET {self._shown}")
        for place, row in enumerate(page.rows(self._source.rows), 1):
            self._take_row(row, f"{self._shown}, page {number}, row {place}")
        following = self._following(target, answer, page)
        if following is None:
            self._taken.end()
            self._note_unchanged(target, answer)
        return following

    def _take_row(self, row: PageRow, where: str) -> None:
        try:
            if self._taken.take(row):
                self._rows.add(row.text.encode(), _event(row))
                self._brought += 1
        except ConfigError:  # which is a ValueError, too
            raise
        except ValueError as error:
            text = row.text.encode("utf-8", "backslashreplace")
            self._rows.add_dead(text, where, str(error))

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def _ask(self, target: str) -> HttpAnswer | None:
        """Return a page; None if it has not changed since it was asked for last."""
        if target in self._seen or len(self._seen) >= _PAGES_MAX:
            raise ConfigError(
                f"the pages of {self._shown} have no end: one leads to itself, or there are {_PAGES_MAX:,}. Correct next=, or "
                "the address."
            )
        self._seen.add(target)
        headers = {"Accept": "application/json", **self._source.headers}
        if target == self._asked:
            headers |= self._unchanged
        request = HttpRequest("GET", self._origin, target, headers, None, self._shown)
        try:
            answer = exchange(request, self._source.timeout_s, _PAGE_BYTES_MAX)
        except LookupCallError as error:
            if error.retriable:
                raise RetriableError(f"{error}. It is tried again.") from None
            raise ConfigError(f"{error}.") from None
        if 200 <= answer.status < 300:
            return answer
        if answer.status == _NOT_MODIFIED and target == self._asked:
            return None
        raise self._refused(answer)

    def _refused(self, answer: HttpAnswer) -> RetriableError | ConfigError:
        where = f"GET {self._shown} responded {answer.status}"
        if answer.status not in _LATER and answer.status < 500:
            return ConfigError(
                f"{where}. Correct the address, its query, or the header Authorization ($MILLSTREAM_SOURCE_AUTHORIZATION)."
            )
        error = RetriableError(f"{where}. It is tried again.")
        asked_s = retry_after_s(answer.headers.get("retry-after"), time.time())
        error.retry_after_s = min(asked_s, _RETRY_AFTER_S_MAX)
        return error

    def _note_unchanged(self, target: str, answer: HttpAnswer) -> None:
        """Keep what tells the server which answer is known; of several pages one may change without the first."""
        self._asked, self._unchanged = "", {}
        if len(self._seen) > 1:
            return
        if etag := answer.headers.get("etag"):
            self._unchanged["If-None-Match"] = etag
        elif modified := answer.headers.get("last-modified"):
            self._unchanged["If-Modified-Since"] = modified
        self._asked = target if self._unchanged else ""

    def _following(self, target: str, answer: HttpAnswer, page: JsonPage) -> str | None:
        """Return the target of the page that follows, as the body or the header ``Link`` says."""
        source = self._source
        if source.next is None:
            found: Any = _next_link(answer.headers.get("link", ""))
        else:
            found = page.at(source.next)
        if found is None or found is False or found == "":
            return None
        if isinstance(found, bool) or not isinstance(found, str | int):
            raise ConfigError(
                f"GET {self._shown} says that the next page is {found!r:.80}. Give next= the names that lead to its address, or, "
                "with next_param=, to a text or number."
            )
        if source.next is not None and source.next_param is not None:
            return _with_param(target, source.next_param, str(found))
        return self._target_of(urljoin(f"{self._origin.shown}{target}", str(found)))

    def _target_of(self, url: str) -> str:
        try:
            parts = urlsplit(url)
            there = Origin(
                parts.scheme, parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
            )
        except ValueError:
            there, parts = Origin("", "", 0), urlsplit("")
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        if there != self._origin or not target.isascii() or any(c <= " " for c in target):
            raise ConfigError(
                f"GET {self._shown} leads to a page on another server, {there.shown!a:.100}, which does not get the headers. Give "
                "the address of that server, if it is the right one."
            )
        return target


def _event(row: PageRow) -> dict[str, Any]:
    """Return what a row is.

    Raises:
        ValueError: it is no object.
    """
    if row.flaw or not isinstance(row.event, dict):
        raise ValueError(row.flaw or f"it is no JSON object, but {row.event!r:.100}")
    return row.event


def _next_link(header: str) -> str | None:
    for found in _NEXT_LINK.finditer(header):
        if _IS_NEXT.search(found[2]):
            return found[1]
    return None


def _with_param(target: str, name: str, value: str) -> str:
    """Return a target with a parameter, instead of the one of that name."""
    path, _, query = target.partition("?")
    kept = [part for part in query.split("&") if part and part.partition("=")[0] != quote(name)]
    given = f"{quote(name)}={quote(value, safe='')}"
    return f"{path}?{'&'.join([*kept, given])}"
