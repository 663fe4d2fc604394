"""The lane of hashes of two bits: many keys share a hash, and some do not."""

import pytest
from truncated_hashes import cut


def apply(patch: pytest.MonkeyPatch) -> None:
    """Cut the hashes of keys to their two highest bits."""
    cut(patch, bits=2)
