"""Event types: the names and versions under which events are stored, and how old ones are read today.

An event is stored under a name of your choice, never under the path of its class: classes may be moved
and renamed. When its fields change, it gets the next version, and an upcaster from the one before. Upcasters
take and return the fields as a mapping of JSON values, so old classes need not be kept. They run when an
event is read; what is stored is never changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

from millstream.choices import did_you_mean
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.code_digest import code_digest, digest
from millstream.sourcing.decider import is_frozen
from millstream.sourcing.json_form import ENCODER, Decode, decoder_of, difference_of
from millstream.sourcing.subject_keys import SEALED, SubjectKeys

EventClass = TypeVar("EventClass", bound=type)
Fields = Mapping[str, Any]
Upcaster = Callable[[dict[str, Any]], Fields]


@dataclass(frozen=True, slots=True)
class EventType:
    """One registered type: its name, its version today, its class, and what is personal in it."""

    name: str
    version: int
    kind: type
    decode: Decode
    subject: str | None = None
    personal: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EarlierVersion:
    """How a version before today's is read, and what was personal in it; None: what is today."""

    upcast: Upcaster
    subject: str | None = None
    personal: Mapping[str, Any] | None = None


class EncodedEvent(NamedTuple):
    """An event that was decided: its stored fields, the event as it will be read, and one for the caller.

    The two are apart if they could be changed: what a caller does to its own is not in any state.
    """

    kind: EventType
    fields: Any
    event: Any
    for_caller: Any


