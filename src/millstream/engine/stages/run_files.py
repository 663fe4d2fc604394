"""Sorted runs as objects of a folder or an object store, named by the manifests that are committed with the views.

A run never changes, so a file serves as well as rows of Spark's state store would, and costs a tenth: it
is written once, where that store writes a changelog, a memtable and files that are rewritten, uploaded, and
read as a whole after a start. A large run is an object of its own. The small runs that a task makes in a batch
share one object, a *bundle*, and are named by their position in it. So a batch costs each task at most one
sync of a file or one request, and small state has few objects.

1. An object is durable (a file and its folder are synced, an upload is acknowledged) before the manifest that
   names it goes to the driver. A crash before leaves an object that no manifest names: the next run of the app
   removes it.
2. The state store commits the manifests with the batch's rows. A crash before leaves the manifests of the
   batch before, whose objects are all there: the batch is run again, and writes its objects again.
3. After that commit, objects that no manifest names any more are removed. A crash before leaves such objects:
   the next run removes them.
4. An object's name begins with the number of the app's run that made it. A sweep removes only objects of earlier
   runs, and a run removes replaced ones only after a commit of its own. So an old run that wakes up while
   a newer one works does no harm: its commit is refused. What it puts meanwhile is for the run after.

`object_store/run_names.py` says how a run is named.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import pyarrow as pa

from millstream.kernels.state.sorted_runs import Run, decode_run, encode_run, write_run
from millstream.object_store.cached import checksum_of
from millstream.object_store.run_names import RunName
from millstream.object_store.store import Loaded, ObjectStore

OWN_FILE_BYTES_MIN = 256 << 10  # smaller runs share a bundle
_ALIGNMENT_BYTES = 64  # of a table that Arrow uses in place


@dataclass
class _RunCache:
    """Runs that this process has opened, newest last. A run never changes, so neither does its entry."""

    count_max: int
    bytes_max: int
    tables: OrderedDict[str, pa.Table] = field(default_factory=OrderedDict)
    bytes: int = 0

    def get(self, key: str) -> pa.Table | None:
        if key not in self.tables:
            return None
        self.tables.move_to_end(key)
        return self.tables[key]

    def put(self, key: str, table: pa.Table) -> None:
        self.forget(key)
        self.tables[key] = table
        self.bytes += table.nbytes
        while len(self.tables) > self.count_max or self.bytes > self.bytes_max:
            self.forget(next(iter(self.tables)))

    def forget(self, key: str) -> None:
        table = self.tables.pop(key, None)
        if table is not None:
            self.bytes -= table.nbytes


_mapped = _RunCache(count_max=256, bytes_max=1 << 62)  # each takes a file descriptor, and no memory
_copied = _RunCache(count_max=8192, bytes_max=64 << 20)


@dataclass
class RunFiles:
    """The runs that one task reads and writes in one batch. ``run`` is the number of the app's run.

    Nothing is durable before :meth:`sync`.
    """

    store: ObjectStore
    run: int
    _bundle: str = ""
    _waiting: dict[str, bytes] = field(default_factory=dict)  # what the bundle will hold, in order
    _waiting_bytes: int = 0

    def load(self, run: Run) -> pa.Table:
        """Return a run's rows; a large run is mapped into memory.

        Raises:
            CorruptionError: its object is missing, incomplete, or another.
        """
        key = self._key(run.name)
        table = _mapped.get(key)
        if table is None:
            table = _copied.get(key)
        if table is None:
            loaded = self._fetch(run)
            table = decode_run(loaded.data)
            (_mapped if loaded.mapped else _copied).put(key, table)
        return table

    def save(self, slot: int, table: pa.Table) -> Run:
        """Write a run. It is durable once :meth:`sync` has returned."""
        if table.nbytes >= OWN_FILE_BYTES_MIN:
            name = self._new_name()
            stored = self.store.put(name, lambda file: write_run(table, file))
            named = RunName(name, None, stored.checksum)
            return Run(named.text, slot, table.num_rows, stored.size_bytes)
        encoded = encode_run(table)
        name = self._append_to_bundle(encoded)
        _copied.put(self._key(name), decode_run(pa.py_buffer(encoded)))
        return Run(name, slot, table.num_rows, len(encoded))

    def drop(self, run: Run) -> None:
        """Forget a run; its object stays until the batch is committed."""
        for opened in (_mapped, _copied):
            opened.forget(self._key(run.name))

    def sync(self) -> None:
        """Write the bundle, and wait until all runs of the batch's manifests are durable."""
        if self._waiting:
            runs = map(_padded, self._waiting.values())
            self.store.put(self._bundle, lambda file: file.writelines(runs))
            self._waiting, self._waiting_bytes, self._bundle = {}, 0, ""
        self.store.sync()

    def _append_to_bundle(self, encoded: bytes) -> str:
        self._bundle = self._bundle or self._new_name()
        checksum = checksum_of(pa.py_buffer(encoded)) if self.store.checksums else None
        name = RunName(self._bundle, self._waiting_bytes, checksum).text
        self._waiting[name] = encoded
        self._waiting_bytes += len(encoded) + _padding_bytes(encoded)
        return name

    def _new_name(self) -> str:
        return f"{self.run}-{uuid.uuid4().hex[:20]}"

    def _key(self, name: str) -> str:
        return f"{self.store.url}/{name}"

    def _fetch(self, run: Run) -> Loaded:
        if run.name in self._waiting:  # written by this task, and no longer in the cache
            return Loaded(pa.py_buffer(self._waiting[run.name]), mapped=False)
        name = RunName.parse(run.name)
        return self.store.read(name.object, name.extent(run.size_bytes))


def _padding_bytes(encoded: bytes) -> int:
    return -len(encoded) % _ALIGNMENT_BYTES


def _padded(encoded: bytes) -> bytes:
    return encoded + bytes(_padding_bytes(encoded))


def object_name(run_name: str) -> str:
    """Return the name of the object that a run is in."""
    return RunName.parse(run_name).object


@dataclass
class ObjectsInUse:
    """Which objects the committed manifests name, and how often."""

    store: ObjectStore
    named: Counter[str] = field(default_factory=Counter)

    def replace_manifest(self, before: Iterable[str], after: Iterable[str]) -> None:
        """Replace the runs of one manifest: see :meth:`replace_manifests`."""
        self.replace_manifests([(before, after)])

    def replace_manifests(self, pairs: Iterable[tuple[Iterable[str], Iterable[str]]]) -> None:
        """Replace the runs of manifests, and remove the objects that no manifest names any more.

        Call it once the new manifests are committed.
        """
        pairs = [(Counter(map(object_name, old)), map(object_name, new)) for old, new in pairs]
        for _, after in pairs:
            self.named.update(after)
        for before, _ in pairs:
            self.named.subtract(before)
        lost = dict.fromkeys(chain.from_iterable(before for before, _ in pairs))
        gone = [name for name in lost if self.named[name] <= 0]
        for name in gone:
            del self.named[name]
        self.store.delete(gone)

    def sweep(self, run: int) -> None:
        """Remove objects of earlier runs of the app that no manifest names."""
        unnamed = [
            name
            for name in self.store.names()
            if _run_number(name) < run and name not in self.named
        ]
        self.store.delete(unnamed)


def _run_number(name: str) -> float:
    number = name.partition("-")[0]
    return int(number) if number.isdigit() else float("inf")
