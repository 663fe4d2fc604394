"""What a rescale has to know of an operator's state, where it is more than rows that are found by the hash of their key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StateLayout:
    """The families of an operator's state that are not only rows of keys.

    ``numbered``: a value that counts the numbers given out in a bucket, and the families whose rows have these numbers.
    ``appended``: the families of :class:`~millstream.kernels.state.appended_rows.AppendedRows`. ``filters``: families of
    which no part can be taken, such as Bloom filters; other buckets have copies. ``sets``: the beginning of the
    names of families whose slots are spaces of numbers, and the values with the counter and the starts of the spaces.
    """

    numbered: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    appended: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    sets: tuple[str, str, str] | None = None


OperatorMessage = dict[str, Any]
"""An operator's part of a manifest: see ``OperatorState.to_message`` and :mod:`millstream.kernels.stage`."""
