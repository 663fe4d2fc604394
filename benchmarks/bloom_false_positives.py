"""How often rotating Bloom filters lose an event: the stated rate beside what is measured.

New ids come evenly over three horizons. Of each rate it is shown what was asked for, the rate as the
operator states it over time (mean over the events, and the largest), how many of the events were
lost, how many lost ones the stated rate lets expect (with four standard deviations), and how many of
the repeats inside the horizon of events that were not lost, sent in between, have passed: none.

    python benchmarks/bloom_false_positives.py [--ids 3000000] [--rates 1e-1 1e-2 1e-3 1e-4]
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import polars as pl
from _measure import table

from millstream import bloom
from millstream.kernels.dedup.operator import FALSE_POSITIVE_RATE, Dedup
from millstream.kernels.frames import TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK

HOUR_US = 3_600_000_000
BATCH_IDS = 20_000


def measure(rate: float, ids: int) -> list[object]:
    step_us = 3 * HOUR_US // ids
    filters = bloom(fpr=rate, rotate="15 minutes", expect=ids // 3)
    rule = filters.rule(HOUR_US, 0, 1)
    kernel = Dedup(
        "dedup",
        ("id",),
        lateness_us=0,
        side_output=False,
        types=("Int64",),
        within_us=HOUR_US,
        bloom=rule,
    )
    state = OperatorState(MemoryRunStore())
    dice = np.random.default_rng(5)
    lost = passed = 0
    kept = np.zeros(ids, np.bool_)
    expected = stated_max = 0.0
    size_max = 0
    before, started = NO_WATERMARK, time.process_time()
    for start in range(0, ids, BATCH_IDS):
        new = np.arange(start, min(ids, start + BATCH_IDS))
        now_us = int(new[-1]) * step_us
        outcome = process(kernel, state, new, new * step_us, before, now_us)
        lost += outcome.counts["duplicate"]
        kept[outcome.rows["id"].to_numpy()] = True
        stated = outcome.gauges[FALSE_POSITIVE_RATE]
        expected += len(new) * stated
        stated_max = max(stated_max, stated)
        oldest = max(0, -(-(now_us - HOUR_US) // step_us))
        again = dice.integers(oldest, int(new[-1]) + 1, BATCH_IDS // 10)
        again = again[kept[again]]
        outcome = process(kernel, state, again, np.full(len(again), now_us), now_us, now_us)
        passed += outcome.counts["emitted"]
        before = now_us
        size_max = max(size_max, state.size_bytes)
    cpu_s = time.process_time() - started
    return [
        f"{rate:g}",
        f"{expected / ids:.3g}",
        f"{stated_max:.3g}",
        f"{lost / ids:.3g}",
        f"{lost:,}",
        f"{expected:,.0f} + {4 * math.sqrt(expected):,.0f}",
        passed,
        f"{size_max * 8 / (ids / 3):.1f}",
        f"{cpu_s / ids * 1e6:.2f}",
    ]


def process(kernel, state, ids, times, before_us, watermark_us):
    rows = pl.DataFrame({"id": ids, TIME: times})
    return kernel.process(state, {0: [rows]}, BatchContext(before_us, watermark_us))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=3_000_000)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-1, 1e-2, 1e-3, 1e-4])
    options = parser.parse_args()
    header = ["asked", "stated", "stated max", "measured", "lost", "expected", "repeats passed"]
    header += ["bits held per id within", "CPU s per million"]
    rows = [measure(rate, options.ids) for rate in options.rates]
    table(f"{options.ids:,} new ids over three horizons, in 5 generations", header, rows)


if __name__ == "__main__":
    main()
