"""Values of a schema registry: each is read by the schema that it names, and what cannot be read has a reason."""

import io
import json
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import fastavro
import pyarrow as pa
import pytest
import registry_server
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.kernels.decode.registry_values import RegistryFormat
from millstream.pipeline.schema import fields_of

ORDER = """
syntax: "proto3"
package: "shop"
dependency: "google/protobuf/timestamp.proto"
dependency: "google/protobuf/duration.proto"
dependency: "google/protobuf/wrappers.proto"
message_type {
  name: "Order"
  field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "name" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "note" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 1 proto3_optional: true }
  field { name: "lines" number: 4 type: TYPE_MESSAGE type_name: ".shop.Order.Line" label: LABEL_REPEATED }
  field { name: "tags" number: 5 type: TYPE_MESSAGE type_name: ".shop.Order.TagsEntry" label: LABEL_REPEATED }
  field { name: "at" number: 6 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "kind" number: 7 type: TYPE_ENUM type_name: ".shop.Kind" label: LABEL_OPTIONAL }
  field { name: "card" number: 8 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "cash" number: 9 type: TYPE_DOUBLE label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "raw" number: 10 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field { name: "took" number: 11 type: TYPE_MESSAGE type_name: ".google.protobuf.Duration" label: LABEL_OPTIONAL }
  field { name: "limit" number: 12 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" label: LABEL_OPTIONAL }
  field { name: "scores" number: 13 type: TYPE_UINT64 label: LABEL_REPEATED }
  nested_type {
    name: "Line"
    field { name: "sku" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "inner" number: 2 type: TYPE_MESSAGE type_name: ".shop.Order.Line" label: LABEL_OPTIONAL }
  }
  nested_type {
    name: "TagsEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
  }
  oneof_decl { name: "paid" }
  oneof_decl { name: "_note" }
}
message_type {
  name: "Other"
  nested_type {
    name: "Within"
    field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  }
}
enum_type { name: "Kind" value { name: "SMALL" number: 0 } value { name: "LARGE" number: 1 } }
"""


def file_of(text, name="order.proto"):
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    file.name = name
    return file


def classes_of(text):
    """Return the message classes of a file, made by Protobuf's own library in another pool."""
    from google.protobuf import duration_pb2, timestamp_pb2, wrappers_pb2

    pool = descriptor_pool.DescriptorPool()
    for module in (timestamp_pb2, duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    file = file_of(text)
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


CLASSES = classes_of(ORDER)
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": "string"},
        {"name": "note", "type": ["null", "string"]},
    ],
}


@dataclass
class Line:
    sku: str


@dataclass
class Order:
    id: int
    name: str = "none"
    note: str | None = None


@dataclass
class Whole(Order):
    lines: list[Line] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)
    at: datetime | None = None
    kind: str | None = None
    card: str | None = None
    cash: float | None = None
    raw: bytes = b""
    took: timedelta | None = None
    limit: int | None = None
    scores: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def registry():
    with registry_server.serving() as started:
        started.add("AVRO", AVRO, number=1)
        started.add("PROTOBUF", "", number=2, file=file_of(ORDER).SerializeToString())
        started.add("JSON", {"type": "object"}, number=3)
        older = AVRO | {"fields": AVRO["fields"][:1]}
        started.add("AVRO", older, number=4)
        yield started


def confluent(number, datum):
    return b"\0" + struct.pack(">i", number) + datum


def zigzag(*numbers):
    """Return varints as the format's description says: sign in the last bit, seven bits at a time."""
    out = bytearray()
    for number in numbers:
        left = number * 2 if number >= 0 else -number * 2 - 1
        while left > 127:
            out.append(left % 128 + 128)
            left //= 128
        out.append(left)
    return bytes(out)


def avro(row, schema=AVRO):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, row)
    return out.getvalue()


def proto(message="shop.Order", /, **given):
    return CLASSES[message](**given).SerializeToString()


def decode(registry, values, declared=Order):
    fields = fields_of(declared, what="topic")
    return RegistryFormat(registry.url).decoder(fields).decode(pa.array(values, pa.binary()))


