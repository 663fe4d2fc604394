"""The lane of hashes of one bit: nearly every key shares its hash, and the place of its bucket."""

import pytest
from truncated_hashes import cut


def apply(patch: pytest.MonkeyPatch) -> None:
    """Cut the hashes of keys to their highest bit."""
    cut(patch, bits=1)
