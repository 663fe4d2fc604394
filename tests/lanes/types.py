"""The lane of types: every type of polars as key, value and time, with every operator and sink."""

import every_type
import pytest


def apply(patch: pytest.MonkeyPatch) -> None:
    """Take all cases of the types, not a share of them."""
    patch.setattr(every_type, "EVERY", 1)