class EventTypes:
    """The events that a topic may hold.

    Guarantees: thread-safe once everything is registered.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, EventType] = {}
        self._by_class: dict[type, EventType] = {}
        self._earlier: dict[tuple[str, int], EarlierVersion] = {}
        self._keys: SubjectKeys | None = None
        self.direct: dict[tuple[str, int], Decode] = {}
        """How fields of a name and version are read where nothing is to be upcast or opened."""

    def register(
        self,
        name: str,
        *,
        version: int = 1,
        subject: str | None = None,
        personal: Mapping[str, Any] | None = None,
    ) -> Callable[[EventClass], EventClass]:
        """Return a class decorator: its instances are stored under ``name``, for ever.

        Args:
            version: 1 for a new type; one more each time that stored fields change their meaning, with an
                :meth:`upcaster` from each version before.
            subject: The field with the id of the person whom the personal fields are about: a text, or an
                integer. It is stored in clear, so it must not itself be personal.
            personal: The personal fields, each with the JSON value that it has once its subject is forgotten.
                They are stored sealed with the subject's key; upcasters get them opened. The store needs
                ``keys``.

        Raises:
            ConfigError: the name or class is registered already, or the class is neither a dataclass nor a
                pydantic model.
        """
        if not name or version < 1:
            raise ConfigError(
                f"an event type named {name!r} of version {version} is not possible; give a name, and a "
                "version of 1 or more"
            )

        def add(kind: EventClass) -> EventClass:
            if name in self._by_name or kind in self._by_class:
                raise ConfigError(
                    f"{kind.__qualname__} cannot be registered as {name!r}: the name or the class is "
                    "registered already; give each class one name of its own"
                )
            decode = decoder_of(kind)
            sealed = dict(personal or {})
            _check_personal(name, kind, subject, sealed)
            found = EventType(name, version, kind, decode, subject, sealed)
            self._by_name[name] = self._by_class[kind] = found
            return kind

        return add

    def upcaster(
        self,
        name: str,
        *,
        from_version: int,
        subject: str | None = None,
        personal: Mapping[str, Any] | None = None,
    ) -> Callable[[Upcaster], Upcaster]:
        """Return a function decorator: from the fields of one version to those of the next.

        The function gets a mapping of JSON values, its own to change, and returns it or another one. It is
        called whenever an event of that version is read, in any thread.

        Args:
            subject: The field that had the subject in that version, if it had another name than today's.
            personal: What was personal in that version, under the names of then, each with the JSON value that
                it has once its subject is forgotten. If not given, what is personal today.

        Raises:
            ConfigError: there is one already.
        """
        if (name, from_version) in self._earlier:
            raise ConfigError(
                f"there is an upcaster of {name!r} from version {from_version} already; keep one"
            )

        def add(upcast: Upcaster) -> Upcaster:
            known = None if personal is None else dict(personal)
            self._earlier[name, from_version] = EarlierVersion(upcast, subject, known)
            return upcast

        return add

    def sealed_with(self, keys: SubjectKeys | None) -> EventTypes:
        """Return these types, with the keys of personal fields.

        Raises:
            ConfigError: a version has no upcaster, or fields are personal and there are no keys.
        """
        self._check()
        personal = [one.name for one in self._by_name.values() if one.personal]
        personal += [name for (name, _), one in self._earlier.items() if one.personal]
        if personal and keys is None:
            raise ConfigError(
                f"events {', '.join(map(repr, dict.fromkeys(personal)))} have personal fields; give the store the file of their "
                "keys, as keys='keys.db', apart from the log"
            )
        found = EventTypes()
        found._by_name, found._by_class = self._by_name, self._by_class
        found._earlier, found._keys = self._earlier, keys
        if keys is None:
            kinds = self._by_name.values()
            found.direct = {(one.name, one.version): _in_clear(one.decode) for one in kinds}
        return found

    def _check(self) -> None:
        """Check that every version before today's has an upcaster, which belongs to a registered type."""
        for one in self._by_name.values():
            for version in range(1, one.version):
                if (one.name, version) not in self._earlier:
                    raise ConfigError(
                        f"{one.name!r} is at version {one.version}, and nothing reads its version "
                        f"{version}; register an upcaster(..., from_version={version})"
                    )
        for name, version in self._earlier:
            found = self._by_name.get(name)
            if found is None or not 1 <= version < found.version:
                raise ConfigError(
                    f"an upcaster of {name!r} from version {version} leads to no registered version; "
                    "raise the version of the event type, or remove the upcaster"
                )

    def digest(self) -> str:
        """Return a digest of the code by which events are read: classes, versions, upcasters."""
        parts = [
            [one.name, one.version, code_digest(one.kind), sorted(one.personal.items())]
            for one in self._by_name.values()
        ]
        parts += [
            [*key, code_digest(one.upcast), one.subject, one.personal]
            for key, one in self._earlier.items()
        ]
        return digest(json.dumps(sorted(map(ENCODER.encode, parts))))

    def forgets(self) -> str:
        """Name the key store and how often it forgot, in any process."""
        return "" if self._keys is None else self._keys.forgets()

    def personal_in(self, name: str, version: int) -> tuple[str | None, Mapping[str, Any]]:
        """Return the field with the subject, and the personal fields, of a version of a type."""
        kind, earlier = self._by_name.get(name), self._earlier.get((name, version))
        if kind is None:
            return None, {}
        if earlier is None:
            return kind.subject, kind.personal
        personal = kind.personal if earlier.personal is None else earlier.personal
        return earlier.subject or kind.subject, personal

    def says_what_was_personal(self, name: str, version: int) -> bool:
        """Return whether it was said what was personal in this version: it is today's, or its upcaster says."""
        kind, earlier = self._by_name.get(name), self._earlier.get((name, version))
        if kind is None:
            return False
        return earlier is None or earlier.personal is not None or not kind.personal

    def subject_fields(self) -> frozenset[str]:
        """Return the names of all fields that have a subject, today or in an earlier version."""
        names = [one.subject for one in self._by_name.values()]
        names += [one.subject for one in self._earlier.values()]
        return frozenset(filter(None, names))

    def type_of(self, event: object) -> EventType:
        """Return the type of an event.

        Raises:
            ConfigError: its class is not registered.
        """
        found = self._by_class.get(type(event))
        if found is None:
            raise ConfigError(
                f"an event of class {type(event).__qualname__} is not registered; decorate the class with "
                f"@events.register('a-name')"
            )
        return found

    def encode(self, event: object) -> EncodedEvent:
        """Return an event as it is stored.

        Raises:
            ConfigError: its class is not registered, a field has no form in JSON, it would be read as
                another value than it has, or its subject is none.
        """
        found = self.type_of(event)
        try:
            fields = _plain_fields(event)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"an event {found.name!r} cannot be written as JSON: {error}; change its fields"
            ) from error
        again = _read_again(found, event, fields)
        stored = self._seal(found, fields) if found.personal else fields
        return EncodedEvent(found, stored, again, again if is_frozen(again) else deepcopy(again))

    def decode(self, name: str, version: int, fields: Any, where: str) -> Any:
        """Return the event that was stored under a name and version, as today's code has it.

        Args:
            where: The place of the event, for errors.

        Raises:
            ConfigError: the type or version is not known here.
            UserCodeError: an upcaster or the class failed on this event.
        """
        found = self._by_name.get(name)
        if found is None or version > found.version:
            raise ConfigError(self._unknown(name, version, where))
        opened = self._open(found, version, fields, where)
        was_sealed = opened is not fields
        try:
            while version < found.version:
                opened = self._earlier[name, version].upcast(dict(opened))
                version += 1
            return found.decode(opened)
        except Exception as error:  # noqa: BLE001 - all of them are errors of the user's code
            # Pydantic and int() quote the value that they refuse, which may have been sealed: a traceback shows the cause.
            what = type(error).__name__ if was_sealed else repr(error)
            raise UserCodeError(
                f"the event {name!r} of version {version} at {where} cannot be read: {what}. It "
                "remains as it was stored; correct its class, or its upcaster"
            ) from (None if was_sealed else error)

    def _seal(self, kind: EventType, fields: dict[str, Any]) -> dict[str, Any]:
        assert self._keys is not None, "sealed_with has checked it"
        subject = _subject_of(kind, fields)
        return {
            name: self._keys.seal(subject, value, f"{kind.name}.{name}")
            if name in kind.personal
            else value
            for name, value in fields.items()
        }

    def _open(self, kind: EventType, version: int, fields: Any, where: str) -> Any:
        """Open the sealed fields of an event, whatever is personal today.

        Raises:
            ConfigError: there are no keys, or nothing says what a field of the forgotten is read as.
        """
        sealed = [name for name, value in fields.items() if _is_sealed(value)]
        if not sealed:
            return fields
        what = f"of the event {kind.name!r} of version {version} at {where}"
        if self._keys is None:
            raise ConfigError(
                f"the field {sealed[0]!r} {what} is sealed, and the store has no keys; open it with the file of "
                "its keys, as keys='keys.db'"
            )
        opened = dict(fields)
        _, personal = self.personal_in(kind.name, version)
        for name in sealed:
            value = self._keys.open(fields[name][SEALED], f"{kind.name}.{name}", _FORGOTTEN)
            if value is _FORGOTTEN and name not in personal:
                raise ConfigError(
                    f"the field {name!r} {what} is of a subject who was forgotten, and nothing says what it is "
                    f"read as; give personal={{{name!r}: ...}} where that version is registered, or to its upcaster"
                )
            opened[name] = personal[name] if value is _FORGOTTEN else value
        return opened

    def _unknown(self, name: str, version: int, where: str) -> str:
        known = self._by_name.get(name)
        if known is not None:
            return (
                f"the event at {where} is {name!r} of version {version}, and this program knows versions up "
                f"to {known.version}; run the newer program, whose events these are"
            )
        return (
            f"the event at {where} is {name!r}, which this program does not know; register its class "
            f"under this name.{did_you_mean(name, self._by_name)}"
        )