def rows_of(decoded):
    return list(zip(decoded.good.tolist(), decoded.table.to_pylist(), strict=True))


TEXT = st.text(max_size=5)
ROWS = st.fixed_dictionaries(
    {"id": st.integers(-(1 << 63), (1 << 63) - 1), "name": TEXT, "note": TEXT | st.none()}
)
KINDS = st.sampled_from(["avro", "protobuf", "json", "older", "bad", "unknown", "cut", "null"])


def written(kind, row):
    """Return a value, the row in it, and the beginning of the reason if there is none."""
    given = {name: value for name, value in row.items() if value is not None}
    match kind:
        case "avro":
            return confluent(1, avro(row)), row, None
        case "protobuf":
            return confluent(2, b"\0" + proto(**given)), row, None
        case "json":
            return confluent(3, json.dumps(row).encode()), row, None
        case "older":
            older = {"id": row["id"], "name": "none", "note": None}
            return confluent(4, zigzag(row["id"])), older, None
        case "bad":
            return json.dumps(row).encode(), None, "the value does not begin with the byte 0"
        case "unknown":
            return confluent(99, b""), None, "the value is of the schema 99, which the registry"
        case "cut":
            return confluent(1, avro(row))[:-1], None, "the value is not Avro of its schema"
        case "null":
            return None, None, "the value is null"


@given(st.lists(st.tuples(KINDS, ROWS), max_size=12))
def test_each_value_is_read_by_the_schema_that_it_names(registry, drawn):
    expected = [written(kind, row) for kind, row in drawn]
    found = decode(registry, [value for value, _, _ in expected])
    assert rows_of(found) == [(n, row) for n, (_, row, why) in enumerate(expected) if why is None]
    wanted = [(n, why) for n, (_, _, why) in enumerate(expected) if why is not None]
    assert [n for n, _ in found.errors] == [n for n, _ in wanted]
    for (_, reason), (_, begin) in zip(found.errors, wanted, strict=True):
        assert reason.startswith(begin)


def test_every_field_of_a_message_becomes_a_plain_value(registry):
    at, took = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC), timedelta(seconds=-1.5)
    message = CLASSES["shop.Order"](
        id=-7,
        name="ü",
        lines=[{"sku": "a", "inner": {"sku": "b"}}, {}],
        tags={"x": 1, "": -2},
        kind=1,
        cash=0.0,
        raw=b"\xff",
        scores=[0, (1 << 63) - 1],
    )
    message.at.FromDatetime(at)
    message.took.FromTimedelta(took)
    message.limit.value = 0
    found = decode(registry, [confluent(2, b"\0" + message.SerializeToString())], Whole)
    (row,) = found.table.to_pylist()
    assert {one["key"]: one["value"] for one in row.pop("tags")} == {"": -2, "x": 1}
    assert row == {
        "id": -7,
        "name": "ü",
        "note": None,
        "lines": [{"sku": "a"}, {"sku": ""}],
        "at": at,
        "kind": "LARGE",
        "card": None,
        "cash": 0.0,
        "raw": b"\xff",
        "took": took,
        "limit": 0,
        "scores": [0, (1 << 63) - 1],
    }


# What the serializers of confluent-kafka 2.16.1 wrote: shop.Order, shop.Other.Within, Avro, JSON.
OF_CONFLUENT = (
    "00000000010008ac021202c3bc2a0e0a016110ffffffffffffffffff01320c08c0ddf7cb061080cab5ee01380149000000000000f83f",
    "000000000204020008f7ffffffffffffffff01",
    "0000000003d80404c3bc02026e",
    "00000000047b226964223a3330302c226e616d65223a22c3bc227d",
)


def test_values_that_confluents_client_wrote_are_read():
    with registry_server.serving() as registry:
        file = file_of(ORDER).SerializeToString()
        for kind, text in (("PROTOBUF", ""), ("PROTOBUF", ""), ("AVRO", AVRO), ("JSON", "{}")):
            registry.add(kind, text, file=file if kind == "PROTOBUF" else b"")
        found = decode(registry, [bytes.fromhex(one) for one in OF_CONFLUENT], Whole)
    assert found.errors == []
    first, within, of_avro, of_json = found.table.to_pylist()
    assert (first["id"], first["name"], first["kind"], first["cash"]) == (300, "ü", "LARGE", 1.5)
    assert first["tags"] == [{"key": "a", "value": -1}]
    assert first["at"] == datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=UTC)
    assert within["id"] == -9
    assert (of_avro["id"], of_avro["name"], of_avro["note"]) == (300, "ü", "n")
    assert (of_json["id"], of_json["name"], of_json["note"]) == (300, "ü", None)


