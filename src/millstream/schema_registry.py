"""A schema registry of Confluent's kind, asked for the schemas that values name by number.

A number names one schema for ever, so an answer is kept as long as the process lives, and the registry is asked once for
each number. One that does not respond is asked again, as there is no other way to read the value; what a value names and
the registry does not know is a fault of the value.

==================================  ======================================================================
response                            what follows
==================================  ======================================================================
200                                 the schema is kept
404 with the registry's own code    it is asked once more, a second later: one of several registries may
                                    lag behind the one that gave the number. Then the number is unknown,
                                    and is not asked for again for half a minute
408, 429, 5xx, none                 it is asked again for a minute, with one line in the log
any other                           the address, or who asks, is wrong: the job stops
==================================  ======================================================================

Source: Confluent, "Schema Registry API Reference": GET /schemas/ids/{id}, GET /subjects/{subject}/versions/{version},
``format=serialized`` of Protobuf; error codes 40401 to 40403.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from millstream.access.secret_values import resolved_url
from millstream.access.server_address import server_address
from millstream.errors import ConfigError, RetriableError

_NUMBERS = 1 << 31  # the registry's numbers are signed, of 32 bits
_ASKED_S = 60.0
_FIRST_WAIT_S, _WAIT_S_MAX = 0.5, 8.0
_LAG_S = 1.0
_LAGGING_MAX = 100  # more unknown numbers at once are bytes of something else
_UNKNOWN_S = 30.0
_UNKNOWN_MAX = 10_000
_ANSWER_S = 10.0
_ANSWER_BYTES_MAX = 16 << 20
_CHUNK = 64 << 10
_REFERENCES_MAX = 500  # each may be within the one before, and is then a call within it
_NOT_THERE = frozenset({40401, 40402, 40403})
_LATER = frozenset({408, 429})
_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReferencedSchema:
    """A schema that another one refers to by a name: of Avro that of a type, of Protobuf that of a file."""

    name: str
    text: str


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema of a registry.

    Attributes:
        kind: ``AVRO``, ``PROTOBUF``, ``JSON``, or what else a registry may have.
        text: The schema; of Protobuf a ``FileDescriptorProto`` in base64.
        references: All that it needs, each after those that it needs itself.
    """

    number: int
    kind: str
    text: str
    references: tuple[ReferencedSchema, ...] = ()


def check_registry(url: str, *, what: str) -> None:
    """Refuse an address that cannot be that of a registry; secrets that it names are not read.

    Raises:
        ConfigError: it is none. The message has no password.
    """
    parts = server_address(url, ("http", "https"))
    if parts is None or parts.query or parts.fragment:
        raise ConfigError(
            f"{what} has a schema registry whose address is none. Give http:// or https:// and a host, such as "
            "registry='https://reader:${env:REGISTRY_PASSWORD}@registry.example:8081'."
        )


@cache
def registry_at(url: str) -> SchemaRegistry:
    """Return the registry at an address, with what this process has asked it so far."""
    return SchemaRegistry(url)


