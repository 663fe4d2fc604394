"""Schemas: what classes may say of a topic's values, and what becomes of values that do not fit."""

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID, uuid4

import annotated_types
import polars as pl
import pydantic
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import BadRecordError, ConfigError
from millstream.pipeline.schema import columns_of, fields_of, schema_of

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Kind(Enum):
    CLICK = "click"
    SHOWN = "shown"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Place:
    city: str
    zip: int = 89073


@dataclass
class Everything:
    whole: int
    real: float
    yes: bool
    text: str
    at: datetime
    day: date
    clock: time
    took: timedelta
    cost: Decimal
    raw: bytes
    id: UUID
    kind: Kind
    level: Level
    size: Literal["s", "m"]
    tags: list[str]
    attrs: dict[str, int]
    place: Place
    maybe: int | None
    places: list[Place] = field(default_factory=list)
    mode: str = "plain"


FULL = {
    "whole": 1,
    "real": 0.5,
    "yes": True,
    "text": "x",
    "at": AT,
    "day": date(2026, 1, 31),
    "clock": time(12, 30),
    "took": timedelta(seconds=90),
    "cost": Decimal("1.50"),
    "raw": b"\x00\xff",
    "id": UUID("8b12a1c4-0000-4000-8000-000000000001"),
    "kind": Kind.CLICK,
    "level": Level.HIGH,
    "size": "m",
    "tags": ["a"],
    "attrs": {"k": 1},
    "place": {"city": "Ulm"},
}


def run_of(schema, rows, **options):
    """Run rows of a schema through to a view of all its columns, one row per record."""
    app = ms.App("schemas", log="unused")
    topic = app.topic("t", schema, metadata=("offset",), **options)
    names = [f.name for f in topic.fields]
    topic.stream().select(*names).view("rows", key="offset")
    return testing.run(app, {"t": rows}, partitions=1)


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_every_type_of_a_dataclass_comes_out_as_a_column():
    columns = columns_of(fields_of(Everything, what="t"))
    assert columns == {
        "whole": pl.Int64,
        "real": pl.Float64,
        "yes": pl.Boolean,
        "text": pl.String,
        "at": pl.Datetime("us", "UTC"),
        "day": pl.Date,
        "clock": pl.Time,
        "took": pl.Duration("us"),
        "cost": pl.Decimal(38, 9),
        "raw": pl.Binary,
        "id": pl.String,
        "kind": pl.String,
        "level": pl.Int64,
        "size": pl.String,
        "tags": pl.List(pl.String),
        "attrs": pl.List(pl.Struct({"key": pl.String, "value": pl.Int64})),
        "place": pl.Struct({"city": pl.String, "zip": pl.Int64}),
        "maybe": pl.Int64,
        "places": pl.List(pl.Struct({"city": pl.String, "zip": pl.Int64})),
        "mode": pl.String,
    }


def test_a_value_of_every_type_arrives_as_what_it_is():
    app = ms.App("schemas", log="unused")
    stream = app.topic("t", Everything).stream()
    stream.with_columns(clock=pl.col("clock").cast(pl.Duration("us"))).view("rows", key="id")
    row = testing.run(app, {"t": [FULL]})["rows"].row(0, named=True)
    expected = FULL | {"kind": "click", "level": 2, "id": str(FULL["id"]), "mode": "plain"}
    expected |= {"clock": timedelta(hours=12, minutes=30), "maybe": None}
    for name in ("tags", "attrs", "place", "places"):
        row[name] = json.loads(row[name])
    expected |= {"attrs": [{"key": "k", "value": 1}], "places": []}
    expected |= {"place": {"city": "Ulm", "zip": 89073}}
    assert row == expected


