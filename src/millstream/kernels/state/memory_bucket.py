"""The state of a stage in one bucket, in memory: for tests, and for a replay that nothing is kept of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from millstream.kernels.state.journal import MemoryJournal
from millstream.kernels.state.sorted_runs import MemoryRunStore


@dataclass
class MemoryBucketState:
    """The state of one stage in one bucket, in memory, and the journals of the batch.

    Names of new runs begin with ``prefix`` and the operator's key, so no two operators have one.
    """

    stored: bytes | None = None
    stores: dict[str, MemoryRunStore] = field(default_factory=dict)
    journals: MemoryJournal = field(default_factory=MemoryJournal)
    prefix: str = "m"

    def manifest(self) -> bytes | None:
        return self.stored

    def put_manifest(self, manifest: bytes) -> None:
        self.stored = manifest

    def runs(self, key: str) -> MemoryRunStore:
        return self.stores.setdefault(key, MemoryRunStore(prefix=f"{self.prefix}{key}/"))

    def journal(self, key: str) -> MemoryJournal:
        return replace(self.journals, scope=(*self.journals.scope, key))

    def copy(self) -> MemoryBucketState:
        """Return an independent copy. Runs never change, so they are shared; journals outlive a crash."""
        stores = {
            key: replace(store, tables=dict(store.tables)) for key, store in self.stores.items()
        }
        return replace(self, stores=stores)
