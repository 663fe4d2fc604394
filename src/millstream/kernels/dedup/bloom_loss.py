"""What Bloom filters cost: memory against the rate of false positives against events lost.

A false positive is a new event that is taken for a repeat and lost. Of memory, rate and the number
of ids held, any two give the third. With G generations of ``rotate`` each, a generation holds
``events per second * rotate`` ids, is sized for a G-th of the rate, and G of them are held at once:
one more than the horizon takes, as the oldest is still partly inside it while the newest fills.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.dedup.bloom import bits_for, combined_rate, rate_of

_HASHES_MAX = 64
RATE_MAX = 0.5
RATE_MIN = 1e-18  # below it a false positive is rarer than two ids with one 64-bit hash


def generation_count(horizon_us: int, rotate_us: int) -> int:
    """Return how many generations are asked: those that a horizon can overlap, ``⌈h/r⌉ + 1``."""
    return -(-horizon_us // rotate_us) + 1


@dataclass(frozen=True)
class Loss:
    """What filters of one size cost. Memory is that of all buckets, when all generations are full.

    ``lost_per_…`` are events that are new, and expected to be taken for repeats.
    """

    memory_bytes: int
    fpr: float
    events_per_second: float
    generations: int
    rotate_us: int
    hashes: int
    bits_per_id: float

    @property
    def ids_held(self) -> float:
        """How many ids there are when every generation is full."""
        return self.events_per_second * self.generations * self.rotate_us / 1e6

    @property
    def lost_per_hour(self) -> float:
        return self.fpr * self.events_per_second * 3600

    @property
    def lost_per_day(self) -> float:
        return self.fpr * self.events_per_second * 86_400

    @property
    def lost_per_million(self) -> float:
        return self.fpr * 1e6


def expected_loss(
    *,
    within: Duration,
    events_per_second: float | None = None,
    memory_bytes: int | None = None,
    fpr: float | None = None,
    rotate: Duration | None = None,
) -> Loss:
    """Return the third of event rate, memory and false-positive rate when two are given.

    Args:
        within: The horizon of dedup.
        events_per_second: Different ids a second.
        memory_bytes: What all filters together may take.
        fpr: The false-positive rate of an event, over all generations.
        rotate: The event time of one generation; by default a quarter of ``within``.

    Raises:
        ConfigError: other than two of the three are given, or a number is out of its range.
    """
    generations, rotate_us = _generations(within, rotate)
    given = [value for value in (events_per_second, memory_bytes, fpr) if value is not None]
    if len(given) != 2:
        raise ConfigError(
            f"Of events_per_second, memory and fpr {len(given)} are given. Give two, and the third "
            "is worked out."
        )
    _check_ranges(events_per_second, memory_bytes, fpr)
    seconds_held = generations * rotate_us / 1e6
    if fpr is None:
        assert events_per_second is not None
        assert memory_bytes is not None
        bits_per_id = memory_bytes * 8 / (seconds_held * events_per_second)
        hashes = max(1, min(_HASHES_MAX, round(bits_per_id * math.log(2))))
        one = rate_of(bits_per_id, hashes, 1)
        fpr = max(RATE_MIN, combined_rate(one for _ in range(generations)))
    else:
        hashes = max(1, round(-math.log2(fpr / generations)))
        bits_per_id = bits_for(1, fpr / generations, hashes)
        if events_per_second is None:
            assert memory_bytes is not None
            events_per_second = memory_bytes * 8 / (seconds_held * bits_per_id)
        else:
            memory_bytes = math.ceil(seconds_held * events_per_second * bits_per_id / 8)
    return Loss(memory_bytes, fpr, events_per_second, generations, rotate_us, hashes, bits_per_id)


def _generations(within: Duration, rotate: Duration | None) -> tuple[int, int]:
    within_us = to_us(within, what="within")
    rotate_us = within_us // 4 if rotate is None else to_us(rotate, what="rotate")
    if not 0 < rotate_us <= within_us:
        raise ConfigError(
            f"rotate is {rotate!r} and within is {within!r}. Give a rotate above zero that is not "
            "longer than within."
        )
    return generation_count(within_us, rotate_us), rotate_us


def _check_ranges(
    events_per_second: float | None, memory_bytes: int | None, fpr: float | None
) -> None:
    if events_per_second is not None and not 0 < events_per_second < math.inf:
        raise ConfigError(f"events_per_second is {events_per_second!r}. Give a number above 0.")
    if memory_bytes is not None and memory_bytes < 1:
        raise ConfigError(f"memory is {memory_bytes!r} bytes. Give at least 1.")
    if fpr is not None and not RATE_MIN <= fpr <= RATE_MAX:
        raise ConfigError(
            f"fpr is {fpr!r}. Give a rate from {RATE_MIN} to {RATE_MAX}, such as 1e-4."
        )