def test_a_missing_field_is_its_default_and_not_null():
    @dataclass
    class Defaults:
        n: int = 5
        tags: list[str] = field(default_factory=lambda: ["none"])
        when: date = date(2026, 1, 1)
        kind: Kind = Kind.SHOWN
        maybe: int | None = 7

    rows = run_of(Defaults, [{}, {"n": 1, "maybe": None}, {"n": None}])
    assert rows["rows"].drop("offset").rows() == [
        (5, '["none"]', date(2026, 1, 1), "shown", 7),
        (1, '["none"]', date(2026, 1, 1), "shown", None),
    ]
    assert rows.dead["reason"].to_list() == ["field 'n' is null"]


def test_constraints_beside_the_types_of_a_dataclass_are_checked():
    @dataclass
    class Person:
        age: Annotated[int, annotated_types.Interval(ge=0, lt=150)]
        name: Annotated[str, pydantic.StringConstraints(min_length=1, pattern="^[A-Z]")] = "A"

    out = run_of(Person, [{"age": 5}, {"age": -3}, {"age": 150}, {"age": 1, "name": "ann"}])
    assert out["rows"]["age"].to_list() == [5]
    assert out.dead["reason"].to_list() == [
        "field 'age' is -3: must be >= 0",
        "field 'age' is 150: must be < 150",
        "field 'name' is \"ann\": must match '^[A-Z]'",
    ]


def test_a_typed_dict_is_a_schema():
    class Click(TypedDict):
        ad: int
        note: NotRequired[str]

    out = run_of(Click, [{"ad": 1}, {"note": "x"}])
    assert out["rows"].drop("offset").rows() == [(1, None)]
    assert out.dead["reason"].to_list() == ["field 'ad' is missing"]


def test_a_mapping_of_names_to_types_is_a_schema():
    out = run_of({"ad": int, "note": str | None}, [{"ad": 1, "note": None}, {"ad": "x"}])
    assert out["rows"].drop("offset").rows() == [(1, None)]
    assert out.dead["reason"].to_list() == ["field 'ad' is \"x\": not a whole number"]


# What is refused when it is declared.


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (complex, "Odd.f has the type complex. Known are int, float"),
        (Any, "Odd.f has the type"),
        (int | str, r"Odd.f has the type int \| str"),
        (dict[int, str], r"Odd.f has the type dict\[int, str\]"),
        (list, "Odd.f has the type list"),
        (Literal["a", 1], "Use values that are all text, or all whole numbers"),
        (Annotated[int, annotated_types.MinLen(1)], "min_length=1, which does not go with int"),
        (Annotated[str, pydantic.StringConstraints(pattern="(?=x)")], "Rust's regular expressions"),
        (Annotated[int, pydantic.AfterValidator(abs)], "which only pydantic can check"),
    ],
)
def test_a_type_that_is_not_known_is_refused_with_its_field(hint, said):
    odd = type("Odd", (), {"__annotations__": {"f": hint}})
    with refused(said):
        fields_of(dataclass(odd), what="t")


def test_odd_defaults_names_and_classes_are_refused():
    @dataclass
    class Random:
        id: UUID = field(default_factory=uuid4)

    @dataclass
    class Wrong:
        n: int = "many"

    @dataclass
    class Reserved:
        __n: int  # Python makes it _Reserved__n
        _ok: int

    @dataclass
    class Nothing:
        pass

    with refused("Random.id has a default that is another one each time"):
        fields_of(Random, what="t")
    with refused("Wrong.n has the default 'many': not a whole number"):
        fields_of(Wrong, what="t")
    with refused("Nothing has no fields"):
        fields_of(Nothing, what="t")
    with refused("Give a dataclass, a pydantic model, a TypedDict or a mapping"):
        fields_of(dict, what="t")
    with refused("t has a field whose name is 3. Names are text"):
        fields_of({3: int}, what="t")
    with refused("values.n has the type 3"):
        fields_of({"n": 3}, what="t")
    with refused("values has no fields"):
        fields_of({}, what="t")
    assert [f.name for f in fields_of(Reserved, what="t")] == ["_Reserved__n", "_ok"]


class Node(pydantic.BaseModel):
    below: "Node | None" = None


