"""Collections captured into a log: each change once, in order, wherever the capture is stopped."""

import json
import random

import pytest

pytest.importorskip("pymongo", reason="the driver of MongoDB is not installed here")

from fake_mongodb import Deployment

import millstream as ms
from millstream.capture.mongodb.address import mongodb_address
from millstream.capture.mongodb.source import MongoDbSource
from millstream.capture.run import Capture
from millstream.client import connect
from millstream.errors import ConfigError


class Stopped(Exception):
    """The capture was killed."""


class StoppedSource(MongoDbSource):
    """A source that ends after so many contents, in the middle of whatever it gives."""

    left = 1 << 62

    def units(self, progress):
        for unit in super().units(progress):
            unit.contents = self._counted(unit, unit.contents)
            yield unit

    def _counted(self, unit, contents):
        for content in contents:
            self.left -= 1
            if self.left < 0:
                raise Stopped
            yield content


def capture(deployment, log, left=1 << 62):
    source = StoppedSource(
        mongodb_address("mongodb://db.example/shop"),
        ["*"],
        chunk_rows=4,
        heartbeat_s=0.0,
        connect=deployment.connect,
    )
    source.left = left
    return Capture(source, log, "shop", "mongodb", database="shop")


def records(folder, topic):
    with connect(folder) as log:
        found = log.read(topic, 0, columns=("key", "value"))
        columns = [found.column(name).to_pylist() for name in ("key", "value")]
    return [tuple(one and json.loads(one) for one in pair) for pair in zip(*columns, strict=True)]


def test_documents_are_records_with_their_id_as_key(tmp_path):
    deployment = Deployment()
    deployment.insert("orders", {"_id": 1, "item": "pen"})
    capture(deployment, tmp_path).run(until="caught-up")
    deployment.update("orders", 1, item="ink")
    deployment.delete("orders", 1)
    status = capture(deployment, tmp_path).run(until="caught-up")
    assert (status.snapshot_rows, status.changes) == (1, 2)
    found = records(tmp_path, "shop.shop.orders")
    assert [key for key, _ in found] == [{"_id": 1}] * 4
    shown = [value and (value["op"], value["before"], value["after"]) for _, value in found]
    pen, ink = {"_id": 1, "item": "pen"}, {"_id": 1, "item": "ink"}
    assert shown == [("r", None, pen), ("u", pen, ink), ("d", ink, None), None]
    source = found[1][1]["source"]
    assert (source["connector"], source["db"], source["table"]) == ("mongodb", "shop", "orders")
    assert source["ts_ms"] % 1000 == 7  # the wall clock of the server


def test_each_change_is_in_the_log_once_wherever_the_capture_is_stopped(tmp_path):
    rng, deployment, expected = random.Random(7), Deployment(), []
    deployment.insert("counts", *({"_id": n, "n": 0} for n in range(10)))
    for _ in range(7):
        for _ in range(rng.randrange(6)):
            key = rng.randrange(10)
            deployment.update("counts", key, n=rng.randrange(1 << 30))
            expected.append(deployment.documents("counts")[key]["n"])
        if rng.random() < 0.3:
            with deployment.transaction():
                for key in range(3):
                    deployment.update("counts", key, n=rng.randrange(1 << 30))
                    expected.append(deployment.documents("counts")[key]["n"])
        with pytest.raises(Stopped):
            capture(deployment, tmp_path, left=rng.randrange(4)).run(until="caught-up")
            raise Stopped
    capture(deployment, tmp_path).run(until="caught-up")
    values = [value for _, value in records(tmp_path, "shop.shop.counts")]
    rows = {}
    for value in values:
        rows[value["after"]["_id"]] = value["after"]
    assert sorted(rows.values(), key=lambda row: row["_id"]) == deployment.documents("counts")
    changes = [value["after"]["n"] for value in values if value["op"] == "u"]
    assert len(changes) == len(set(changes))
    # Those before the first chunk was read are in the snapshot; of the others none is missing.
    assert changes == expected[len(expected) - len(changes) :]
    ends = [value for _, value in records(tmp_path, "shop.transaction") if value["status"] == "END"]
    assert len({end["id"] for end in ends}) == len(ends)


def test_a_url_of_mongodb_is_captured_by_the_command_and_the_function():
    made = ms.capture("mongodb://me:pass@db.example:1/shop", tables="orders")
    assert (made.name, made.connector) == ("shop", "mongodb")
    assert made.topic("orders") == "shop.shop.orders"
    with pytest.raises(ConfigError, match="wal_bytes_max"):
        ms.capture("mongodb://db.example/shop", wal_bytes_max=1)
