"""MongoDB as a source, with a replica set in memory: what is stored is what its collections hold."""

import itertools
import json
from dataclasses import replace

import pytest
from capture_replica import Replica
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pymongo", reason="the driver of MongoDB is not installed here")

from bson import ObjectId
from fake_mongodb import Deployment

from millstream.capture.mongodb.address import mongodb_address
from millstream.capture.mongodb.events import ClusterTime
from millstream.capture.mongodb.session import MongoDbSession
from millstream.capture.mongodb.source import MongoDbSource
from millstream.capture.signals import RereadRequest
from millstream.capture.units import TableChange, TableDefinition
from millstream.errors import ConfigError, ConflictError, RetriableError


def source(deployment, *collections, chunk_rows=3, url="mongodb://db.example/shop"):
    seconds = itertools.count()
    return MongoDbSource(
        mongodb_address(url),
        collections or ("*",),
        chunk_rows=chunk_rows,
        connect=deployment.connect,
        monotonic_s=lambda: next(seconds) * 2.0,
    )


def now():
    return True


@pytest.fixture
def deployment():
    made = Deployment()
    made.insert("orders", *({"_id": n, "item": f"i{n}"} for n in range(1, 8)))
    return made


@pytest.fixture
def replica():
    return Replica()


def equal(replica, deployment, name):
    """Compare a collection with its copy: documents whose values JSON has as they are."""
    return sorted(replica.rows(name), key=repr) == sorted(deployment.documents(name), key=repr)


# ── snapshots and changes ───────────────────────────────────────────────────────────────────


def test_a_snapshot_holds_each_document_and_ends_where_changes_go_on(deployment, replica):
    replica.follow(source(deployment), now)
    assert equal(replica, deployment, "orders")
    assert [change.op for change in replica.changes()] == ["r"] * 7
    deployment.update("orders", 3, item="new")
    deployment.delete("orders", 4)
    deployment.replace("orders", {"_id": 5, "other": 1})
    replica.follow(source(deployment), now)
    changes = replica.changes()[7:]
    assert [(one.op, one.before, one.after) for one in changes] == [
        ("u", {"_id": 3, "item": "i3"}, {"_id": 3, "item": "new"}),
        ("d", {"_id": 4, "item": "i4"}, None),
        ("u", {"_id": 5, "item": "i5"}, {"_id": 5, "other": 1}),
    ]
    assert equal(replica, deployment, "orders")


def test_ids_of_all_types_are_read_in_chunks(deployment, replica):
    ids = [None, 2, 2.5, "a", "b", {"a": 1}, {"a": 2}, b"x", ObjectId(b"a" * 12), False, True]
    deployment.insert("odd", *({"_id": one, "n": at} for at, one in enumerate(ids)))
    rows = []
    for unit in source(deployment, "odd", chunk_rows=1).units(None):
        json.dumps(unit.progress)  # it can be stored
        rows += [one.after for one in unit.contents if isinstance(one, TableChange)]
        if unit.kind == "progress":
            break
    assert [row["n"] for row in rows] == list(range(len(ids)))
    assert len({json.dumps(row["_id"]) for row in rows}) == len(ids)


@pytest.mark.parametrize("times", [1, 3])
def test_a_transaction_is_one_unit_and_other_changes_are_their_own(deployment, replica, times):
    replica.follow(source(deployment), now)
    with deployment.transaction(times=times):
        deployment.update("orders", 1, item="x")
        deployment.insert("lines", {"_id": 1})
        deployment.delete("orders", 2)
    deployment.update("orders", 1, item="y")
    before = len(replica.units)
    replica.follow(source(deployment), now)
    units = [
        [one.op for one in contents if isinstance(one, TableChange)]
        for kind, _, contents in replica.units[before:]
        if kind == "transaction"
    ]
    assert [unit for unit in units if unit] == [["u", "c", "d"], ["u"]]
    assert equal(replica, deployment, "lines")