def test_a_class_that_holds_itself_is_refused():
    with refused("Node has a field that holds Node again"):
        fields_of(Node, what="t")


# Pydantic.


class Buyer(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(min_length=2, max_length=8)]
    age: pydantic.NonNegativeInt = 18


class Order(pydantic.BaseModel):
    number: int = pydantic.Field(gt=0, alias="orderNumber", multiple_of=10)
    price: Decimal = pydantic.Field(le=Decimal("99.5"))
    rate: float = pydantic.Field(default=0.5, allow_inf_nan=False)
    buyer: Buyer
    tags: list[Annotated[str, pydantic.Field(pattern="^#")]] = []
    coupon: str | None
    paid: pydantic.AwareDatetime | None = None


GOOD = {"orderNumber": 10, "price": "9.50", "buyer": {"name": "Ann"}, "coupon": None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"orderNumber": 0}, "field 'orderNumber' is 0: must be > 0"),
        ({"orderNumber": 15}, "field 'orderNumber' is 15: must be a multiple of 10"),
        ({"price": "99.51"}, "field 'price' is \"99.51\": must be <= 99.5"),
        ({"rate": float("nan")}, "field 'rate' is nan: must be a finite number"),
        ({"buyer": {"name": "A"}}, "field 'buyer.name' is \"A\": must have a length of at least 2"),
        ({"buyer": {"name": "Ann", "age": -1}}, "field 'buyer.age' is -1: must be >= 0"),
        ({"tags": ["#a", "b"]}, "field 'tags[1]' is \"b\": must match '^#'"),
        ({"coupon": ...}, "field 'coupon' is missing"),
        (
            {"paid": "2026-01-31T12:00:00"},
            "field 'paid' is \"2026-01-31T12:00:00\": names no offset from UTC",
        ),
    ],
)
def test_the_constraints_of_a_model_are_checked(change, reason):
    bad = {name: value for name, value in (GOOD | change).items() if value is not ...}
    out = run_of(Order, [GOOD, bad, GOOD])
    assert out.dead["reason"].to_list() == [reason]
    assert out["rows"]["number"].to_list() == [10, 10]


def test_constraints_are_checked_by_pydantic_and_here_alike():
    for change in ({}, {"orderNumber": 0}, {"price": "99.51"}, {"buyer": {"name": "A"}}):
        record = GOOD | change
        try:
            Order.model_validate_json(json.dumps(record))
            fits = True
        except pydantic.ValidationError:
            fits = False
        assert run_of(Order, [record]).dead.is_empty() == fits


class Shouting(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    word: str
    times: int = 1

    @pydantic.field_validator("word")
    @classmethod
    def _loud(cls, word: str) -> str:
        if word == "boom":
            raise RuntimeError("too loud")
        if not word.isalpha():
            raise ValueError("letters only")
        return word.upper()


def test_a_model_with_validators_of_its_own_judges_and_changes_its_values():
    out = run_of(Shouting, [{"word": "hi"}, {"word": "4"}, {"word": "a", "x": 1}, {"times": 2}])
    assert out["rows"].drop("offset").rows() == [("HI", 1)]
    assert out.dead["reason"].to_list() == [
        "field 'word' is \"4\": value error, letters only",
        "field 'x' is 1: extra inputs are not permitted",
        "field 'word' is missing",
    ]
    dead = run_of(Shouting, [{"word": "boom"}]).dead
    assert dead["reason"].to_list() == ["the model Shouting fails with RuntimeError: too loud"]


def test_only_models_with_code_of_their_own_go_through_pydantic():
    class Stripped(pydantic.BaseModel):
        name: Annotated[str, pydantic.StringConstraints(strip_whitespace=True)]

    class Outer(pydantic.BaseModel):
        inner: Shouting

    class Several(pydantic.BaseModel):
        name: str = pydantic.Field(validation_alias=pydantic.AliasChoices("a", "b"))

    assert schema_of(Order, what="t").model is None
    for model in (Shouting, Stripped, Outer, Several):
        assert schema_of(model, what="t").model is model
    assert run_of(Several, [{"b": "x"}])["rows"]["name"].to_list() == ["x"]
    assert run_of(Stripped, [{"name": " x "}])["rows"]["name"].to_list() == ["x"]


def test_instances_of_models_are_rows_too():
    order = Order(orderNumber=20, price=Decimal(1), buyer=Buyer(name="Bob"), coupon="c", paid=AT)
    out = run_of(Order, [order])
    assert out["rows"].row(0, named=True) | {"offset": 0} == {
        "number": 20,
        "price": Decimal(1),
        "rate": 0.5,
        "buyer": '{"name":"Bob","age":18}',
        "tags": "[]",
        "coupon": "c",
        "paid": AT,
        "offset": 0,
    }


# Formats.

WRITER = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "ad", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["click", "shown"]}},
        {"name": "place", "type": {
            "type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}],
        }},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
    ],
}  # fmt: skip
CLICK = {
    "ad": 7,
    "at": AT,
    "note": None,
    "kind": "click",
    "place": {"city": "Ulm"},
    "counts": {"a": 1},
}


