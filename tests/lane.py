"""Test lanes: runs of the same tests in which what is rare in the code is made common.

A lane is one module of the folder ``lanes``, named as the lane, with one function:

    def apply(patch: pytest.MonkeyPatch) -> None

It is called once, before any test is collected, and what it has patched is put back after the last.
``pytest --lane NAME`` runs in a lane, ``make test-long`` in each. A test that says where the rare
begins cannot hold in a lane that moves it: it is marked ``not_in_lane(name, reason)``, and skipped there.
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

LANES = Path(__file__).parent / "lanes"


def names() -> list[str]:
    """Return the name of every lane, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(LANES)]))


def load(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what puts the tests into the lane of this name."""
    if name not in names():
        raise pytest.UsageError(f"there is no lane {name!r}; there are: {', '.join(names())}")
    module = importlib.import_module(f"lanes.{name}")
    return cast("Callable[[pytest.MonkeyPatch], None]", module.apply)
