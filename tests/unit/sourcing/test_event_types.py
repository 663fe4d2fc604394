"""Events under their names and versions: written, read, brought up to today's version, refused."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pydantic
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import UserCodeError
from millstream.sourcing.store import EventStore


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    at: datetime
    price: Decimal


@dataclass(frozen=True)
class Everything:
    n: int
    text: str
    x: float
    yes: bool
    raw: bytes
    at: datetime
    day: date
    clock: time
    lasted: timedelta
    price: Decimal
    id: UUID
    colour: Colour
    tags: list[str]
    pair: tuple[int, str]
    many: tuple[Decimal, ...]
    unique: frozenset[int]
    prices: dict[str, Decimal]
    inner: Inner | None = None


class Model(pydantic.BaseModel):
    at: datetime
    inner: Everything | None = None


AWARE = st.datetimes(timezones=st.just(UTC))
PRICES = st.decimals(allow_nan=False, allow_infinity=False)
EVERYTHING = st.builds(
    Everything,
    x=st.floats(allow_nan=False, allow_infinity=False),
    at=AWARE,
    price=PRICES,
    lasted=st.timedeltas(),
    many=st.lists(PRICES, max_size=2).map(tuple),
    prices=st.dictionaries(st.text(), PRICES, max_size=2),
    inner=st.none() | st.builds(Inner, at=AWARE, price=PRICES),
)


@settings(max_examples=some(100))
@given(EVERYTHING)
def test_every_value_is_read_as_it_was_written(event: Everything) -> None:
    types = ms.EventTypes()
    types.register("everything")(Everything)
    types.register("model")(Model)
    for one in (event, Model(at=event.at)):
        kind, fields, *_ = types.encode(one)
        assert types.decode(kind.name, 1, fields, "here") == one


@pytest.fixture
def moved() -> ms.EventTypes:
    types = ms.EventTypes()
    types.register("moved", version=3)(
        make_dataclass("Moved", [("to", str), ("metres", int), ("by", str)])
    )

    @types.upcaster("moved", from_version=1)
    def _(fields):
        fields["metres"] = fields.pop("km") * 1000
        return fields

    @types.upcaster("moved", from_version=2)
    def _(fields):
        return {**fields, "by": "foot"}

    return types


def test_old_versions_are_brought_up_step_by_step(moved: ms.EventTypes) -> None:
    moved.sealed_with(None)
    stored = {"to": "x", "km": 2}
    found = moved.decode("moved", 1, stored, "here")
    assert (found.to, found.metres, found.by) == ("x", 2000, "foot")
    assert stored == {"to": "x", "km": 2}
    assert moved.decode("moved", 2, {"to": "x", "metres": 5}, "here").by == "foot"


def test_an_event_that_an_upcaster_fails_on_is_named_and_stays(moved: ms.EventTypes) -> None:
    with pytest.raises(UserCodeError, match=r"'moved' of version 1 at offset 7 of t/0 .*KeyError"):
        moved.decode("moved", 1, {"to": "x"}, "offset 7 of t/0")


def test_unknown_types_and_versions_are_refused_with_advice(moved: ms.EventTypes) -> None:
    with pytest.raises(ms.ConfigError, match=r"does not know; register .* Did you mean 'moved'\?"):
        moved.decode("Moved", 1, {}, "here")
    with pytest.raises(ms.ConfigError, match="version 4, and this program knows versions up to 3"):
        moved.decode("moved", 4, {}, "here")
    with pytest.raises(ms.ConfigError, match="is not registered; decorate the class"):
        moved.encode(Inner(datetime.now(UTC), Decimal(1)))


def test_what_cannot_be_registered_is_refused(moved: ms.EventTypes) -> None:
    with pytest.raises(ms.ConfigError, match="registered already"):
        moved.register("moved")(Inner)
    with pytest.raises(ms.ConfigError, match="neither a dataclass nor a pydantic model"):
        moved.register("set")(type("Plain", (), {}))
    with pytest.raises(ms.ConfigError, match="is a union"):
        moved.register("union")(make_dataclass("U", [("x", int | Inner)]))
    with pytest.raises(ms.ConfigError, match="there is an upcaster"):
        moved.upcaster("moved", from_version=1)
    moved.register("left", version=2)(Inner)
    with pytest.raises(ms.ConfigError, match="nothing reads its version 1"):
        moved.sealed_with(None)
    moved.upcaster("left", from_version=1)(dict)
    moved.upcaster("left", from_version=2)(dict)
    with pytest.raises(ms.ConfigError, match="leads to no registered version"):
        moved.sealed_with(None)


def test_one_stream_that_cannot_be_read_keeps_no_other_from_being_handled(
    log: ms.EventLog,
) -> None:
    @dataclass(frozen=True)
    class Noted:
        n: int

    old, new = ms.EventTypes(), ms.EventTypes()
    old.register("noted")(Noted)
    new.register("noted", version=2)(Noted)

    @new.upcaster("noted", from_version=1)
    def _(fields):
        return {"n": 10 // fields["n"]}

    decider = ms.Decider(int, lambda n, _: [Noted(n)], lambda state, event: state + event.n)
    with EventStore(log, "t", decider, old, partitions=1) as store:
        store.handle("bad", 0)
        store.handle("good", 5)
    with EventStore(log, "t", decider, new, partitions=1) as store:
        assert store.handle("good", 1).version == 2
        assert store.load("good").state == 3
        with pytest.raises(UserCodeError, match="at offset 0 of t/0"):
            store.handle("bad", 1)
        with pytest.raises(UserCodeError):
            list(store.history("bad"))
        assert store.handle("good", 1).version == 3


@dataclass(frozen=True)
class Whole:
    n: int


@dataclass(frozen=True)
class Anything:
    n: Any


@dataclass(frozen=True)
class Day:
    day: date


@dataclass(frozen=True)
class ByFlag:
    found: dict[bool, int]


@dataclass(frozen=True)
class Amount:
    x: float


class Raw(pydantic.BaseModel):
    raw: bytes


class Taxed(pydantic.BaseModel):
    price: int

    @pydantic.field_validator("price")
    @classmethod
    def tax(cls, price: int) -> int:
        return price * 2


@pytest.mark.parametrize(
    "event",
    [
        Whole(Decimal("1.5")),  # type: ignore[arg-type] - which nobody checks
        Anything(Decimal("1.5")),
        Anything({1: 2}),
        Anything(Colour.RED),
        Anything({"$sealed": "x"}),
        Anything("\ud800"),
        Day(datetime(2026, 1, 1, 3, tzinfo=UTC)),
        ByFlag({True: 1}),
        Amount(2**60 + 1),
        Raw(raw=b"abc"),
        Taxed(price=5),
    ],
)
def test_an_event_that_would_be_read_as_another_one_is_refused_before_it_is_stored(
    log: ms.EventLog, event: object
) -> None:
    types = ms.EventTypes()
    types.register("x")(type(event))
    decider = ms.Decider(int, lambda c, _: [c], lambda state, _: state + 1)
    with EventStore(log, "t", decider, types, partitions=1) as store:
        with pytest.raises(ms.ConfigError):
            store.handle("a", event)
        assert log.offsets("t") == [(0, 0)]


@dataclass
class Doubled:
    n: int
    twice: int = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.n


def test_what_is_folded_at_once_is_what_is_folded_later(log: ms.EventLog) -> None:
    types = ms.EventTypes()
    types.register("doubled")(Doubled)
    types.register("anything")(Anything)
    decider = ms.Decider(list, lambda c, _: [c], lambda state, event: [*state, event])
    given = [1, 2]
    with EventStore(log, "t", decider, types, partitions=1) as store:
        live = store.handle("a", Anything((given, 2))).events
        live += store.handle("a", Doubled(3)).events
        given.append(3)
    with EventStore(log, "t", decider, types, partitions=1) as store:
        assert store.load("a").state == live == [Anything([[1, 2], 2]), Doubled(3)]
