"""The state of one key while its rows and timers are processed: what the user's code reads and writes.

Each write notes how it is undone. So the effect of a call that fails is taken back, and nothing is copied for
calls that do not fail.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, overload

from millstream.kernels.errors.user_code import UnusableRowError
from millstream.kernels.process.declarations import StateDeclaration, StateKind
from millstream.kernels.process.values import Conversion, conversion, frozen, key_conversion


@dataclass(slots=True)
class StateCells:
    """What the states of the present key hold, by number, when each was written last, and how to undo the call.

    A value is as it is stored, a list a list, and a map a dict. ``now_us`` is the event time of the call, and
    ``call`` its number. ``copied`` are the states of which the call has kept a copy: undoing goes back to
    its beginning, so one is enough, however much is changed after it.
    """

    values: list[Any] = field(default_factory=list)
    written_us: list[int | None] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)
    now_us: int = 0
    call: int = 0
    copied: set[int] = field(default_factory=set)

    def begin(self, now_us: int) -> None:
        """Begin with a call."""
        self.undo.clear()
        self.copied.clear()
        self.now_us = now_us
        self.call += 1

    def note(self, number: int) -> None:
        """Note that a state is written now."""
        written, before = self.written_us, self.written_us[number]
        if before != self.now_us:
            self.undo.append(lambda: written.__setitem__(number, before))
            written[number] = self.now_us


class KeyState:
    """The states of the key that a call is about, as attributes. Others than those that are declared cannot be set."""

    __slots__ = ()


class StateList(MutableSequence[Any]):
    """A list of the key. What it has is changed by its own methods, and elements are replaced as a whole."""

    __slots__ = ("_call", "_cells", "_convert", "_held", "_number")

    def __init__(self, cells: StateCells, number: int, convert: Conversion) -> None:
        self._cells, self._number, self._convert = cells, number, convert
        self._held: list[Any] = cells.values[number]
        self._call = cells.call

    @property
    def _items(self) -> list[Any]:
        _require_call(self._cells, self._call)
        return self._held

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._items[index]
        return [*map(frozen, found)] if isinstance(index, slice) else frozen(found)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return map(frozen, self._items)

    def __eq__(self, other: object) -> bool:
        return [*self] == ([*other] if isinstance(other, (list, tuple, StateList)) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items)

    def append(self, value: Any) -> None:
        """Add an element at the end."""
        items = self._items
        items.append(self._convert(value))
        if self._number not in self._cells.copied:
            self._cells.undo.append(items.pop)
        self._cells.note(self._number)

    def extend(self, values: Iterable[Any]) -> None:
        """Add elements at the end: these may be the list's own."""
        items, count = self._items, len(self)
        items += [*map(self._convert, values)]
        if self._number not in self._cells.copied:
            self._cells.undo.append(lambda: items.__delitem__(slice(count, None)))
        self._cells.note(self._number)

    def reverse(self) -> None:
        """Reverse the order of elements."""
        self._keep()
        self._items.reverse()

    def insert(self, index: int, value: Any) -> None:
        """Insert an element before a place."""
        converted = self._convert(value)
        self._keep()
        self._items.insert(index, converted)

    def __setitem__(self, index: Any, value: Any) -> None:
        many = isinstance(index, slice)
        converted = [*map(self._convert, value)] if many else self._convert(value)
        self._keep()
        self._items[index] = converted

    def __delitem__(self, index: int | slice) -> None:
        self._keep()
        del self._items[index]

    def clear(self) -> None:
        """Remove all elements."""
        self._keep()
        self._items.clear()

    def _keep(self) -> None:
        items = self._items
        if self._number not in self._cells.copied:
            before = [*items]
            self._cells.undo.append(lambda: items.__setitem__(slice(None), before))
            self._cells.copied.add(self._number)
        self._cells.note(self._number)


class StateMap(MutableMapping[Any, Any]):
    """A map of the key. Values are replaced as a whole."""

    __slots__ = ("_call", "_cells", "_convert", "_convert_key", "_held", "_number")

    def __init__(
        self, cells: StateCells, number: int, convert: tuple[Conversion, Conversion]
    ) -> None:
        self._cells, self._number = cells, number
        self._convert_key, self._convert = convert
        self._held: dict[Any, Any] = cells.values[number]
        self._call = cells.call

    @property
    def _items(self) -> dict[Any, Any]:
        _require_call(self._cells, self._call)
        return self._held

    def __getitem__(self, key: Any) -> Any:
        return frozen(self._items[self._convert_key(key)])

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._items])  # what is iterated over may be removed meanwhile

    def __repr__(self) -> str:
        return repr(self._items)

    def __setitem__(self, key: Any, value: Any) -> None:
        key, value = self._convert_key(key), self._convert(value)
        self._keep(key)
        self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        key = self._convert_key(key)
        if key not in self._items:
            raise KeyError(key)
        self._keep()
        del self._items[key]

    def clear(self) -> None:
        """Remove all keys."""
        self._keep()
        self._items.clear()

    def popitem(self) -> tuple[Any, Any]:
        """Remove the key that was added last, as a dict does; return it with its value."""
        items = self._items
        if not items:
            raise KeyError("the map is empty")
        key = next(reversed(items))
        return key, self.pop(key)

    def replace(self, by: Mapping[Any, Any]) -> None:
        """Have this instead of what is held."""
        made = {self._convert_key(key): self._convert(value) for key, value in by.items()}
        self._keep()
        _replace(self._items, made)

    def _keep(self, key: Any = None) -> None:
        """Note how a change is undone: of one key that stays, or of any number, whose order matters."""
        items = self._items
        if self._number in self._cells.copied:
            pass
        elif key is None:
            before = dict(items)
            self._cells.undo.append(lambda: _replace(items, before))
            self._cells.copied.add(self._number)
        elif key in items:
            value = items[key]
            self._cells.undo.append(lambda: items.__setitem__(key, value))
        else:
            self._cells.undo.append(lambda: items.__delitem__(key))
        self._cells.note(self._number)


