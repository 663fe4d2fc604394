"""What this process may use of its machine."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_MIB = 1 << 20


def cores_available() -> int:
    """Return how many cores this process may use: its affinity, and a container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _control_group("cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(cores, 1)


def memory_mib() -> int:
    """Return the memory that this process may use, in MiB: the machine's, or a container's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _control_group("memory.max").strip()
    return min(memory, int(limit) if limit.isdigit() else memory) // _MIB


def _control_group(name: str) -> str:
    """Return what Linux says about the limits of this process's container, or nothing."""
    with contextlib.suppress(OSError):
        return Path("/sys/fs/cgroup", name).read_text()
    return ""
