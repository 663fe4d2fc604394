"""A replica set of MongoDB in memory, at the border of the driver: what ``pymongo.MongoClient`` gives a capture.

It is no server: it answers the calls that a capture makes as MongoDB's manual says (change events, resume tokens,
pre- and post-images, snapshot reads), and keeps documents and events as BSON, so that the driver's own decoder reads them.
"""

import uuid
from contextlib import contextmanager

import bson
from bson import ObjectId, Timestamp
from bson.binary import Binary
from pymongo.errors import AutoReconnect, OperationFailure

_HIGH_WATER = "2B0429296E1404"  # how the token of a time without an event goes on
_ORDER = (type(None), (int, float), str, dict, list, bytes, ObjectId, bool)


def bson_order(value):
    """Return what sorts values as BSON's order of types does, for the types that tests use."""
    if isinstance(value, bool):
        return (7, value)
    rank = next(at for at, kinds in enumerate(_ORDER) if isinstance(value, kinds))
    if isinstance(value, dict):
        return (rank, [(bson_order(one), name) for name, one in value.items()])
    return (rank, 0 if value is None else value)


class Deployment:
    """The data of all databases, and the oplog; each write is at a time of its own, but for those of a transaction."""

    def __init__(self, version=(7, 0, 5), set_name="rs0"):
        self.version, self.set_name = version, set_name
        self.collections = {}  # (database, name): {"uuid", "images", "kind", "documents": {id's BSON: document's}}
        self.oplog = []  # (token, time, database, event as BSON)
        self.time = (1_767_225_600, 1)
        self.kept_from = (0, 0)
        self.down = False
        self.split_over = None
        self.commands = []
        self._within = False
        self._about = {}
        self._number = 0

    # ── what an application does ────────────────────────────────────────────────────────────

    @contextmanager
    def transaction(self, *, times=1):
        """Have all writes in one transaction, at one cluster time, or each at its own."""
        self._tick()
        self._number += 1
        self._within = times == 1
        self._about = {"lsid": {"id": Binary(b"s" * 16, 4)}, "txnNumber": bson.Int64(self._number)}
        yield
        self._within, self._about = False, {}

    def create(self, name, *, database="shop", images=True, kind="collection"):
        made = {"uuid": uuid.uuid4().bytes, "images": images, "kind": kind, "documents": {}}
        self.collections[database, name] = made
        self._event("create", database, name, operationDescription={"idIndex": {"v": 2}})

    def insert(self, name, *documents, database="shop"):
        if (database, name) not in self.collections:
            self.create(name, database=database)
        for document in documents:
            stored = self._stored(database, name)
            stored[self._id(document)] = bson.encode(document)
            self._event("insert", database, name, key=document["_id"], after=document)

    def update(self, name, key, database="shop", **fields):
        stored = self._stored(database, name)
        before = bson.decode(stored[self._id({"_id": key})])
        after = before | fields
        stored[self._id(after)] = bson.encode(after)
        about = {"updatedFields": fields, "removedFields": [], "truncatedArrays": []}
        self._event(
            "update", database, name, key=key, before=before, after=after, updateDescription=about
        )

    def replace(self, name, document, database="shop"):
        stored = self._stored(database, name)
        before = bson.decode(stored[self._id(document)])
        stored[self._id(document)] = bson.encode(document)
        self._event("replace", database, name, key=document["_id"], before=before, after=document)

    def delete(self, name, key, database="shop"):
        before = bson.decode(self._stored(database, name).pop(self._id({"_id": key})))
        self._event("delete", database, name, key=key, before=before)

    def drop(self, name, database="shop"):
        self._event("drop", database, name)
        del self.collections[database, name]

    def rename(self, name, to, database="shop"):
        if (database, to) in self.collections:
            del self.collections[database, to]
        self._event("rename", database, name, to={"db": database, "coll": to})
        self.collections[database, to] = self.collections.pop((database, name))

    def drop_database(self, database="shop"):
        for other, name in list(self.collections):
            if other == database:
                self.drop(name, database)
        self._event("dropDatabase", database, None)
        self._event("invalidate", database, None)

    def other(self, kind, name, database="shop"):
        self._event(kind, database, name)

    def documents(self, name, database="shop"):
        found = [bson.decode(one) for one in self._stored(database, name).values()]
        return sorted(found, key=lambda one: bson_order(one["_id"]))

    # ── how it is kept ──────────────────────────────────────────────────────────────────────

    def _stored(self, database, name):
        return self.collections[database, name]["documents"]

    def _id(self, document):
        return bson.encode({"_id": document["_id"]})

    def _tick(self):
        if not self._within:
            self.time = (
                (self.time[0] + 1, 1) if self.time[1] == 3 else (self.time[0], self.time[1] + 1)
            )

    def _event(self, kind, database, name, *, key=None, before=None, after=None, **more):
        self._tick()
        token = f"82{self.time[0]:08X}{self.time[1]:08X}2B{len(self.oplog):08X}"
        event = {
            "_id": {"_data": token},
            "operationType": kind,
            "clusterTime": Timestamp(*self.time),
            "wallTime": bson.DatetimeMS(self.time[0] * 1000 + 7),
            **self._about,
            **more,
        }
        if kind != "invalidate":
            event["ns"] = {"db": database} if name is None else {"db": database, "coll": name}
        known = self.collections.get((database, name))
        if known is not None:
            event["collectionUUID"] = Binary(known["uuid"], 4)
        if kind in ("insert", "update", "replace", "delete"):
            event["documentKey"] = {"_id": key}
            images = known["images"]
            if kind != "insert":
                event["fullDocumentBeforeChange"] = before if images else None
            if kind != "delete":
                event["fullDocument"] = after if images or kind != "update" else None
        self.oplog.append((token, self.time, database, bson.encode(event)))

    # ── what a capture asks ─────────────────────────────────────────────────────────────────

    def connect(self, url, **options):
        self.connected = (url, options)
        return Client(self)

    def answer(self, name):
        if self.down:
            raise AutoReconnect("connection closed")
        self.commands.append(name)


