"""What an operator keeps between batches, in one bucket of keys, and how the manifest names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.kernels.frames import HASH
from millstream.kernels.state.journal import Journal, MemoryJournal
from millstream.kernels.state.sorted_runs import Owned, RunStore, SortedRuns


@dataclass
class OperatorState:
    """An operator's state in one bucket: families of sorted runs, and small values of JSON kinds.

    Both are in the manifest, which is read and written with every batch: keep the values few. ``journal`` is
    that of the batch which is worked on.
    """

    store: RunStore
    families: dict[str, SortedRuns] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    journal: Journal = field(default_factory=MemoryJournal)

    def runs(
        self,
        family: str,
        counted: str | None = None,
        *,
        signed: bool = False,
        sort_column: str = HASH,
        numbered: str | None = None,
        owned: Owned | None = None,
    ) -> SortedRuns:
        """Return the runs of a family; the operator names its families as it likes.

        The other arguments are as in :class:`SortedRuns`, and must be the same whenever the family is
        asked for.
        """
        runs = self.families.setdefault(family, SortedRuns(self.store))
        runs.counted, runs.signed, runs.sort_column = counted, signed, sort_column
        runs.numbered, runs.owned = numbered, owned
        return runs

    @property
    def size_bytes(self) -> int:
        return sum(runs.size_bytes for runs in self.families.values())

    @property
    def rows(self) -> int:
        return sum(runs.rows for runs in self.families.values())

    def to_message(self) -> dict[str, Any]:
        """Return what the manifest keeps."""
        runs = {name: found.to_message() for name, found in sorted(self.families.items())}
        spent = {
            name: {str(slot): events for slot, events in sorted(found.spent.items())}
            for name, found in sorted(self.families.items())
        }
        unsettled = {
            name: sorted(found.unsettled & found.slots.keys())
            for name, found in sorted(self.families.items())
        }
        message = {
            "runs": {name: found for name, found in runs.items() if found},
            "emitted": {name: slots for name, slots in spent.items() if slots},
            "values": self.values,
        }
        if any(unsettled.values()):
            message["unsettled"] = {name: slots for name, slots in unsettled.items() if slots}
        return message

    @classmethod
    def from_message(
        cls, message: Mapping[str, Any] | None, store: RunStore, journal: Journal | None = None
    ) -> OperatorState:
        journal = journal or MemoryJournal()
        if message is None:
            return cls(store, journal=journal)
        unsettled = message.get("unsettled", {})
        families = {
            name: SortedRuns.from_message(
                found, store, message["emitted"].get(name, {}), unsettled.get(name, ())
            )
            for name, found in message["runs"].items()
        }
        return cls(store, families, message["values"], journal)


def run_names(message: Mapping[str, Any] | None) -> set[str]:
    """Name the runs that an operator's part of a manifest holds on to."""
    return {entry[0] for found in (message or {"runs": {}})["runs"].values() for entry in found}