def _replace(items: dict[Any, Any], by: Mapping[Any, Any]) -> None:
    items.clear()
    items.update(by)


def _require_call(cells: StateCells, call: int) -> None:
    if cells.call != call:
        raise UnusableRowError(
            "a list or map of state is used that was kept from another call. Read it from context.state in each call"
        )


class KeyStates:
    """The states of keys, one key after the other.

    ``state`` is what the user's code is given.
    """

    def __init__(self, declared: Iterable[tuple[str, StateDeclaration]]) -> None:
        self.declared = tuple(declared)
        self.cells = StateCells()
        attributes = {
            name: _attribute(self.cells, name, number, one)
            for number, (name, one) in enumerate(self.declared)
        }
        made = type("KeyState", (KeyState,), {"__slots__": (), **attributes})
        self.state: KeyState = made()
        self._ttls = [
            (number, one.ttl_us)
            for number, (_, one) in enumerate(self.declared)
            if one.ttl_us is not None
        ]
        self._defaults = [
            conversion(one.dtype, f"The state {name!r}")(one.default) for name, one in self.declared
        ]

    def load(self, values: Sequence[Any], written_us: Sequence[int | None]) -> None:
        """Begin with a key, of which this is held; None where a state is empty."""
        self.cells.values = [
            EMPTY[one.kind]() if value is None else value
            for value, (_, one) in zip(values, self.declared, strict=True)
        ]
        self.cells.written_us = [*written_us]

    def load_nothing(self) -> None:
        """Begin with a key of which nothing is held."""
        self.cells.values = [EMPTY[one.kind]() for _, one in self.declared]
        self.cells.written_us = [None] * len(self.declared)

    def begin(self, now_us: int) -> None:
        """Begin with a call at an event time: forget what has expired by then."""
        self.cells.begin(now_us)
        if self._ttls:
            self.expire(now_us)

    def undo(self) -> None:
        """Take back what was written since the call began."""
        while self.cells.undo:
            self.cells.undo.pop()()

    def expire(self, now_us: int) -> None:
        """Forget what was last written more than its ``ttl`` before a time."""
        values, written = self.cells.values, self.cells.written_us
        for number, ttl_us in self._ttls:
            at = written[number]
            if at is not None and now_us > at + ttl_us:
                values[number] = EMPTY[self.declared[number][1].kind]()
                written[number] = None

    def expires_us(self) -> int | None:
        """Return the first time at which something has expired; None if nothing ever does."""
        written = self.cells.written_us
        times = [at + ttl_us + 1 for n, ttl_us in self._ttls if (at := written[n]) is not None]
        return min(times, default=None)

    def is_empty(self) -> bool:
        """Return whether the key's state is that of a key of which nothing is held."""
        of_each = zip(self.cells.values, self.declared, self._defaults, strict=True)
        for value, (_, one), default in of_each:
            if one.kind == "value":
                # What is equal need not be the same: 0.0 and -0.0.
                if value is not None and (value != default or repr(value) != repr(default)):
                    return False
            elif value:
                return False
        return True


EMPTY: Mapping[StateKind, Callable[[], Any]] = {"value": lambda: None, "list": list, "map": dict}


def _attribute(cells: StateCells, name: str, number: int, one: StateDeclaration) -> property:
    convert = conversion(one.dtype, f"The state {name!r}")
    if one.kind == "value":
        return _value(cells, number, one, convert)
    if one.kind == "list":
        return _list(cells, number, convert)
    assert one.key_dtype is not None
    of_key = key_conversion(one.key_dtype, f"A key of the state {name!r}")
    return _map(cells, number, (of_key, convert))


def _value(cells: StateCells, number: int, one: StateDeclaration, convert: Conversion) -> property:
    default, nested = frozen(convert(one.default)), one.dtype.is_nested()

    def read(_state: KeyState) -> Any:
        value = cells.values[number]
        if value is None:
            return default
        return frozen(value) if nested else value

    def write(_state: KeyState, value: Any) -> None:
        converted = convert(value)
        values, before = cells.values, cells.values[number]
        cells.undo.append(lambda: values.__setitem__(number, before))
        values[number] = converted
        cells.note(number)

    return property(read, write)


def _list(cells: StateCells, number: int, convert: Conversion) -> property:
    def read(_state: KeyState) -> StateList:
        return StateList(cells, number, convert)

    def write(state: KeyState, items: Iterable[Any]) -> None:
        read(state)[:] = [*items]

    return property(read, write)


def _map(cells: StateCells, number: int, convert: tuple[Conversion, Conversion]) -> property:
    def read(_state: KeyState) -> StateMap:
        return StateMap(cells, number, convert)

    def write(state: KeyState, items: Mapping[Any, Any]) -> None:
        read(state).replace(dict(items))

    return property(read, write)