class Client:
    def __init__(self, deployment):
        self.deployment = deployment

    def get_database(self, name, codec_options=None):
        return Database(self.deployment, name, codec_options)

    @property
    def admin(self):
        return Database(self.deployment, "admin", None)

    def close(self):
        pass


class Database:
    def __init__(self, deployment, name, codec):
        self.deployment, self.name, self.codec = deployment, name, codec

    def __getitem__(self, name):
        return Collection(self, name)

    def command(self, command, codec_options=None):
        self.deployment.answer(command)
        if command == "hello":
            name = self.deployment.set_name
            return {"ok": 1.0, **({"setName": name} if name else {})}
        if command == "buildInfo":
            return {"versionArray": [*self.deployment.version, 0]}
        assert next(iter(command)) == "find"
        return self._find(command, codec_options)

    def _find(self, command, codec):
        assert command["readConcern"] == {"level": "snapshot"}
        assert command["sort"] == {"_id": 1}
        found = self.deployment.collections.get((self.name, command["find"]))
        documents = []
        if found is not None:
            documents = self.deployment.documents(command["find"], self.name)
        elif "hint" in command:
            raise OperationFailure("hint provided does not correspond to an existing index", 2)
        if "min" in command:
            assert command["hint"] == {"_id": 1}
            first = bson_order(plain(command["min"]["_id"]))
            documents = [one for one in documents if bson_order(one["_id"]) >= first]
        documents = [one for one in documents if matches(one, command["filter"])]
        batch = [bson.decode(bson.encode(one), codec) for one in documents[: command["limit"]]]
        return {
            "cursor": {
                "firstBatch": batch,
                "id": 0,
                "atClusterTime": Timestamp(*self.deployment.time),
            }
        }

    def list_collections(self, filter):  # noqa: A002 - the driver's name
        self.deployment.answer("listCollections")
        for (database, name), found in self.deployment.collections.items():
            if database == self.name and filter.get("name", name) == name:
                images = (
                    {"changeStreamPreAndPostImages": {"enabled": True}} if found["images"] else {}
                )
                info = {"readOnly": False, "uuid": Binary(found["uuid"], 4)}
                yield {"name": name, "type": found["kind"], "options": images, "info": info}

    def watch(self, pipeline, **options):
        self.deployment.answer("watch")
        assert options["full_document"] == options["full_document_before_change"] == "whenAvailable"
        assert options["show_expanded_events"]
        return Stream(self, bool(pipeline), options)


