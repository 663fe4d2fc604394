"""How many examples Hypothesis draws: what a test asks for, or the share of it that a run asks for."""

import os

PERCENT = int(os.environ.get("MILLSTREAM_TEST_EXAMPLES_PERCENT", "100"))


def some(count: int) -> int:
    """Return the share of ``count`` that this run draws; each run draws others."""
    return max(5, count * PERCENT // 100)
