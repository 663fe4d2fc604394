"""KLL sketches as levels of values: merged and made small again, with coins that repeat.

A value at level *h* stands for 2^h values. While there are more values than the sketch has room for,
the lowest full level is sorted and every second value of it goes up; which of the two is a coin. The
coin is a hash of the level's values, and levels are merged before any is thrown: so a sketch depends on
what is merged alone, and not on the order, the process or the clock.

The bytes are those of DataSketches' ``kll_doubles_sketch``; its ``kll_sketch_impl.hpp`` says what they
are, and how large a level may be.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millstream.kernels.arrays import Float64s
from millstream.kernels.state.keyhash import mix

_EMPTY, _SORTED, _SINGLE = 1, 2, 4
_FAMILY = 15
_LEVEL_MIN = 8  # values
_DEPTH_MAX = 30
_HEAD = struct.Struct("<BBBBHBx")
_COUNTS = struct.Struct("<QHBx")


@dataclass
class Levels:
    """The values of a sketch, by level; ``count`` is how many they stand for."""

    k: int
    count: int = 0
    least: float = 0.0
    most: float = 0.0
    levels: list[Float64s] = field(default_factory=list)

    @classmethod
    def read(cls, image: bytes) -> Levels:
        """Read a sketch.

        Raises:
            ValueError: the bytes are none.
        """
        try:
            return cls._read(image)
        except (struct.error, IndexError) as error:
            raise ValueError(f"they end too soon: {error}") from error

    @classmethod
    def _read(cls, image: bytes) -> Levels:
        _, version, family, flags, k, _ = _HEAD.unpack_from(image)
        if family != _FAMILY or version not in {1, 2} or k < _LEVEL_MIN:
            raise ValueError("they do not begin like one")
        if flags & _EMPTY:
            return cls(k)
        if flags & _SINGLE:
            (value,) = struct.unpack_from("<d", image, _HEAD.size)
            return cls(k, 1, value, value, [np.array([value])])
        count, _, height = _COUNTS.unpack_from(image, _HEAD.size)
        at = _HEAD.size + _COUNTS.size
        starts = [*struct.unpack_from(f"<{height}I", image, at), _room(k, height)]
        at += 4 * height
        least, most = struct.unpack_from("<2d", image, at)
        values = np.frombuffer(image, "<f8", offset=at + 16)
        ends = np.diff(np.array(starts)).cumsum()
        if len(values) != starts[-1] - starts[0] or (np.diff(starts) < 0).any():
            raise ValueError("they are not as long as they say")
        return cls(k, count, least, most, np.split(values, ends[:-1]))

    def take(self, values: Float64s) -> None:
        """Put values in; none of them is not a number."""
        if len(values):
            self._join(len(values), float(values.min()), float(values.max()), [values])

    def merge(self, other: Levels) -> None:
        """Put in what another sketch stands for."""
        if other.count:
            self._join(other.count, other.least, other.most, other.levels)

    def _join(self, count: int, least: float, most: float, levels: Sequence[Float64s]) -> None:
        self.least = min(self.least, least) if self.count else least
        self.most = max(self.most, most) if self.count else most
        self.count += count
        for n, values in enumerate(levels):
            if n == len(self.levels):
                self.levels.append(np.empty(0))
            self.levels[n] = np.concatenate([self.levels[n], values])

    def written(self) -> bytes:
        """Make the sketch small enough, and write it."""
        if not self.count:
            return _HEAD.pack(2, 1, _FAMILY, _EMPTY, self.k, _LEVEL_MIN)
        self._make_small()
        if self.count == 1:
            return _HEAD.pack(2, 2, _FAMILY, _SINGLE, self.k, _LEVEL_MIN) + self.levels[0].tobytes()
        room = _room(self.k, len(self.levels))
        values = np.concatenate(self.levels)
        sizes = [len(level) for level in self.levels]
        starts = np.cumsum([room - len(values), *sizes[:-1]]).astype("<u4")
        return b"".join(
            (
                _HEAD.pack(5, 1, _FAMILY, _SORTED, self.k, _LEVEL_MIN),
                _COUNTS.pack(self.count, self.k, len(self.levels)),
                starts.tobytes(),
                struct.pack("<2d", self.least + 0.0, self.most + 0.0),  # -0.0 becomes 0.0
                values.astype("<f8").tobytes(),
            )
        )

    def _make_small(self) -> None:
        self.levels = [np.sort(level + 0.0) for level in self.levels]  # -0.0 becomes 0.0
        while sum(map(len, self.levels)) > _room(self.k, len(self.levels)):
            height = len(self.levels)
            full = (n for n in range(height) if len(self.levels[n]) >= _width(self.k, height, n))
            self._halve(next(full))

    def _halve(self, n: int) -> None:
        """Send every second value of a level up; of an odd number the least is kept."""
        level = self.levels[n]
        odd = len(level) % 2
        chosen = level[odd + _coin(level, n) :: 2]
        self.levels[n] = level[:odd]
        if n + 1 == len(self.levels):
            self.levels.append(np.empty(0))
        self.levels[n + 1] = np.sort(np.concatenate([self.levels[n + 1], chosen]))


def _coin(values: Float64s, level: int) -> int:
    with np.errstate(over="ignore"):
        words = mix(values.view(np.uint64) + np.uint64(level)).sum(dtype=np.uint64)
    return int(mix(words.reshape(1))[0] >> np.uint64(63))


def _width(k: int, height: int, level: int) -> int:
    """Return the number of values with which a level is full: two thirds of that of the one above."""
    depth = height - level - 1
    if depth > _DEPTH_MAX:  # in two steps, each rounded, as DataSketches does
        return max(_LEVEL_MIN, _two_thirds(_two_thirds(k, depth // 2), depth - depth // 2))
    return max(_LEVEL_MIN, _two_thirds(k, depth))


def _two_thirds(k: int, times: int) -> int:
    thirds: int = 3**times
    return (((k << 1 << times) // thirds) + 1) >> 1


def _room(k: int, height: int) -> int:
    return sum(_width(k, height, level) for level in range(height))