class Collection:
    def __init__(self, database, name):
        self.database, self.name = database, name

    def estimated_document_count(self):
        self.database.deployment.answer("count")
        return len(self.database.deployment.collections[self.database.name, self.name]["documents"])

    def find_one(self, where, projection=None, sort=None):
        self.database.deployment.answer("find")
        if self.name == "oplog.rs":
            return {"ts": Timestamp(*self.database.deployment.kept_from)}
        found = self.database.deployment.documents(self.name, self.database.name)
        return next((one for one in found if matches(one, where)), None)


class Stream:
    """A change stream of a database."""

    def __init__(self, database, splits, options):
        self.deployment, self.database, self.splits = database.deployment, database, splits
        self.fragments = []
        since = options.get("start_at_operation_time")
        token = (options.get("start_after") or {}).get("_data")
        if token is not None:
            time = (int(token[2:10], 16), int(token[10:18], 16))
            known = [at for at, one in enumerate(self.deployment.oplog) if one[0] == token]
            if time < self.deployment.kept_from:
                raise OperationFailure("Resume of change stream was not possible", 286)
            if not known and not token.endswith(_HIGH_WATER):
                raise OperationFailure("cannot resume stream; the resume token was not found", 280)
            self.at = known[0] + 1 if known else self._first_after(time)
            self.resume_token = {"_data": token}
        else:
            time = (since.time, since.inc)
            self.at = self._first_after((time[0], time[1] - 1))
            self.resume_token = {"_data": f"82{time[0]:08X}{time[1]:08X}{_HIGH_WATER}"}

    def _first_after(self, time):
        return sum(one[1] <= time for one in self.deployment.oplog)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        pass

    def try_next(self):
        if self.deployment.down:
            raise AutoReconnect("connection closed")
        while not self.fragments and self.at < len(self.deployment.oplog):
            token, _, database, data = self.deployment.oplog[self.at]
            self.at += 1
            if database == self.database.name:
                self.fragments = self._divided(token, data)
        if not self.fragments:
            seconds, number = self.deployment.time
            self.resume_token = {"_data": f"82{seconds:08X}{number:08X}{_HIGH_WATER}"}
            return None
        event = bson.decode(self.fragments.pop(0), self.database.codec)
        self.resume_token = event["_id"]
        return event

    def _divided(self, token, data):
        limit = self.deployment.split_over
        if limit is None or len(data) <= limit or not self.splits:
            return [data]
        fields = [(k, v) for k, v in bson.decode(data, self.database.codec).items() if k != "_id"]
        return [
            bson.encode(
                {
                    "_id": {"_data": token + f"F{at}"},
                    "splitEvent": {"fragment": at, "of": len(fields)},
                    name: value,
                }
            )
            if at < len(fields)
            else bson.encode(
                {"_id": {"_data": token}, "splitEvent": {"fragment": at, "of": at}, name: value}
            )
            for at, (name, value) in enumerate(fields, 1)
        ]


def plain(value):
    """Return a value as the documents here have it."""
    return bson.decode(bson.encode({"v": value}))["v"]


def matches(document, where):
    for name, wanted in where.items():
        if isinstance(wanted, dict):
            for operator, bound in wanted.items():
                if operator != "$gt":
                    raise OperationFailure(f"unknown operator: {operator}", 2)
                if not (name in document and document[name] > bound):
                    return False
        elif document.get(name) != wanted:
            return False
    return True