def _check_personal(name: str, kind: Any, subject: str | None, personal: Mapping[str, Any]) -> None:
    if not personal and subject is None:
        return
    fields = set(getattr(kind, "__pydantic_fields__", None) or kind.__dataclass_fields__)
    unknown = {*personal, subject} - fields
    if not personal or subject is None or unknown or subject in personal:
        raise ConfigError(
            f"event {name!r} has the fields {sorted(fields)}, the subject {subject!r} and the personal fields "
            f"{sorted(personal)}; give both, of these fields, and a subject that is not itself personal"
        )


_FORGOTTEN = object()
_PLAIN = frozenset({str, int, bool})


def _is_sealed(value: Any) -> bool:
    return isinstance(value, dict) and SEALED in value


def _in_clear(decode: Decode) -> Decode:
    """Return what decodes fields none of which is sealed, and fails on others."""

    def checked(fields: Any) -> Any:
        for value in fields.values():
            if type(value) is dict and SEALED in value:
                raise ValueError("a field is sealed")
        return decode(fields)

    return checked


def _subject_of(kind: EventType, fields: Mapping[str, Any]) -> str:
    """Return the subject of an event, as it is given to be forgotten.

    Raises:
        ConfigError: it is none: others would have the same one, or nobody could give it.
    """
    subject = fields[str(kind.subject)]
    if type(subject) not in (str, int) or subject == "":
        raise ConfigError(
            f"the subject {kind.subject!r} of an event {kind.name!r} is {subject!r}: nothing was appended. Give the "
            "id of a person, a text or an integer"
        )
    return str(subject)


def _read_again(kind: EventType, event: object, fields: Any) -> Any:
    """Return an event as it will be read: what is folded today is what will be folded then.

    Raises:
        ConfigError: it would be another one, or none.
    """
    plain = _are_plain(fields)
    try:
        again = kind.decode(fields if plain else json.loads(ENCODER.encode(fields)))
    except Exception as error:
        raise ConfigError(
            f"an event {kind.name!r} could not be read again ({type(error).__name__} in its class): nothing "
            "was appended. Give its fields values of the types that they are declared with"
        ) from error
    if plain and _has_these(again, fields) and _has_these(event, fields):
        return again  # the usual case, quickly
    difference = difference_of(again, event)
    if difference is not None:
        raise ConfigError(
            f"an event {kind.name!r} would be read as another one than it is: {difference}. Nothing was "
            "appended; declare the field with the type of its value, and let the class not change what "
            "it is given"
        )
    for name, value in fields.items():
        if _is_sealed(value) and name not in kind.personal:
            raise ConfigError(
                f"the field {name!r} of an event {kind.name!r} has a key {SEALED!r}, which marks what is sealed; "
                "name the key otherwise"
            )
    return again


def _has_these(event: object, fields: Mapping[str, Any]) -> bool:
    """Return whether an event of a dataclass has these very values, and no others."""
    kind: Any = type(event)
    names = _field_names(kind)
    return names is not None and all(getattr(event, name) is fields.get(name) for name in names)


def _are_plain(fields: Mapping[str, Any]) -> bool:
    """Return whether all fields are values that JSON has as they are, and that nobody can change."""
    return all(type(value) in _PLAIN for value in fields.values())


def _plain_fields(event: object) -> Any:
    kind: Any = type(event)
    names = _field_names(kind)
    if names is None:
        return json.loads(ENCODER.encode(event))
    found = {name: getattr(event, name) for name in names}
    return found if _are_plain(found) else json.loads(ENCODER.encode(found))


@cache
def _field_names(kind: Any) -> Sequence[str] | None:
    """Return the names of the fields that a dataclass is made from; None if it is none."""
    if not dataclasses.is_dataclass(kind):
        return None
    return [field.name for field in dataclasses.fields(kind) if field.init]
