"""Settings of the C library for freed memory.

The broker allocates and frees responses of megabytes all the time. By default, glibc returns each to the
system and allocates the next anew, so that every page of it is cleared and mapped again, which takes
longer than reading the records into it.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # their numbers in glibc's malloc.h


def retain_freed_memory(bytes_max: int) -> bool:
    """Let this process keep up to ``bytes_max`` of the memory that each of its threads frees.

    Allocations up to that size then reuse it. glibc does the same by itself once an allocation of that
    size was freed. For a process that is a broker and nothing else.

    Returns:
        Whether the C library of this machine has these settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    done = [mallopt(setting, bytes_max) for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)]
    return all(done)