def test_changes_of_other_databases_and_collections_move_the_place_alone(deployment, replica):
    replica.follow(source(deployment, "orders"), now)
    before = replica.progress
    deployment.insert("other", {"_id": 1})
    deployment.insert("orders", {"_id": 1}, database="elsewhere")
    replica.follow(source(deployment, "orders"), now)
    assert replica.progress["token"] != before["token"]
    assert replica.progress["collections"] == before["collections"]
    assert len(replica.changes()) == 7


def test_a_chunk_that_was_read_within_a_transaction_is_read_again(deployment, replica, monkeypatch):
    """The snapshot is of a time between two events of one transaction, and has nothing of it."""
    read_chunk = MongoDbSession.read_chunk

    def reading(session, collection, *more):
        chunk = read_chunk(session, collection, *more)
        if collection == "orders" and not deployment.written:
            deployment.written = True
            with deployment.transaction(times=2):
                deployment.update("orders", 1, item="first")
                between = ClusterTime(*deployment.time)
                deployment.update("orders", 2, item="second")
            return replace(chunk, time=between)
        return chunk

    deployment.written = False
    monkeypatch.setattr(MongoDbSession, "read_chunk", reading)
    replica.follow(source(deployment), now)
    assert equal(replica, deployment, "orders")


def test_an_event_in_fragments_is_one_event(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.split_over = 10
    deployment.update("orders", 1, item="large")
    deployment.update("orders", 2, item="larger")
    replica.follow(source(deployment), now)
    assert [one.after["item"] for one in replica.changes()[7:]] == ["large", "larger"]
    assert replica.changes()[7].before == {"_id": 1, "item": "i1"}


def test_an_old_server_is_not_asked_to_split_events(replica):
    old = Deployment(version=(6, 0, 8))
    old.split_over = 10
    old.insert("orders", {"_id": 1})
    replica.follow(source(old), now)
    old.update("orders", 1, n=2)
    replica.follow(source(old), now)
    assert equal(replica, old, "orders")


# ── what is done to collections ─────────────────────────────────────────────────────────────


def kinds(contents):
    return [
        ("drop" if one.dropped else "define") if isinstance(one, TableDefinition) else one.op
        for one in contents
    ]


def test_a_collection_that_is_dropped_is_emptied_and_one_made_anew_is_followed(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.drop("orders")
    deployment.insert("orders", {"_id": 9, "item": "again"})
    replica.follow(source(deployment), now)
    told = [kind for _, _, contents in replica.units for kind in kinds(contents)]
    assert told == ["define", *["r"] * 7, "t", "drop", "define", "c"]
    assert replica.rows("orders") == [{"_id": 9, "item": "again"}]


def test_a_renamed_collection_is_read_under_its_new_name(deployment, replica):
    deployment.insert("target", {"_id": 70})
    replica.follow(source(deployment), now)
    deployment.rename("orders", "target")
    deployment.update("target", 1, item="after")
    replica.follow(source(deployment), now)
    assert replica.rows("orders") == []
    assert equal(replica, deployment, "target")
    deployment.rename("target", "gone")
    replica.follow(source(deployment, "target", "orders"), now)
    assert replica.rows("target") == []
    assert "gone" not in replica.tables


def test_a_dropped_database_is_emptied_and_its_stream_opened_anew(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.drop_database()
    deployment.insert("orders", {"_id": 1, "item": "new"})
    replica.follow(source(deployment), now)
    assert equal(replica, deployment, "orders")
    replica.follow(source(deployment), now)
    deployment.insert("orders", {"_id": 2, "item": "newer"})
    replica.follow(source(deployment), now)
    assert equal(replica, deployment, "orders")


def test_indexes_views_and_time_series_are_passed_over(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.other("createIndexes", "orders")
    deployment.create("seen", kind="view", images=False)
    deployment.create("measured", kind="timeseries", images=False)
    replica.follow(source(deployment), now)
    assert set(replica.tables) == {"orders"}


def test_an_event_that_is_not_known_stops_the_capture(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.other("defragment", "orders")
    with pytest.raises(ConfigError, match="an event of type 'defragment'"):
        replica.follow(source(deployment), now)


def test_a_collection_dropped_while_it_is_read_is_forgotten(deployment, replica):
    reading = source(deployment, chunk_rows=2)
    units = reading.units(None)
    for unit in itertools.islice(units, 1):
        replica.store(unit)
    deployment.drop("orders")
    for unit in units:
        replica.store(unit)
        if unit.kind == "progress":
            break
    assert replica.rows("orders") == []
    assert replica.progress["collections"] == {}


def test_a_collection_that_is_left_out_ends_with_a_truncation(deployment, replica):
    deployment.insert("lines", {"_id": 1})
    replica.follow(source(deployment), now)
    replica.follow(source(deployment, "lines"), now)
    assert replica.rows("orders") == []
    assert list(replica.progress["collections"]) == ["lines"]
    replica.follow(source(deployment), now)
    assert equal(replica, deployment, "orders")


# ── what is refused ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"set_name": ""}, "standalone server.*--replSet"),
        ({"version": (5, 0, 9)}, "is MongoDB 5.0.9; capture needs 6.0"),
    ],
)
def test_a_deployment_that_has_not_what_is_needed_is_refused(change, reason):
    made = Deployment(**change)
    made.insert("orders", {"_id": 1})
    with pytest.raises(ConfigError, match=reason):
        source(made).check()


def test_a_collection_without_images_is_refused_with_the_command_that_mends_it(deployment, replica):
    deployment.create("plain", images=False)
    mend = 'collMod: "plain", changeStreamPreAndPostImages: {enabled: true}'
    with pytest.raises(ConfigError, match=mend):
        source(deployment).check()
    source(deployment, "orders").check()
    replica.follow(source(deployment, "orders", "p*r*"), now)
    deployment.create("paper", images=False)
    with pytest.raises(ConfigError, match='collMod: "paper"'):
        replica.follow(source(deployment, "orders", "p*r*"), now)


def test_an_update_without_its_document_is_refused(deployment, replica):
    replica.follow(source(deployment), now)
    stored = deployment.collections["shop", "orders"]
    stored["images"] = False
    deployment.update("orders", 1, item="lost")
    stored["images"] = True
    with pytest.raises(ConflictError, match="has no document after it"):
        replica.follow(source(deployment), now)


def test_a_deletion_without_its_document_has_the_key(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.collections["shop", "orders"]["images"] = False
    deployment.delete("orders", 1)
    deployment.collections["shop", "orders"]["images"] = True
    replica.follow(source(deployment), now)
    assert replica.changes()[-1].before == {"_id": 1}
    assert equal(replica, deployment, "orders")


def test_a_place_that_the_oplog_has_no_more_is_refused(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.insert("orders", *({"_id": n} for n in range(20, 40)))
    deployment.kept_from = deployment.time
    with pytest.raises(ConflictError, match=r"oplog no longer has it.*--name"):
        replica.follow(source(deployment), now)


def test_another_deployment_is_refused(deployment, replica):
    deployment.update("orders", 1, item="x")
    replica.follow(source(deployment), now, limit=4)
    other = Deployment()
    other.insert("orders", {"_id": 1})
    other.time = deployment.time
    other.update("orders", 1, n=1)
    with pytest.raises(ConflictError, match="another one than was captured"):
        replica.follow(source(other), now)


def test_no_collection_is_refused(deployment):
    with pytest.raises(ConfigError, match=r"no collection of mongodb://db\.example/shop"):
        source(deployment, "nothing").check()


def test_a_server_that_is_gone_is_tried_again_and_no_message_has_the_password(deployment, replica):
    secret = "mongodb://me:s3cret@db.example/shop"
    replica.follow(source(deployment, url=secret), now)
    assert deployment.connected[1]["password"] == "s3cret"
    deployment.down = True
    with pytest.raises(RetriableError) as found:
        replica.follow(source(deployment, url=secret), now)
    assert "s3cret" not in str(found.value) + repr(mongodb_address(secret))
    deployment.down = False
    deployment.insert("orders", {"_id": 100})
    replica.follow(source(deployment, url=secret), now)
    assert equal(replica, deployment, "orders")


@pytest.mark.parametrize(
    "url", ["mongodb://host", "mongodb:///shop", "mongodb://h/a/b", "mongodb+srv://", "http://h/d"]
)
def test_an_address_that_cannot_be_read_is_refused(url):
    with pytest.raises(ConfigError, match="mongodb://user@host:27017/database"):
        mongodb_address(url)


def test_an_address_of_several_hosts_is_shown_without_user():
    found = mongodb_address("mongodb://me:p%40ss@a:1,b:2/shop?replicaSet=rs0")
    assert (found.shown, found.user, found.password) == ("mongodb://a:1,b:2/shop", "me", "p@ss")


# ── reading again, and how far it is ────────────────────────────────────────────────────────


def test_a_collection_is_read_again_whole_or_by_a_filter(deployment, replica):
    replica.follow(source(deployment), now)
    replica.tables["orders"].clear()  # a copy that lost rows
    reading = source(deployment)
    request = RereadRequest("shop", "orders", '{"_id": {"$gt": 5}}', 1, last=True)
    reading.check_reread(request)
    reading.reread(request)
    replica.follow(reading, now)
    assert [row["_id"] for row in replica.rows("orders")] == [6, 7]
    reading = source(deployment)
    reading.reread(RereadRequest("shop", "orders", "", 2, last=True))
    replica.follow(reading, now)
    assert equal(replica, deployment, "orders")
    assert replica.progress["signals"] == 2


@pytest.mark.parametrize("where", ["id > 5", "[1]", '{"a": {"$nope": 1}}'])
def test_a_filter_that_cannot_be_asked_is_refused(deployment, where):
    with pytest.raises(ConfigError, match=r"cannot be asked of shop\.orders"):
        source(deployment).check_reread(RereadRequest("shop", "orders", where, 1))
    with pytest.raises(ConfigError, match="is not captured"):
        source(deployment).check_reread(RereadRequest("shop", "none", where, 1))


def test_an_alarm_comes_before_the_oplog_ends(deployment, replica):
    replica.follow(source(deployment), now)
    deployment.kept_from = (deployment.time[0] - 10, 1)
    assert source(deployment).measure(replica.progress).alarm == ""
    deployment.time = (deployment.time[0] + 30, 1)
    assert "replSetResizeOplog" in source(deployment).measure(replica.progress).alarm
    unread = {**replica.progress, "collections": {"orders": {"after": None, "uuid": ""}}}
    assert source(deployment).measure(unread).rows_expected == 7


# ── at random, stopped anywhere ─────────────────────────────────────────────────────────────

WRITES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 99)),
    st.tuples(st.just("delete"), st.sampled_from("ab"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.sampled_from("ab")),
    st.tuples(st.just("rename"), st.just("a")),
    st.tuples(st.just("follow"), st.integers(1, 9)),
)


def write(deployment, step):
    kind, name = step[0], step[1]
    there = {one for _, one in deployment.collections}
    if kind == "put":
        key, value = step[2:]
        if name in there and any(one["_id"] == key for one in deployment.documents(name)):
            deployment.update(name, key, n=value)
        else:
            deployment.insert(name, {"_id": key, "n": value})
    elif name in there:
        if kind == "drop":
            deployment.drop(name)
        elif kind == "rename":
            deployment.rename("a", "b")
        elif any(one["_id"] == step[2] for one in deployment.documents(name)):
            deployment.delete(name, step[2])


@settings(max_examples=some(120))
@given(st.lists(WRITES, max_size=30), st.integers(1, 4))
def test_a_copy_is_equal_after_any_writes_and_stops(steps, chunk_rows):
    made, replica = Deployment(), Replica()
    made.insert("a", *({"_id": n, "n": 0} for n in range(4)))
    for step in steps:
        if step[0] == "follow":
            replica.follow(source(made, chunk_rows=chunk_rows), lambda: False, limit=step[1])
        else:
            write(made, step)
    replica.follow(source(made, chunk_rows=chunk_rows), now)
    for name in ("a", "b"):
        if ("shop", name) in made.collections:
            assert equal(replica, made, name)
        else:
            assert replica.rows(name) == []
    positions = [at for kind, at, _ in replica.units if kind == "transaction"]
    assert len(positions) == len(set(positions))
