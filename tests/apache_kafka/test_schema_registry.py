"""Values whose schemas are in Karapace, a registry that others wrote, beside Apache Kafka: all three kinds, references, evolution."""

import io
import json
import struct
from dataclasses import dataclass

import fastavro
import karapace_server
import pytest

import millstream as ms
from millstream.client import connect

pytestmark = pytest.mark.long

PROTO = """
syntax = "proto3";
package shop;

import "google/protobuf/timestamp.proto";
import "money.proto";

message Other {
  message Order {
    int64 id = 1;
    optional string note = 2;
    Money price = 3;
    google.protobuf.Timestamp at = 4;
    map<string, int64> counts = 5;
    Kind kind = 6;
  }
}
enum Kind { SMALL = 0; LARGE = 1; }
"""
MONEY = 'syntax = "proto3";\npackage shop;\nmessage Money {\n  string currency = 1;\n  int64 cents = 2;\n}\n'
MONEY_AVRO = {
    "type": "record",
    "name": "shop.Money",
    "fields": [{"name": "currency", "type": "string"}, {"name": "cents", "type": "long"}],
}


def order_avro(money):
    return {
        "type": "record",
        "name": "shop.Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "price", "type": money}],
    }


@dataclass
class Money:
    currency: str
    cents: int


@dataclass
class Order:
    id: int
    price: Money
    note: str | None = None
    kind: str = "NONE"


def avro(schema, row):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, row)
    return out.getvalue()


def value(number, datum):
    return b"\0" + struct.pack(">i", number) + datum


def test_values_of_all_kinds_in_one_topic_of_kafka_are_read(node, tmp_path):
    with karapace_server.serving(node.address, tmp_path) as registry:
        registry.add("money-avro", MONEY_AVRO)
        one = registry.add(
            "orders-avro", order_avro("shop.Money"), references=[("shop.Money", "money-avro")]
        )
        registry.add("money.proto", MONEY, "PROTOBUF")
        two = registry.add("orders-proto", PROTO, "PROTOBUF", [("money.proto", "money.proto")])
        three = registry.add("orders-json", json.dumps({"type": "object"}), "JSON")
        older = {"type": "record", "name": "Few", "fields": [{"name": "id", "type": "long"}]}
        four = registry.add("few", older)
        # Order of the message 0 within the message 0: id 2, price EUR 7, kind LARGE; as protoc's messages are.
        message = b"\x08\x02" + b"\x1a\x07\x0a\x03EUR\x10\x07" + b"\x30\x01"
        row = {"id": 1, "price": {"currency": "USD", "cents": 5}}
        values = [
            value(one, avro(order_avro(MONEY_AVRO), row)),
            value(two, b"\x04\x00\x00" + message),
            value(three, b'{"id": 3, "note": "x", "price": {"currency": "CHF", "cents": 9}}'),
            value(four, avro(older, {"id": 4})),
            value(999, b""),
        ]
        log_url = f"kafka://{node.address}"
        with connect(log_url) as log:
            log.create_topic("orders", partitions=1)
            with log.producer() as producer:
                producer.send_many("orders", values=values)
        app = ms.App("shop", log=log_url, state=tmp_path)
        app.topic("orders", Order, registry=registry.url).stream().view("orders", key="id")
        report = app.run(until="caught-up", engine="local")
        assert report.dead == 2
        rows = ms.view("orders", app="shop", log=tmp_path).collect()
        assert sorted(rows.select("id", "note", "kind").rows()) == [
            (1, None, "NONE"),
            (2, None, "LARGE"),
            (3, "x", "NONE"),
        ]
        reasons = ms.view("dead_letters", app="shop", log=tmp_path).collect()["reason"]
        assert sorted(reasons) == [
            "field 'price' is missing",
            "the value is of the schema 999, which the registry does not know",
        ]
