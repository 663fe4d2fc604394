"""What the C library does with memory that is given back.

Answers of megabytes come and go all the time. Left alone, glibc returns each to the system and asks for the
next anew, so that every page of it is found, cleared and mapped again, which takes longer than to read the
records into it.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # their numbers in glibc's malloc.h


def keep_freed(bytes_max: int) -> bool:
    """Let this process keep up to ``bytes_max`` of what each of its threads gives back.

    Larger pieces, up to that size, come out of what is kept. glibc goes as far by itself once a piece of
    that size was given back. For a process that is a broker and nothing else.

    Returns:
        Whether the C library of this machine can be told.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    told = [tell(what, bytes_max) for what in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)]
    return all(told)
