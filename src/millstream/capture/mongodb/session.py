"""Connections to a MongoDB deployment: what is asked of it, and its errors as ours.

Chunks of a snapshot are read with the read concern ``snapshot``: the server says at which cluster time the documents were
so. No document and no collection is locked. Source: MongoDB's manual, "Read Concern snapshot", "find".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from bson import Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import MongoClient
from pymongo.errors import ConfigurationError, InvalidURI, OperationFailure, PyMongoError

from millstream.capture.mongodb.address import MongoDbAddress
from millstream.capture.mongodb.events import ClusterTime, Document, token_time, uuid_text
from millstream.capture.mongodb.values import parsed_id, stored_id
from millstream.errors import ConfigError, ConflictError, MillstreamError, RetriableError

Connect: TypeAlias = Callable[..., Any]
BATCH_DOCUMENTS = 1000
_AWAIT_MS = 500
_TIMEOUT_MS = 10_000
_CODEC: CodecOptions[dict[str, Any]] = CodecOptions(
    document_class=dict, datetime_conversion=DatetimeConversion.DATETIME_MS
)
_DENIED = frozenset((13, 18, 8000))
# CappedPositionLost, InvalidResumeToken, ChangeStreamFatalError, ChangeStreamHistoryLost
_LOST = frozenset((136, 260, 280, 286))
_NOWHERE = "_millstream_none"  # no collection: reading it gives the time alone
_ALTERED = frozenset((2, 17, 26))  # BadValue of a hint, as the index is gone; NamespaceNotFound
_SPLITS_EVENTS = (6, 0, 9)


class CollectionAlteredError(RetriableError):
    """A collection was dropped while a snapshot read it."""


@dataclass(frozen=True, slots=True)
class FoundCollection:
    """A collection as the server lists it. ``with_images``: it records documents before and after changes."""

    name: str
    uuid: str
    with_images: bool


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """Documents of a collection as they were at ``time``, in the order of their ``_id``; at its end there are none."""

    time: ClusterTime
    documents: list[Document]

    @property
    def last(self) -> str | None:
        """The ``_id`` that reading goes on after; None at the end of the collection."""
        return stored_id(self.documents[-1]["_id"]) if self.documents else None


@contextmanager
def mongodb_errors(address: MongoDbAddress) -> Iterator[None]:
    """Turn what the driver raises into errors of ours, which never hold the password."""
    try:
        yield
    except MillstreamError:
        raise
    except (ConfigurationError, InvalidURI) as error:
        raise ConfigError(
            f"the address {address.shown} cannot be used: {address.redacted(str(error))}. Correct it."
        ) from None
    except OperationFailure as error:
        raise _translated(error, address) from None
    except PyMongoError as error:
        raise RetriableError(
            f"{address.shown} does not respond as it should: {address.redacted(str(error))[:500]}. It is tried again."
        ) from None


def _translated(error: OperationFailure, address: MongoDbAddress) -> MillstreamError:
    details = error.details or {}
    text = address.redacted(str(details.get("errmsg") or error))[:500]
    if error.code in _DENIED:
        return ConfigError(
            f"{address.shown} refuses: {text}. Correct the user or password, or grant the role read on the database: "
            f'db.grantRolesToUser("…", [{{role: "read", db: "{address.database}"}}]).'
        )
    if error.code in _LOST:
        return ConflictError(
            f"{address.shown} cannot go on after the place that capture stopped at: {text}. Its oplog no longer has it, or "
            "it is another deployment. Changes are missing: capture under a new name (--name), which begins with a new "
            "snapshot."
        )
    if error.code in _ALTERED:
        return CollectionAlteredError(f"{address.shown}: {text}. The collection is read again.")
    return RetriableError(f"{address.shown}: {text} (error {error.code}). It is tried again.")


class MongoDbSession:
    """A connection to one database; use it in ``with``.

    Args:
        connect: What opens a client, as ``pymongo.MongoClient`` does.

    Raises:
        RetriableError: from any call: the deployment does not respond.
        ConfigError: from any call: it refuses the user, or the address cannot be used.
    """

    def __init__(self, address: MongoDbAddress, connect: Connect = MongoClient) -> None:
        self.address = address
        options: dict[str, Any] = {"password": address.password} if address.password else {}
        with mongodb_errors(address):
            self._client = connect(
                address.url,
                appname="millstream capture",
                serverSelectionTimeoutMS=_TIMEOUT_MS,
                connectTimeoutMS=_TIMEOUT_MS,
                readConcernLevel="majority",
                **({"username": address.user} if options else {}),
                **options,
            )
            self._database = self._client.get_database(address.database, codec_options=_CODEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, command: str) -> dict[str, Any]:
        """Return the answer to a command without parameters: ``hello``, ``buildInfo``."""
        with mongodb_errors(self.address):
            return dict(self._client.admin.command(command))

    def version(self) -> tuple[int, ...]:
        """Return the server's version as numbers."""
        numbers = self.ask("buildInfo")["versionArray"]
        return tuple(int(number) for number in numbers[:3])

    def now(self) -> ClusterTime:
        """Return a time up to which all changes are committed by the majority, and are in every snapshot from now on.

        The time of the last operation would not do: a snapshot may be of an earlier one.
        """
        return self.read_chunk(_NOWHERE, None, 1, {}).time

    def collections(self) -> list[FoundCollection]:
        """Return the collections of the database, without views, time series and the server's own."""
        return [found for _, found in self._listed({}) if found is not None]

    def listed(self, name: str) -> tuple[str, FoundCollection | None]:
        """Return what has a name, "" for nothing, and the collection if it is one."""
        return next(self._listed({"name": name}), ("", None))

    def _listed(self, only: Mapping[str, Any]) -> Iterator[tuple[str, FoundCollection | None]]:
        with mongodb_errors(self.address):
            rows = list(self._database.list_collections(filter=only))
        for row in rows:
            name, kind = row["name"], row.get("type", "collection")
            if kind != "collection" or name.startswith("system."):
                yield kind, None
                continue
            uuid = uuid_text(row.get("info", {}).get("uuid"))
            yield kind, FoundCollection(name, uuid, _has_images(row))

    def count(self, collection: str) -> int:
        """Return about how many documents a collection has."""
        with mongodb_errors(self.address):
            return int(self._database[collection].estimated_document_count())

    def read_chunk(
        self, collection: str, after: str | None, limit: int, where: Mapping[str, Any]
    ) -> DocumentChunk:
        """Return the next documents of a collection, in the order of ``_id``, with a condition.

        Args:
            after: The ``last`` of the chunk before, None for the first one.

        Raises:
            CollectionAlteredError: the collection is gone.
        """
        command: dict[str, Any] = {"find": collection, "filter": dict(where), "sort": {"_id": 1}}
        # A condition `_id > x` would find those of the type of x alone. The bound of an index is inclusive.
        first = None if after is None else parsed_id(after)
        if after is not None:
            limit += 1
            command |= {"min": {"_id": first}, "hint": {"_id": 1}}
        command |= {
            "limit": limit,
            "batchSize": limit,
            "singleBatch": True,
            "readConcern": {"level": "snapshot"},
        }
        with mongodb_errors(self.address):
            found = self._database.command(command, codec_options=_CODEC)["cursor"]
        documents = list(found["firstBatch"])
        if after is not None and documents and stored_id(documents[0]["_id"]) == after:
            del documents[0]
        return DocumentChunk(ClusterTime.of(found["atClusterTime"]), documents)

    def check_filter(self, collection: str, where: Mapping[str, Any]) -> None:
        """Return if documents can be found by a condition; else raise what the server says."""
        with mongodb_errors(self.address):
            self._database[collection].find_one(dict(where))

    def watch(self, *, after: Document | None = None, since: ClusterTime | None = None) -> Any:
        """Return the change stream of the database, from behind a token, or the first change after a time."""
        pipeline: list[dict[str, Any]] = []
        if self.version() >= _SPLITS_EVENTS:
            pipeline.append({"$changeStreamSplitLargeEvent": {}})
        start: dict[str, Any] = {"start_after": after}
        if since is not None:
            start = {"start_at_operation_time": Timestamp(since.seconds, since.number + 1)}
        with mongodb_errors(self.address):
            return self._database.watch(
                pipeline,
                full_document="whenAvailable",
                full_document_before_change="whenAvailable",
                show_expanded_events=True,
                max_await_time_ms=_AWAIT_MS,
                batch_size=BATCH_DOCUMENTS,
                **start,
            )

    def oplog_start(self) -> ClusterTime | None:
        """Return from where on changes are kept; None where this user may not look."""
        with mongodb_errors(self.address):
            oplog = self._client.get_database("local", codec_options=_CODEC)["oplog.rs"]
            try:
                first = oplog.find_one({}, {"ts": 1}, sort=[("$natural", 1)])
            except OperationFailure:
                return None
        return None if first is None else ClusterTime.of(first["ts"])


def _has_images(listed: Mapping[str, Any]) -> bool:
    images = listed.get("options", {}).get("changeStreamPreAndPostImages") or {}
    return bool(images.get("enabled"))


def stream_time(stream: Any) -> ClusterTime | None:
    """Return up to which time a stream has read that has nothing more at the moment."""
    return token_time(stream.resume_token or {})
