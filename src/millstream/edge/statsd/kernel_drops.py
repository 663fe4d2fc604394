"""Counts datagrams that the kernel dropped because a socket's buffer was full, from /proc."""

from __future__ import annotations

from pathlib import Path

_TABLES = ("udp", "udp6")


def kernel_drops(inode: int, net: Path = Path("/proc/net")) -> int | None:
    """Return how many datagrams were dropped at a socket; None where the kernel does not report it.

    Args:
        inode: Of the socket: ``os.fstat(socket.fileno()).st_ino``.
        net: The folder of the tables; only tests give another one.
    """
    for table in _TABLES:
        try:
            lines = (net / table).read_text().splitlines()
        except OSError:
            continue
        titles = lines[0].split() if lines else []
        for line in lines[1:]:
            fields = line.split()
            # The titles tx_queue and rx_queue, tr and tm->when share a field each.
            if len(fields) >= 13 and titles[-1:] == ["drops"] and fields[9] == str(inode):
                return int(fields[12])
    return None
