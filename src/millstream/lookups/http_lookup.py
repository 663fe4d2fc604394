"""A lookup by HTTP: one GET for each key, or one POST for many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, get_args

import polars as pl

from millstream.access.secret_values import resolved
from millstream.choices import choose, did_you_mean
from millstream.errors import ConfigError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Field
from millstream.kernels.decode.row_reader import parse_json
from millstream.kernels.enrichment.answers import ColumnSchema
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.kernels.operator import NOT_DEFINING
from millstream.lookups.http_client import HttpAnswer, HttpRequest, exchange, status_error
from millstream.lookups.url_template import UrlTemplate, parse_template
from millstream.lookups.values import at_path, column, field_of, member

HttpMethod = Literal["GET", "POST"]
Headers = Mapping[str, str] | Callable[[], Mapping[str, str]]

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # a token, RFC 9110
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_KEY_TYPES = (pl.String, pl.Boolean, pl.Date, pl.Datetime, pl.Decimal)
_MADE = {"accept": "application/json", "user-agent": "millstream"}
_BYTES_MAX = 8 << 20
_STATUS_MIN, _STATUS_MAX = 400, 499
_NO_CONTENT = 204


@dataclass(frozen=True)
class HttpLookup:
    """What :func:`http_lookup` declares. Headers and secrets are in no text of it."""

    url: str
    method: HttpMethod
    answer: str
    fields: tuple[tuple[str, str], ...]
    unknown: tuple[int, ...]
    bytes_max: int = field(metadata=NOT_DEFINING)
    headers: Headers = field(repr=False, metadata=NOT_DEFINING)
    secrets: Mapping[str, str] = field(repr=False, metadata=NOT_DEFINING)

    @property
    def keys_per_call_max(self) -> int | None:
        """How many keys one call can ask; None: any number."""
        return 1 if self.method == "GET" else None

    def bound(self, key: ColumnSchema, answer: ColumnSchema, timeout_s: float) -> BoundHttpLookup:
        """Return the function that looks up keys of these columns.

        Raises:
            ConfigError: template or fields do not fit the columns.
        """
        places, columns = parse_template(self.url, "http_lookup").names, [name for name, _ in key]
        known = {*columns, *self.secrets}
        for name in self.secrets:
            if name in columns:
                raise ConfigError(
                    f"http_lookup has a secret {name!r}, and enrich a key of that name. Rename the secret."
                )
        for place in places:
            if place not in known:
                raise ConfigError(
                    f"http_lookup's address has a place {{{place}}}. Allowed are the columns of the key, "
                    f"{', '.join(columns)}, and names of secrets.{did_you_mean(place, known)}"
                )
        if self.method == "POST" and set(places) & set(columns):
            raise ConfigError(
                "http_lookup's address has a column of the key in it, and a POST asks many keys at once. "
                'Leave it out, or say method="GET".'
            )
        if self.method == "GET" and (missing := [name for name in columns if name not in places]):
            raise ConfigError(
                f"http_lookup's address does not have {{{missing[0]}}}: keys that differ in it would get one "
                'answer. Put it into the address, or say method="POST".'
            )
        self._check_columns(key, answer)
        return BoundHttpLookup(self, key, answer, timeout_s)

    def _check_columns(self, key: ColumnSchema, answer: ColumnSchema) -> None:
        for name, dtype in key:
            fine = isinstance(dtype, pl.Datetime) and dtype.time_unit == "ns"
            if fine or not (isinstance(dtype, _KEY_TYPES) or dtype.is_integer()):
                raise ConfigError(
                    f"http_lookup cannot write the key {name!r}, a {dtype}, into a request. Cast it to "
                    "pl.String before the step."
                )
        added = dict(answer)
        for name, _ in self.fields:
            if name not in added:
                raise ConfigError(
                    f"http_lookup's fields name {name!r}. The columns that enrich's schema adds are "
                    f"{', '.join(added)}.{did_you_mean(name, added)}"
                )
        for name, dtype in (*key, *answer):
            field_of(name, dtype, "http_lookup")


@dataclass(frozen=True)
class BoundHttpLookup:
    """An :class:`HttpLookup` with the columns that it reads and makes: a function of a frame of keys."""

    lookup: HttpLookup
    key: ColumnSchema
    answer: ColumnSchema
    timeout_s: float = field(metadata=NOT_DEFINING)

    def __call__(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Ask for keys; return a row for each that the service knows.

        Raises:
            LookupCallError: there was no response, or no answer in it.
        """
        keyed = keys.to_dicts()
        if not keyed:
            return self._frame([])
        request = self._request(keyed)
        answered = exchange(request, self.timeout_s, self.lookup.bytes_max)
        try:
            return self._frame(self._answers(request, answered, keyed))
        except DecodeError as error:
            raise LookupCallError(
                f"{request.method} {request.shown} gave an answer that cannot be read: {error.reason()}"
            ) from None

    # ── the request ─────────────────────────────────────────────────────────────────────────

    @cached_property
    def _template(self) -> UrlTemplate:
        return parse_template(self.lookup.url, "http_lookup")

    def _request(self, keyed: Sequence[Mapping[str, Any]]) -> HttpRequest:
        lookup, template = self.lookup, self._template
        values = dict(lookup.secrets)
        body = None
        if lookup.method == "GET":
            values |= {name: _text(value) for name, value in keyed[0].items()}
        else:
            body = json.dumps(
                [{name: _json_value(value) for name, value in key.items()} for key in keyed],
                ensure_ascii=False,
            ).encode()
        headers = self._headers(has_body=body is not None)
        target = template.target(values)
        return HttpRequest(lookup.method, template.origin, target, headers, body, lookup.url)

    def _headers(self, *, has_body: bool) -> dict[str, str]:
        given = self.lookup.headers
        if callable(given):
            try:
                given = checked_headers(given())
            except ConfigError as error:
                raise LookupCallError(str(error), retriable=False) from None
            except Exception as error:  # noqa: BLE001 - its text may have the secret
                raise LookupCallError(
                    f"http_lookup's function of headers failed: {type(error).__name__}"
                ) from None
        made = {**_MADE, **({"content-type": "application/json"} if has_body else {})}
        return made | {name.lower(): value for name, value in given.items()}

    # ── the response ────────────────────────────────────────────────────────────────────────

    def _answers(
        self, request: HttpRequest, answered: HttpAnswer, keyed: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return a row for each key with an answer."""
        if request.method == "GET" and answered.status in (_NO_CONTENT, *self.lookup.unknown):
            return []
        if not 200 <= answered.status < 300:
            raise status_error(request, answered)
        found = at_path(parse_json(answered.body), _steps(self.lookup.answer))
        if request.method == "GET":
            return [] if found is None else [{**keyed[0], **self._values(found)}]
        if not isinstance(found, list):
            raise DecodeError("it has no list of answers, one object for each key")
        return self._by_key(found, keyed)

    def _by_key(
        self, found: Sequence[Any], keyed: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        # As text: of two times in the hour that clocks repeat, Python says that they are equal.
        asked = {tuple(map(_text, key.values())) for key in keyed}
        rows: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for each in found:
            own = {name: member(column_field, each) for name, column_field in self._key_fields}
            key = tuple(
                None if own[name] is None else _text(column(name, dtype, [own[name]])[0])
                for name, dtype in self.key
            )
            if key not in asked:
                raise DecodeError("it has an answer for a key that it was not asked for")
            if key in rows:
                raise DecodeError("it has two answers for one key")
            rows[key] = {**own, **self._values(each)}
        return list(rows.values())

    def _values(self, found: Any) -> dict[str, Any]:
        if not isinstance(found, Mapping):
            raise DecodeError("it is not an object with the answer's columns")
        values = {}
        for name, path, column_field in self._answer_fields:
            parent = at_path(found, path)
            values[name] = None if parent is None else member(column_field, parent)
        return values

    @cached_property
    def _key_fields(self) -> list[tuple[str, Field]]:
        return [(name, field_of(name, dtype, "http_lookup")) for name, dtype in self.key]

    @cached_property
    def _answer_fields(self) -> list[tuple[str, tuple[str, ...], Field]]:
        """Each column with the path to its object, and its field there."""
        fields, paths = [], dict(self.lookup.fields)
        for name, dtype in self.answer:
            *path, last = _steps(paths[name]) if name in paths else (name,)
            fields.append((name, tuple(path), field_of(name, dtype, "http_lookup", last)))
        return fields

    def _frame(self, rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
        return pl.DataFrame(
            [
                column(name, dtype, [row[name] for row in rows])
                for name, dtype in (*self.key, *self.answer)
            ]
        )


def _steps(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _text(value: Any) -> str:
    """Write a key's value into an address."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value, "f")  # and not 1E-7
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _json_value(value: Any) -> Any:
    return value if isinstance(value, (bool, int, str)) else _text(value)


def checked_headers(headers: object) -> dict[str, str]:
    """Return headers once they are checked; no message has a value.

    Raises:
        ConfigError: one of them is no header, or ours to make.
    """
    if not isinstance(headers, Mapping):
        raise ConfigError(
            f"http_lookup's headers are of type {type(headers).__name__}. Give a mapping of names to "
            "values, or a function that gives one."
        )
    sent = {
        name: resolved(value, "a header of http_lookup") if isinstance(value, str) else value
        for name, value in headers.items()
    }
    for name, value in sent.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _OURS:
            raise ConfigError(
                "http_lookup has a header whose name is not allowed in a request. Give names such as "
                "Authorization; Host, Connection and lengths follow from the request."
            )
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ConfigError(
                f"http_lookup's header {name!r} has a value that is no text, or has a line break or a "
                "character outside Latin-1 in it. Read it without its line end: text.strip()."
            )
    return sent


def http_lookup(
    url: str,
    *,
    method: HttpMethod = "GET",
    headers: Headers | None = None,
    secrets: Mapping[str, str] | None = None,
    answer: str = "",
    fields: Mapping[str, str] | None = None,
    unknown: Sequence[int] = (404,),
    response_bytes_max: int = _BYTES_MAX,
) -> HttpLookup:
    """Declare a lookup by HTTP, for :meth:`Stream.enrich`.

    ::

        users = ms.http_lookup(
            "https://api.example.org/users/{user}",
            headers={"Authorization": "Bearer ${env:API_TOKEN}"},
            fields={"country": "address.country"},
        )
        clicks.enrich(users, on="user", schema={"country": pl.String}, timeout="2 seconds")

    With ``"GET"`` each key is a request, as many at a time as ``enrich`` has ``concurrency``. With ``"POST"`` the
    body is a JSON list of the keys of a call, each an object such as ``{"user": "u1"}``, and the response a list
    of objects with the columns of the key, as they were asked, and those of the answer; a key without an
    object has no answer. ``timeout``, ``retries``, ``batch_rows`` and ``on_error`` are those of ``enrich``.

    Args:
        url: The address. ``{user}`` is the value of the key's column ``user``, escaped, so it cannot change
            what else the address says. A place may be in path and query, not in the host.
        method: ``"GET"`` or ``"POST"``.
        headers: Headers of each request, or a function that gives them where the job runs, called for
            each request: for tokens that expire, or that must not travel with the program.
        secrets: Values of places in the address that are no columns: ``?key={token}``.
        answer: Where the answer is in the response: ``"data"``, ``"data.users"``. By default it is the response.
        fields: Where a column is in the answer, if not under its name: ``{"country": "address.country"}``.
        unknown: Statuses of a GET, of 400 to 499, that say that there is nothing for the key: it gets nulls.
        response_bytes_max: The largest body that is read.

    Values are read as those of a topic with the same types (docs/types.md); what is missing is null. A call
    has failed, and is repeated, if there is no response in time, the connection breaks, the status is 408,
    425, 429 or 5xx (not before ``Retry-After``, of up to a minute), or the body does not fit. It has failed for
    good if the status is another one, the body is too large, or the key would be another address
    (``..``). Redirects are followed on the same server only; proxies are not used.

    Guarantees: headers and secrets are in no definition, error, dead letter or state. They may change
        without changing the step.

    Raises:
        ConfigError: an argument is not allowed. Whether the address and the fields fit the columns, ``enrich``
            checks.
    """
    choose("http_lookup's method", method, get_args(HttpMethod))
    for name, value in (secrets or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not value:
            raise ConfigError(
                "http_lookup's secrets have a name or value that is no text, or empty. Give texts: "
                'secrets={"token": "${env:API_TOKEN}"}.'
            )
    for status in unknown:
        if (
            isinstance(status, bool)
            or not isinstance(status, int)
            or not (_STATUS_MIN <= status <= _STATUS_MAX)
        ):
            raise ConfigError(
                f"http_lookup's unknown has {status!r}. Give statuses from 400 to 499, such as 404."
            )
    if (
        isinstance(response_bytes_max, bool)
        or not isinstance(response_bytes_max, int)
        or response_bytes_max < 1
    ):
        raise ConfigError(
            f"http_lookup's response_bytes_max is {response_bytes_max!r}. Give a number of bytes, such as "
            f"{_BYTES_MAX}."
        )
    for name, path in (("", answer), *(fields or {}).items()) if answer else (fields or {}).items():
        if not isinstance(path, str) or not all(path.split(".")):
            where = f"field {name!r}" if name else "answer"
            raise ConfigError(
                f"http_lookup's {where} is at {path!r}. Give names with dots between them: 'data.users'."
            )
    parse_template(url, "http_lookup")
    return HttpLookup(
        url,
        method,
        answer,
        tuple(sorted((fields or {}).items())),
        tuple(sorted(set(unknown))),
        response_bytes_max,
        headers if callable(headers) else checked_headers(headers or {}),
        {name: resolved(text, "a secret of http_lookup") for name, text in (secrets or {}).items()},
    )
