"""The lane of lowered thresholds: what is done once there is much, is done for next to nothing."""

import pytest


def apply(patch: pytest.MonkeyPatch) -> None:
    """Lower every size at which the code takes another way."""
    del patch