def test_what_a_message_does_not_set_is_missing_or_the_default_of_its_type(registry):
    (row,) = decode(registry, [confluent(2, b"\0")], Whole).table.to_pylist()
    assert (row["id"], row["name"], row["raw"], row["kind"]) == (0, "", b"", "SMALL")
    assert all(row[name] is None for name in ("note", "at", "card", "cash", "took", "limit"))


@pytest.mark.parametrize(
    "path", [b"\0", zigzag(1, 0), zigzag(2, 1, 0)], ids=["short", "Order", "Other.Within"]
)
def test_message_indexes_say_which_message_a_value_is(registry, path):
    """Both messages have the number of the order as their first field."""
    found = decode(registry, [confluent(2, path + proto(id=9))])
    assert [row["id"] for row in found.table.to_pylist()] == [9]


@pytest.mark.parametrize(
    ("datum", "reason"),
    [
        (b"", "the value ends within its message indexes"),
        (zigzag(2, 1), "the value ends within its message indexes"),
        (zigzag(1, 2), "the value is of the message [2], which its schema does not have"),
        (zigzag(3, 1, 0, 0), "the value is of the message [1, 0, 0], which"),
        (zigzag(1, -1), "the value has the message index -1"),
        (zigzag(-1), "the value has -1 message indexes"),
        (zigzag(101), "the value has 101 message indexes"),
        (b"\xff" * 6, "the value has a message index that is too long"),
        (b"\0\x08", "the value is not Protobuf of its schema"),
        (b"\0" + proto(scores=[1 << 63]), "field 'scores[0]' is"),
        (b"\0" + b"\x12\x01\xff", "the value is not Protobuf of its schema"),
        (b"\0" + b"\x32\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "the value is not Protobuf"),
        (b"\0" + b"\x38\x05", "field 'kind' is 5: not text"),
    ],
)
def test_what_is_no_message_of_the_schema_is_a_dead_letter(registry, datum, reason):
    found = decode(registry, [confluent(2, datum)], Whole)
    assert len(found.good) == 0
    assert found.errors[0][1].startswith(reason)


def test_schemas_that_refer_to_others_are_read_with_them(registry):
    """A diamond: both ways lead to the same schema, and Protobuf has a file of its own library in it."""
    place = {"type": "record", "name": "geo.Place", "fields": [{"name": "sku", "type": "string"}]}
    order = {
        "type": "record",
        "name": "WithPlace",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "lines", "type": {"type": "array", "items": "geo.Place"}},
        ],
    }
    registry.add("AVRO", place, number=10)
    registry.add("AVRO", order, number=11, references=[("geo.Place", 10)])
    line = 'syntax: "proto3" package: "lines" message_type { name: "Line" field { name: "sku" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }'
    middle = 'syntax: "proto3" dependency: "line.proto" public_dependency: 0'
    using = """
    syntax: "proto3" dependency: "middle.proto" dependency: "line.proto" dependency: "confluent/meta.proto"
    dependency: "google/protobuf/struct.proto"
    message_type { name: "Using"
      field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
      field { name: "lines" number: 4 type: TYPE_MESSAGE type_name: ".lines.Line" label: LABEL_REPEATED }
    }"""
    for number, text, references in (
        (12, line, []),
        (13, middle, [("line.proto", 12)]),
        (14, using, [("middle.proto", 13), ("line.proto", 12)]),
    ):
        file = file_of(text).SerializeToString()
        registry.add("PROTOBUF", "", number=number, file=file, references=references)
    message = b"\x08\x07" + b"\x22\x03\x0a\x01a"
    found = decode(
        registry,
        [
            confluent(11, avro({"id": 5, "lines": [{"sku": "z"}]}, _inline(order, place))),
            confluent(14, b"\0" + message),
        ],
        Whole,
    )
    assert found.errors == []
    assert [(row["id"], row["lines"]) for row in found.table.to_pylist()] == [
        (5, [{"sku": "z"}]),
        (7, [{"sku": "a"}]),
    ]


