"""Aggregates: the state of a stream, folded from an aggregate snapshot and the events after it.

An aggregate snapshot is a shortcut, never the truth. It is used only if the code that folded it is the code
of today: the decider, the events and their upcasters. Else the stream is folded from its first event, and
the next snapshot is of today's code.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.code_digest import code_digest, digest
from millstream.sourcing.decider import DeciderLike, is_frozen
from millstream.sourcing.event_types import EventTypes
from millstream.sourcing.json_form import ENCODER, decoder_of, difference_of
from millstream.sourcing.partition_log import PartitionLog
from millstream.sourcing.state_twins import are_twins
from millstream.sourcing.stored_event import LogPosition, RawEvent, SourcedEvent
from millstream.sourcing.stream_index import EventRun, StoredSnapshot, StreamIndex

# Offsets of others between two events that are read with them. Measured: a new read takes as long as skipping
# 700 records of 200 bytes.
READ_THROUGH = 500


@dataclass(slots=True)
class FoldedStream:
    """The state of one stream at a version. ``timestamp_ms`` is that of its last event."""

    version: int
    state: Any
    timestamp_ms: int = 0


def copy_of(aggregate: FoldedStream) -> FoldedStream | None:
    """Return a copy that no change in place of the other reaches; None where there is none, or none is needed.

    A copy that does not equal its original may be decided on otherwise, so it is none: of a class without ``__eq__``, or of
    something that is itself by identity. Nor is one that lacks or shares something: see `state_twins.py`.
    """
    if is_frozen(aggregate.state):
        return None
    with suppress(Exception):  # what a user's class does when it is copied or compared
        state = deepcopy(aggregate.state)
        if are_twins(aggregate.state, state) and bool(state == aggregate.state):
            return replace(aggregate, state=state)
    return None


class AggregateCache:
    """The aggregates used last. One thread at a time."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._found: OrderedDict[str, FoldedStream] = OrderedDict()

    def get(self, stream_id: str) -> FoldedStream | None:
        """Return the aggregate of a stream, if it is here."""
        found = self._found.get(stream_id)
        if found is not None:
            self._found.move_to_end(stream_id)
        return found

    def put(self, stream_id: str, aggregate: FoldedStream) -> None:
        """Keep an aggregate, and drop the one that was used longest ago if there are too many."""
        self._found[stream_id] = aggregate
        self._found.move_to_end(stream_id)
        if len(self._found) > self._count_max:
            self._found.popitem(last=False)

    def drop(self, stream_ids: Iterable[str]) -> None:
        """Forget these."""
        for stream_id in stream_ids:
            self._found.pop(stream_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()


class Folding:
    """Folds the streams of one partition. Thread-safe.

    Args:
        snapshot_every: Keep an aggregate snapshot each time that so many events were added; none if None.
    """

    def __init__(
        self,
        log: PartitionLog,
        index: StreamIndex,
        decider: DeciderLike,
        events: EventTypes,
        snapshot_every: int | None,
    ) -> None:
        self.log, self._index = log, index
        self._decider, self._events = decider, events
        self._every = snapshot_every
        self._code = ""
        if snapshot_every is not None:
            state = getattr(decider, "state", None)
            if state is None or snapshot_every < 1:
                raise ConfigError(
                    f"aggregate snapshots every {snapshot_every} events need the type of the state; give "
                    "the decider a `state`, such as Decider(..., state=CartState), and 1 event or more"
                )
            self._decode_state = decoder_of(state)
            parts = [code_digest(decider.initial), code_digest(decider.evolve), events.digest()]
            parts.append(code_digest(state) if isinstance(state, type) else repr(state))
            self._code = digest(json.dumps(parts))

    def load(self, stream_id: str, until_version: int | None = None) -> FoldedStream:
        """Return an aggregate, at its last version or at an earlier one.

        Raises:
            ConfigError, UserCodeError: an event cannot be read; see :meth:`EventTypes.decode`.
        """
        found = self._from_snapshot(stream_id, until_version)
        if found is None:
            found = FoldedStream(0, self._decider.initial())
        self.fold(found, self.raw_events(stream_id, found.version, until_version))
        return found

    def fold(self, aggregate: FoldedStream, events: Iterable[RawEvent]) -> None:
        """Bring an aggregate up to the last of these events; see :meth:`evolve`."""
        direct, evolve = self._events.direct, self._decider.evolve
        state, version, event = aggregate.state, aggregate.version, None
        for event in events:
            version += 1
            if event.version != version:
                raise self._gap(event, version - 1)
            decode = direct.get((event.type, event.schema))
            try:
                data = decode(event.fields) if decode else self.data_of(event)
            except Exception:  # noqa: BLE001 - the long way names the event and its place
                data = self.data_of(event)
            state = evolve(state, data)
        if event is not None:
            aggregate.state, aggregate.version = state, version
            aggregate.timestamp_ms = event.timestamp_ms

    def evolve(self, aggregate: FoldedStream, event: RawEvent) -> None:
        """Bring an aggregate one event further.

        Raises:
            CorruptionError: the event is not the next one.
        """
        self.fold(aggregate, (event,))

    def _gap(self, event: RawEvent, version: int) -> CorruptionError:
        return CorruptionError(
            f"stream {event.stream_id!r} is at version {version}, and its next event, at "
            f"{self.place(event)}, has version {event.version}: events were deleted from the topic. "
            "Restore it from a backup"
        )

    def raw_events(
        self, stream_id: str, after: int = 0, until: int | None = None
    ) -> Iterator[RawEvent]:
        """Yield the events of a stream with versions in (after, until], without a scan of the partition."""
        for runs in _neighbours(self._index.runs(stream_id, after)):
            start, end = runs[0].first_offset, runs[-1].first_offset + runs[-1].length
            for event in self.log.read(start, end, runs):
                if event.stream_id != stream_id or event.version <= after:
                    continue
                if until is not None and event.version > until:
                    return
                yield event

    def data_of(self, event: RawEvent) -> Any:
        """Return the event as an object of its class."""
        return self._events.decode(event.type, event.schema, event.fields, self.place(event))

    def place(self, event: RawEvent) -> str:
        """Name the place of an event, for errors."""
        return f"offset {event.offset} of {self.log.topic}/{self.log.partition}"

    def sourced(self, event: RawEvent) -> SourcedEvent:
        """Return the event as users get it."""
        return SourcedEvent(
            event.stream_id,
            event.version,
            event.type,
            self.data_of(event),
            LogPosition(self.log.partition, event.offset + 1),
            event.recorded_at,
            event.metadata,
        )

    # -- aggregate snapshots ------------------------------------------------------------------

    def keep_snapshot(
        self, stream_id: str, before: int, aggregate: FoldedStream, forgets: str
    ) -> None:
        """Keep a snapshot if the aggregate has passed a multiple of ``snapshot_every`` since ``before``.

        Args:
            forgets: What :meth:`EventTypes.forgets` was before the aggregate was folded: a subject who was
                forgotten since may be in its state.
        """
        if self._every is None or aggregate.version // self._every == before // self._every:
            return
        self.put_snapshot(stream_id, aggregate, forgets)

    def put_snapshot(self, stream_id: str, aggregate: FoldedStream, forgets: str) -> None:
        """Keep a snapshot.

        Raises:
            ConfigError: the state has no form in JSON, or would be read as another one than it is.
        """
        try:
            state = ENCODER.encode(aggregate.state).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the state of stream {stream_id!r} cannot be written as JSON, for an aggregate snapshot: "
                f"{error}. Change its type, or open the store without snapshot_every"
            ) from error
        if not self._is_read_back(aggregate.state, state):
            raise ConfigError(
                f"the state of stream {stream_id!r} would be read from an aggregate snapshot as another one than it "
                "is: no snapshot is kept. Give the decider the `state` that it has, down to keys and items, such as "
                "dict[int, str], with fields that its class takes, or open the store without snapshot_every"
            )
        code = self._code_with(forgets)
        kept = StoredSnapshot(aggregate.version, aggregate.timestamp_ms, code, state)
        self._index.put_snapshot(stream_id, kept)

    def _is_read_back(self, state: Any, written: bytes) -> bool:
        try:
            again = self._decode_state(json.loads(written))
            same = type(again) is type(state) and again == state
            # A class may call equal what has other fields, such as an entity with the same id.
            return bool(same) and difference_of(again, state) is None
        except Exception:  # noqa: BLE001 - it is not, then
            return False

    def _from_snapshot(self, stream_id: str, until: int | None) -> FoldedStream | None:
        if self._every is None:
            return None
        kept = self._index.snapshot(stream_id)
        if (
            kept is None
            or kept.code != self._code_today()
            or (until is not None and kept.version > until)
        ):
            return None
        return FoldedStream(
            kept.version, self._decode_state(json.loads(kept.state)), kept.timestamp_ms
        )

    def _code_today(self) -> str:
        return self._code_with(self._events.forgets())

    def _code_with(self, forgets: str) -> str:
        """Name what a snapshot is of: the code, and which subjects were forgotten until then."""
        return f"{self._code}-{forgets}"

    def has_snapshot(self, stream_id: str) -> bool:
        """Return whether there is a snapshot by today's code."""
        return self._from_snapshot(stream_id, None) is not None

    def fault_of_snapshot(self, stream_id: str) -> str | None:
        """Compare the snapshot of a stream with a full fold; return what is wrong with it, or None."""
        kept = self._from_snapshot(stream_id, None)
        if kept is None:
            return None
        full = FoldedStream(0, self._decider.initial())
        self.fold(full, self.raw_events(stream_id, 0, kept.version))
        if full.version != kept.version:
            return (
                f"the snapshot is at version {kept.version}, and the stream ends at {full.version}"
            )
        if ENCODER.encode(full.state) != ENCODER.encode(kept.state):
            # Without values, which may be personal.
            what = difference_of(kept.state, full.state) or "it has another form"
            return f"at version {kept.version} the snapshot is not what a full fold is: {what}"
        return None


def _neighbours(runs: Sequence[EventRun]) -> Iterator[Sequence[EventRun]]:
    """Yield the runs in groups, between which there is more than is worth reading through."""
    first = 0
    for at in range(1, len(runs) + 1):
        before = runs[at - 1]
        end = before.first_offset + before.length
        if at == len(runs) or runs[at].first_offset - end > READ_THROUGH:
            yield runs[first:at]
            first = at