@pytest.mark.parametrize("form", ["mapping", "text", "file"])
def test_avro_values_are_read_by_the_schema_they_were_written_with(form, tmp_path):
    path = tmp_path / "click.avsc"
    path.write_text(json.dumps(WRITER))
    schema = {"mapping": WRITER, "text": json.dumps(WRITER), "file": path}[form]
    out = run_of(None, [CLICK, b"\xff", b""], format="avro", avro_schema=schema)
    row = out["rows"].row(0, named=True)
    assert row == CLICK | {
        "place": '{"city":"Ulm"}',
        "counts": '[{"key":"a","value":1}]',
        "offset": 0,
    }
    assert all(r.startswith("the value is not Avro of its schema") for r in out.dead["reason"])
    assert out.dead.height == 2


def test_a_class_chooses_among_the_fields_of_an_avro_schema_and_constrains_them():
    @dataclass
    class Some:
        ad: Annotated[int, annotated_types.Lt(10)]
        extra: str = "none"

    rows = [CLICK, CLICK | {"ad": 11}]
    out = run_of(Some, rows, format="avro", avro_schema=WRITER)
    assert out["rows"].drop("offset").rows() == [(7, "none")]
    assert out.dead["reason"].to_list() == ["field 'ad' is 11: must be < 10"]


def test_values_in_confluents_form_name_their_schema(tmp_path):
    older = {"type": "record", "name": "Click", "fields": [{"name": "ad", "type": "long"}]}
    newer = older | {"fields": [*older["fields"], {"name": "n", "type": "int", "default": 3}]}
    (tmp_path / "5.avsc").write_text(json.dumps(older))
    (tmp_path / "17.avsc").write_text(json.dumps(newer))
    rows = [{"ad": 1, "n": 2}, b"\0\0\0\0\x05\x04", b"\0\0\0\0\x06\x04", b"{}"]
    out = run_of(None, rows, format="avro", avro_schemas=tmp_path)
    assert out["rows"].drop("offset").rows() == [(1, 2), (2, 3)]
    assert out.dead["reason"].to_list() == [
        "the value is of the Avro schema 6; known are 5, 17",
        "the value does not begin with the byte 0 and the number of a schema",
    ]


def test_values_as_they_are_come_with_their_key():
    app = ms.App("raw", log="unused")
    app.topic("t", format="bytes", metadata=("offset",)).stream().view("rows", key="offset")
    rows = testing.run(app, {"t": [b"\xff", b"", b"{"]}, partitions=1)["rows"]
    assert rows["value"].to_list() == [b"\xff", b"", b"{"]
    assert rows["key"].to_list() == [None] * 3


