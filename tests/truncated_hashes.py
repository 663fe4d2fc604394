"""Hashes of keys cut short, so that keys collide: what takes a hash for a key then gives wrong answers."""

import importlib
import pkgutil

import numpy as np
import pytest

from millstream import kernels
from millstream.kernels.state import keyhash


def not_when_cut(why: str) -> list[pytest.MarkDecorator]:
    """Mark tests that go by whole hashes."""
    lanes = ("one_bit_hashes", "two_bit_hashes")
    return [pytest.mark.not_in_lane(lane, why) for lane in lanes]


def cut(patch: pytest.MonkeyPatch, *, bits: int) -> None:
    """Cut what :func:`keyhash.hash_columns` gives, wherever it is used, to its highest bits."""
    whole = keyhash.hash_columns
    mask = np.uint64(2**64 - 2 ** (64 - bits))

    def short(frame, names, seed=0):
        return whole(frame, names, seed) & mask

    for found in pkgutil.walk_packages(kernels.__path__, "millstream.kernels."):
        module = importlib.import_module(found.name)
        if getattr(module, "hash_columns", None) is whole:
            patch.setattr(module, "hash_columns", short)
