"""The fields of messages, as tables of text, and codecs made from them.

One line is one field, indented under the array that it is an element of::

    name        type      versions        further

    acks        int16
    isolation   int8      4+
    max_bytes   int32     3+              = 2147483647
    topics      []        0+ null 1+
      name      string

A type is one of ``wire``, ``[]type`` for an array of it, ``[]`` for an array of structs whose
fields follow, or ``{}`` for one such struct. Versions are ``4+``, ``0-7``, ``1`` or nothing (all). ``null 1+``: from
this version on it may be null. ``tag 0``: it is a tagged field. ``= -1``: its default.
Names are Kafka's, in lower case.

Source: Kafka's message definitions (``clients/src/main/resources/common/message``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from millstream.broker.protocol.wire import (
    FIXED_CODECS,
    ZERO_VALUES,
    ByteReader,
    BytesLike,
    Codec,
    Message,
    StructField,
    Value,
    array,
    optional,
    sized,
    structure,
)

_LINE = re.compile(
    r"(?P<indent> *)(?P<name>\w+) +(?P<type>\{\}|(?:\[\])?\w*)(?: +(?P<versions>\d+(?:\+|-\d+)?))?"
    r"(?: +null (?P<null>\d+)\+)?(?: +tag (?P<tag>\d+))?(?: += (?P<default>\S+))?"
)
_VERSION_MAX = 1 << 15


@dataclass(frozen=True)
class FieldSpec:
    """One field in all versions: it exists in ``[first, last]``, and may be null from ``null`` on."""

    name: str
    kind: str
    first: int
    last: int
    null: int
    tag: int | None
    default: Value
    fields: list[FieldSpec] = field(default_factory=list)

    def struct_field(self, version: int, *, flexible: bool) -> StructField:
        """Return the field as it is in one version."""
        if not self.first <= version <= self.last:
            return StructField(self.name, None, self.default)
        nullable = version >= self.null
        if self.kind == "[]":
            one = structure_of(self.fields, version, flexible=flexible)
            codec = array(one, flexible=flexible, nullable=nullable)
        elif self.kind == "{}":
            one = structure_of(self.fields, version, flexible=flexible)
            codec = optional(one) if nullable else one
        elif self.kind.startswith("[]"):
            one = _scalar(self.kind[2:], flexible=flexible, nullable=False)
            codec = array(one, flexible=flexible, nullable=nullable)
        else:
            codec = _scalar(self.kind, flexible=flexible, nullable=nullable)
        return StructField(self.name, codec, self.default, self.tag)


def structure_of(fields: list[FieldSpec], version: int, *, flexible: bool) -> Codec:
    """Return the codec of a struct with these fields, in one version."""
    members = [one.struct_field(version, flexible=flexible) for one in fields]
    return structure(members, flexible=flexible)


def _scalar(kind: str, *, flexible: bool, nullable: bool) -> Codec:
    if kind in FIXED_CODECS:
        return FIXED_CODECS[kind]
    return sized(kind, flexible=flexible, nullable=nullable)


def parse(table: str) -> list[FieldSpec]:
    """Return the fields of a table."""
    top: list[FieldSpec] = []
    levels: list[tuple[int, list[FieldSpec]]] = [(-1, top)]
    for line in table.splitlines():
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.rstrip())
        assert found is not None, f"not a line of a table: {line!r}"
        indent = len(found["indent"])
        while levels[-1][0] >= indent:
            levels.pop()
        made = _field(found)
        levels[-1][1].append(made)
        levels.append((indent, made.fields))
    return top


def _field(found: re.Match[str]) -> FieldSpec:
    first, last = 0, _VERSION_MAX
    if found["versions"]:
        low, _, high = found["versions"].partition("-")
        first = int(low.rstrip("+"))
        last = int(high) if high else _VERSION_MAX if low.endswith("+") else first
    kind = found["type"]
    default: Value = (
        [] if kind.startswith("[]") else {} if kind == "{}" else ZERO_VALUES[kind]
    )  # unchanged
    if found["default"] is not None:
        default = {"null": None, "true": True}.get(found["default"], found["default"])
        default = int(default) if isinstance(default, str) else default
    null = _VERSION_MAX if found["null"] is None else int(found["null"])
    tag = None if found["tag"] is None else int(found["tag"])
    return FieldSpec(found["name"], kind, first, last, null, tag, default)


class Api:
    """One kind of request and its response.

    Args:
        versions: The first and the last supported version.
        flexible: From which version on the messages are flexible.
    """

    def __init__(
        self,
        key: int,
        name: str,
        versions: tuple[int, int],
        *,
        flexible: int = _VERSION_MAX,
        request: str,
        response: str,
    ) -> None:
        self.key = key
        self.name = name
        self.versions = versions
        self.flexible_from = flexible
        self.request = parse(request)
        self.response = parse(response)

    def __repr__(self) -> str:
        return f"<{self.name} {self.versions[0]}-{self.versions[1]}>"

    def flexible(self, version: int) -> bool:
        """Return whether messages of this version are flexible."""
        return version >= self.flexible_from

    def supports(self, version: int) -> bool:
        """Return whether requests of this version are supported."""
        return self.versions[0] <= version <= self.versions[1]

    def decode_request(self, source: ByteReader, version: int) -> Message:
        """Read a request.

        Raises:
            MalformedError: the bytes are no such request.
        Bytes after it are skipped, as in Kafka: librdkafka sends three after a Metadata request for all
        topics.
        """
        request: Message = _codec(self, "request", version).read(source)
        return request

    def encode_response(self, response: Message, version: int, out: list[BytesLike]) -> None:
        """Append the bytes of a response to ``out``."""
        _codec(self, "response", version).write(response, out)

    def encode_request(self, request: Message, version: int, out: list[BytesLike]) -> None:
        """Append the bytes of a request to ``out``."""
        _codec(self, "request", version).write(request, out)

    def decode_response(self, source: ByteReader, version: int) -> Message:
        """Read a response.

        Raises:
            MalformedError: the bytes are no such response.
        """
        response: Message = _codec(self, "response", version).read(source)
        return response


@cache
def _codec(api: Api, direction: str, version: int) -> Codec:
    fields = api.request if direction == "request" else api.response
    return structure_of(fields, version, flexible=api.flexible(version))