def _inline(schema, place):
    fields = [schema["fields"][0], {"name": "lines", "type": {"type": "array", "items": place}}]
    return schema | {"fields": fields}


@pytest.mark.parametrize(
    ("kind", "text", "file", "references", "reason"),
    [
        ("AVRO", "{", b"", (), "the Avro schema 20 cannot be read"),
        ("AVRO", '"string"', b"", (), "the Avro schema 20 is of the type 'string', not a record"),
        ("AVRO", AVRO, b"", [("x", 999)], "the schema 20 needs 'gone', version 1, which the registry"),
        ("PROTOBUF", "", b"\xff", (), "the Protobuf schema 20 cannot be read"),
        ("PROTOBUF", "", file_of('message_type { name: "M" field { name: "x" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL type_name: ".no.Such" } }').SerializeToString(), (), "the Protobuf schema 20 cannot be read"),
        ("THRIFT", "", b"", (), "the schema 20 is of the type 'THRIFT', which is not known here"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_the_reason_of_its_values(
    kind, text, file, references, reason
):
    with registry_server.serving() as registry:
        registry.add(kind, text, number=20, file=file, references=references)
        registry.add("AVRO", AVRO, number=1)
        good = avro({"id": 1, "name": "a", "note": None})
        found = decode(registry, [confluent(20, b"\0"), confluent(1, good)])
        assert found.good.tolist() == [1]
        assert found.errors[0][1].startswith(reason)


def test_schemas_that_refer_to_each_other_in_a_circle_cannot_be_read():
    with registry_server.serving() as registry:
        in_circle = AVRO | {"fields": [{"name": "id", "type": "no.Such"}]}
        registry.add("AVRO", in_circle, number=20, references=[("b.B", 21)])
        registry.add("AVRO", in_circle, number=21, references=[("a.A", 20)])
        ((_, reason),) = decode(registry, [confluent(20, b"\0")]).errors
        assert reason.startswith("the Avro schema 20 cannot be read")


def test_an_app_reads_values_of_a_registry_and_a_validator_sees_whole_values(registry):
    pydantic = pytest.importorskip("pydantic")

    class Checked(pydantic.BaseModel):
        id: int
        name: str

        @pydantic.field_validator("name")
        @classmethod
        def no_space(cls, value):
            if " " in value:
                raise ValueError("has a space")
            return value.upper()

    app = ms.App("orders", log="unused")
    topic = app.topic("orders", Checked, registry=registry.url)
    topic.stream().view("rows", key="id")
    values = [
        confluent(1, avro({"id": 1, "name": "a", "note": None})),
        confluent(2, b"\0" + proto(id=2, name="b")),
        confluent(3, b'{"id": 3, "name": "c"}'),
        *(confluent(2, b"\0" + proto(id=4, name="d d")), confluent(3, b'{"id": 5, "name": "e e"}')),
    ]
    out = testing.run(app, {"orders": values}, partitions=1)
    assert sorted(out["rows"].rows()) == [(1, "A"), (2, "B"), (3, "C")]
    assert out.dead.height == 2
    with pytest.raises(ConfigError, match="Give bytes, as a producer writes them"):
        testing.run(app, {"orders": [{"id": 1, "name": "a"}]}, partitions=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"registry": "ftp://host"}, "whose address is none"),
        ({"registry": "http://"}, "whose address is none"),
        ({"registry": "http://host?a=1"}, "whose address is none"),
        ({"registry": 7}, "whose address is none"),
        ({"registry": "http://host", "format": "avro"}, "leave the format out"),
        ({"registry": "http://host", "schema": None}, "no schema of its own"),
    ],
)
def test_options_that_do_not_fit_a_registry_are_refused(options, said):
    app = ms.App("orders", log="unused")
    with pytest.raises(ConfigError, match=said):
        app.topic("t", **{"schema": Order, **options})
