"""The name of a run of state: that of its object, ``@`` and the position in a bundle, ``~`` and the checksum of its bytes."""

from __future__ import annotations

from typing import NamedTuple, Self

from millstream.object_store.store import Extent

_AT = "@"  # between a bundle's name and a run's position in it
_CHECK = "~"  # before a checksum


class RunName(NamedTuple):
    """Where a run is. ``position`` is None of a run that has an object of its own."""

    object: str
    position: int | None = None
    checksum: int | None = None

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return what a run's name says."""
        place, _, checksum = name.partition(_CHECK)
        stored, _, position = place.partition(_AT)
        return cls(
            stored,
            int(position) if position else None,
            int(checksum, 16) if checksum else None,
        )

    @property
    def text(self) -> str:
        """The name as manifests have it."""
        at = "" if self.position is None else f"{_AT}{self.position}"
        check = "" if self.checksum is None else f"{_CHECK}{self.checksum:08x}"
        return f"{self.object}{at}{check}"

    def extent(self, size_bytes: int) -> Extent:
        """Return which bytes of its object a run of that size has."""
        whole = self.position is None
        return Extent(self.position or 0, size_bytes, whole=whole, checksum=self.checksum)