class SchemaRegistry:
    """Asks a registry, and keeps what it said. May be used by several threads: one asks at a time."""

    def __init__(
        self,
        url: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(resolved_url(url, "The schema registry's address"))
        assert parts.hostname is not None, "check_registry has looked"
        self._host, self._port = parts.hostname, parts.port
        self._is_https = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        port = "" if parts.port is None else f":{parts.port}"
        self.shown = f"{parts.scheme}://{parts.hostname}{port}{self._path}"
        self._headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
        self._sleep, self._monotonic_s = sleep, monotonic_s
        self._lock = threading.Lock()
        self._known: dict[int, RegisteredSchema | str] = {}
        self._unknown: dict[int, float] = {}  # until when they are not asked for again

    def schemas(self, numbers: Iterable[int]) -> dict[int, RegisteredSchema | str]:
        """Return the schema of each number; text is the reason why there is none that could be used.

        Raises:
            RetriableError: the registry has not responded for a minute.
            ConfigError: the address is not that of a registry, or it refuses who asks.
        """
        with self._lock:
            wanted = set(numbers)
            self._ask([number for number in sorted(wanted) if not self._is_answered(number)])
            return {
                number: self._known.get(
                    number, f"the value is of the schema {number}, which the registry does not know"
                )
                for number in wanted
            }

    def _is_answered(self, number: int) -> bool:
        if number in self._known or number >= _NUMBERS:
            return True
        return self._unknown.get(number, -1.0) > self._monotonic_s()

    def _ask(self, numbers: list[int]) -> None:
        left = [number for number in numbers if not self._ask_one(number)]
        if left and len(left) <= _LAGGING_MAX:
            self._sleep(_LAG_S)
            left = [number for number in left if not self._ask_one(number)]
        if len(self._unknown) + len(left) > _UNKNOWN_MAX:
            self._unknown.clear()
        self._unknown.update(dict.fromkeys(left, self._monotonic_s() + _UNKNOWN_S))

    def _ask_one(self, number: int) -> bool:
        """Ask for a schema; return whether the registry knows it."""
        try:
            found = self._patiently(lambda: self._schema(number))
        except (KeyError, TypeError, AttributeError):  # its parts are not where they are said to be
            raise self._no_registry(f"describes the schema {number} in another form") from None
        if found is not None:
            self._known[number] = found
        return found is not None

    def _patiently(self, ask: Callable[[], _Found]) -> _Found:
        """Ask until the registry responds, for a minute."""
        due_s, wait_s = self._monotonic_s() + _ASKED_S, _FIRST_WAIT_S
        while True:
            try:
                return ask()
            except RetriableError as error:
                if self._monotonic_s() + wait_s > due_s:
                    raise RetriableError(
                        f"{error} It was asked for {_ASKED_S:g} seconds; nothing of this batch is committed. Run again when "
                        "it responds."
                    ) from None
                if wait_s == _FIRST_WAIT_S:
                    _log.warning("%s It is asked again for %g seconds.", error, _ASKED_S)
            self._sleep(wait_s)
            wait_s = min(2 * wait_s, _WAIT_S_MAX)

    # ── schemas ─────────────────────────────────────────────────────────────────────────────

    def _schema(self, number: int) -> RegisteredSchema | str | None:
        found = self._get(f"/schemas/ids/{number}")
        if found is None:
            return None
        kind = str(found.get("schemaType") or "AVRO")
        needed: dict[str, ReferencedSchema] = {}
        lacks = self._add_references(found, kind, needed, set())
        if lacks:
            return f"the schema {number} needs {lacks}, which the registry does not have"
        text = self._serialized(number, found) if kind == "PROTOBUF" else found.get("schema")
        return RegisteredSchema(number, kind, self._checked(text, kind), tuple(needed.values()))

    def _serialized(self, number: int, found: Mapping[str, Any]) -> Any:
        """Return a Protobuf schema in its binary form.

        Karapace gives that of a schema with references by its subject and version only.
        """
        if found.get("references"):
            uses = self._get(f"/schemas/ids/{number}/versions")
            for use in uses if isinstance(uses, list) else []:
                version = self._version(use["subject"], use["version"], "PROTOBUF")
                if version is not None and version.get("id") == number:
                    return version.get("schema")
        again = self._get(f"/schemas/ids/{number}?format=serialized") or {}
        return again.get("schema")

    def _add_references(
        self,
        schema: Mapping[str, Any],
        kind: str,
        needed: dict[str, ReferencedSchema],
        names: set[str],
    ) -> str:
        """Add what a schema refers to, each after what it needs itself; return what is not there, or nothing.

        ``names`` are those that were asked for so far, so that references in a circle end: such a schema cannot be read.
        """
        for reference in schema.get("references") or ():
            name, subject = str(reference["name"]), str(reference["subject"])
            if name in names:
                continue
            names.add(name)
            shown = f"{subject!r}, version {reference['version']}"
            found = self._version(subject, reference["version"], kind)
            if found is None or len(names) > _REFERENCES_MAX:
                return shown
            lacks = self._add_references(found, kind, needed, names)
            if lacks:
                return lacks
            needed[name] = ReferencedSchema(name, self._checked(found.get("schema"), kind))
        return ""

    def _version(self, subject: str, version: object, kind: str) -> Any:
        """Return a version of a subject, also one that was deleted softly; None: there is none."""
        path = f"/subjects/{quote(subject, safe='')}/versions/{quote(str(version), safe='')}?"
        form = "format=serialized" if kind == "PROTOBUF" else ""
        return self._get(f"{path}{form}") or self._get(f"{path}deleted=true&{form}")

    def _checked(self, text: object, kind: str) -> str:
        """Return the text of a schema, if it can be one."""
        if not isinstance(text, str):
            raise self._no_registry("gave a schema without its text")
        if kind == "PROTOBUF":
            try:
                base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise ConfigError(
                    f"The schema registry at {self.shown} gives Protobuf schemas as text only. One is needed that knows "
                    "format=serialized, as Confluent's, Karapace and Redpanda 25.2 do."
                ) from None
        return text

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def _get(self, target: str) -> Any:
        """Return what the registry says; None if it says that there is no such thing."""
        status, body = self._exchange(target)
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = None
        if status == 200 and isinstance(said, dict | list):
            return said
        if status == 404 and isinstance(said, dict) and said.get("error_code") in _NOT_THERE:
            return None
        if status in _LATER or status >= 500:
            raise RetriableError(f"The schema registry at {self.shown} responds {status}.")
        if status in (401, 403):
            raise ConfigError(
                f"The schema registry at {self.shown} responds {status}: it refuses who asks. Give user and password in its "
                "address, the password as ${env:NAME}."
            )
        raise self._no_registry(f"responds {status} to GET {target.partition('?')[0]}")

    def _no_registry(self, what: str) -> ConfigError:
        return ConfigError(
            f"What is at {self.shown} {what}, as no schema registry does. Correct the address."
        )

    def _exchange(self, target: str) -> tuple[int, bytes]:
        due_s = time.monotonic() + _ANSWER_S
        connection = (
            HTTPSConnection(self._host, self._port, timeout=_ANSWER_S, context=_tls())
            if self._is_https
            else HTTPConnection(self._host, self._port, timeout=_ANSWER_S)
        )
        try:
            connection.request("GET", self._path + target, headers=self._headers)
            response = connection.getresponse()
            return response.status, self._body(response, due_s)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"The schema registry at {self.shown} has a certificate that is not trusted: {error.verify_message}. Correct "
                "it, or have it trusted here (SSL_CERT_FILE)."
            ) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise RetriableError(
                f"The schema registry at {self.shown} does not respond ({reason})."
            ) from None
        finally:
            connection.close()

    def _body(self, response: HTTPResponse, due_s: float) -> bytes:
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > _ANSWER_BYTES_MAX:
                raise self._no_registry(f"sends more than {_ANSWER_BYTES_MAX >> 20} MiB")
            if time.monotonic() > due_s:
                raise TimeoutError
        if response.length:  # it said how much, and sent less
            raise ConnectionError
        return bytes(body)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
