"""A schema registry for tests: the part of Confluent's protocol that is asked for, over HTTP, with faults where a test wants them."""

import base64
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

import http_service

NO_SCHEMA, NO_SUBJECT, NO_VERSION = 40403, 40401, 40402


@dataclass
class Entry:
    """A schema as it was registered. ``file`` is its FileDescriptorProto, of Protobuf."""

    number: int
    kind: str
    text: str
    subject: str
    file: bytes = b""
    references: tuple = ()


@dataclass
class Registry:
    """``faults`` are the next answers, instead of those that are right: a status, a body, headers or not."""

    entries: list = field(default_factory=list)
    faults: list = field(default_factory=list)
    knows_serialized: bool = True
    service: object = None

    @property
    def url(self):
        return self.service.url

    @property
    def targets(self):
        return self.service.targets

    def add(self, kind, text, *, number=None, subject=None, file=b"", references=()):
        """Register a schema, and return its number. A reference is a name and the number of another schema."""
        number = len(self.entries) + 1 if number is None else number
        text = text if isinstance(text, str) else json.dumps(text)
        entry = Entry(number, kind, text, subject or f"subject/{number}", file, tuple(references))
        self.entries.append(entry)
        return number

    def answer(self, asked, _number):
        if self.faults:
            return self.faults.pop(0)
        url = urlsplit(asked.target)
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        form = parse_qs(url.query).get("format", [""])[0]
        match parts:
            case ["schemas", "ids", number]:
                found = self._of_number(number)
                return self._said(found, form) if found else _missing(NO_SCHEMA)
            case ["schemas", "ids", number, "versions"]:
                found = self._of_number(number)
                if not found:
                    return _missing(NO_SCHEMA)
                return 200, [{"subject": found.subject, "version": 1}]
            case ["subjects", subject, "versions", "1"]:
                found = next((one for one in self.entries if one.subject == subject), None)
                return self._said(found, form, whole=True) if found else _missing(NO_SUBJECT)
            case _:
                return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _of_number(self, number):
        return next((one for one in self.entries if str(one.number) == number), None)

    def _said(self, entry, form, *, whole=False):
        text = entry.text
        if form == "serialized" and entry.kind == "PROTOBUF" and self.knows_serialized:
            if entry.references and not whole:  # as Karapace does
                return 500, {"error_code": 500, "message": "Internal server error"}
            text = base64.b64encode(entry.file).decode()
        said = {"schema": text}
        if entry.kind != "AVRO":
            said["schemaType"] = entry.kind
        if whole:
            said |= {"subject": entry.subject, "version": 1, "id": entry.number}
        if entry.references:
            said["references"] = [
                {"name": name, "subject": self._of_number(str(number)).subject, "version": 1}
                if self._of_number(str(number))
                else {"name": name, "subject": "gone", "version": 1}
                for name, number in entry.references
            ]
        return 200, said


def _missing(code):
    return 404, {"error_code": code, "message": "not found"}


@contextmanager
def serving():
    """A registry on a port of its own."""
    registry = Registry()
    with http_service.serving(registry.answer) as service:
        registry.service = service
        yield registry