def test_what_a_record_says_of_itself_can_be_columns():
    @dataclass
    class Event:
        ad: int

    app = ms.App("meta", log="unused")
    meta = ("key", "partition", "offset", "timestamp", "headers")
    topic = app.topic("t", Event, key="ad", metadata=meta)
    topic.stream().view("rows", key=("partition", "offset"))
    at = datetime(2026, 1, 1, tzinfo=UTC)
    events = [testing.Row({"ad": 1}, at=at), b"bad", {"ad": 1}]
    rows = testing.run(app, {"t": events}, partitions=1)["rows"]
    assert rows["key"].to_list() == [b"1", b"1"]
    assert rows["offset"].to_list() == [0, 2]
    assert rows["headers"].to_list() == ["[]", "[]"]
    assert rows["timestamp"].to_list() == [at] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "xml"}, 'Choose "json", "avro" or "bytes"'),
        ({"format": "avro"}, "Give either avro_schema="),
        ({"avro_schema": WRITER}, 'Give format="avro"'),
        ({"format": "bytes"}, "Leave the schema out"),
        ({"format": "avro", "avro_schema": {"type": "string"}}, "Give one of records"),
        ({"format": "avro", "avro_schema": "{"}, "is not valid"),
        ({"format": "avro", "avro_schema": "no/such.avsc"}, "No such file"),
        ({"format": "avro", "avro_schemas": {}}, "no Avro schemas by number"),
        ({"metadata": ("size",)}, "the metadata of topic 't' is 'size'"),
        ({"metadata": "offset"}, "Give a tuple"),
        ({"metadata": ("key",)}, "its schema has a field of that name"),
        ({"bad": "ignore"}, 'Choose "dead-letter", "stop" or "skip"'),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    @dataclass
    class Keyed:
        key: str

    with refused(said):
        ms.App("options", log="unused").topic("t", Keyed, **options)


# What becomes of bad records.


@dataclass
class Event:
    n: int


PLACE = ("partition", "offset")


def app_with(bad):
    app = ms.App("policy", log="unused")
    app.topic("t", Event, bad=bad, metadata=PLACE).stream().view("rows", key=PLACE)
    return app


ROWS = [{"n": 1}, b"oops", {"n": 2}, {"n": "x"}]


@pytest.mark.parametrize(("partitions", "batches"), [(1, 1), (1, 4), (4, 3)])
def test_dead_records_are_kept_with_their_place_reason_and_bytes(partitions, batches):
    app = app_with("dead-letter")
    out = testing.run(app, {"t": ROWS}, partitions=partitions, batches=batches, seed=1)
    assert sorted(out["rows"]["n"]) == [1, 2]
    dead = out.dead.sort("value")
    assert sorted(dead["value"]) == sorted([b"oops", b'{"n":"x"}'])
    assert set(dead["reason"]) == {
        "the value is not JSON: Expecting value at character 0",
        "field 'n' is \"x\": not a whole number",
    }
    assert dead["step"].to_list() == ["t", "t"]
    assert dead["headers"].to_list() == ["[]", "[]"]
    assert dead["replayed_at"].to_list() == [None, None]


def test_skipped_records_are_counted_and_not_kept():
    out = testing.run(app_with("skip"), {"t": ROWS})
    assert out.dead.is_empty()
    assert out.ledger.filter(step="t")["dead"].sum() == 2
    assert sorted(out["rows"]["n"]) == [1, 2]


def test_a_topic_that_stops_names_the_record_and_the_way_out():
    with pytest.raises(BadRecordError) as caught:
        testing.run(app_with("stop"), {"t": ROWS}, partitions=1)
    error = caught.value
    assert (error.topic, error.partition, error.offset) == ("t", 0, 1)
    assert str(error) == (
        "Record t/0/1 cannot be decoded: the value is not JSON: Expecting value at character 0. "
        "Its value begins with b'oops'. Nothing of this batch was committed. Correct the schema of "
        'the topic, or declare it with bad="dead-letter" or "skip", and run again.'
    )
