"""A reader of the binary log's bytes: numbers, lengths and texts, each from where the last one ended."""

from __future__ import annotations

from millstream.errors import CorruptionError


class BinlogBuffer:
    """Reads one event's body from front to back.

    Raises:
        CorruptionError: from any call: the body ends before what it announces.
    """

    __slots__ = ("data", "end", "position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position
        self.end = len(data)

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        start = self.position
        stop = start + size
        if stop > self.end:
            raise CorruptionError(
                f"an event of the binary log ends after {self.end} bytes, and says that byte {stop} is "
                "its. The connection or the log is damaged: start the capture again; if it stops here "
                "again, check the log with mariadb-binlog --verify-binlog-checksum."
            )
        self.position = stop
        return self.data[start:stop]

    def little(self, size: int) -> int:
        """Return a number without sign, its lowest byte first."""
        return int.from_bytes(self.take(size), "little")

    def big(self, size: int) -> int:
        """Return a number without sign, its highest byte first."""
        return int.from_bytes(self.take(size), "big")

    def packed(self) -> int:
        """Return a length-encoded number, of 1, 3, 4 or 9 bytes."""
        first = self.little(1)
        if first < 251:
            return first
        if first not in (252, 253, 254):
            raise CorruptionError(
                f"a length in an event of the binary log begins with byte {first}; allowed are 0 to 250 "
                "and 252 to 254. Start the capture again; if it stops here again, the log is damaged."
            )
        return self.little({252: 2, 253: 3, 254: 8}[first])

    def packed_bytes(self) -> bytes:
        """Return bytes that follow their length-encoded number."""
        return self.take(self.packed())

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(self.end - self.position)

    @property
    def at_end(self) -> bool:
        return self.position >= self.end
