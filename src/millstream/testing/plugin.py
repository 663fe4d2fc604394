"""What pytest gets with Millstream: the fixture ``replay``, and options for it.

``replay(app, inputs)`` is :func:`millstream.testing.replay` with the options of the command line::

    def test_rates_do_not_depend_on_batches(replay):
        out = replay(app, {"clicks": rows})
        assert out["rates"].height == 3
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from millstream.testing.run import Result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``replay``."""
    group = parser.getgroup("millstream")
    group.addoption(
        "--millstream-batchings",
        type=int,
        default=20,
        help="into how many different batchings replay cuts its input (default: 20)",
    )
    group.addoption(
        "--millstream-seed",
        type=int,
        default=0,
        help="the first seed of replay; a failure names its own (default: 0)",
    )


@pytest.fixture
def replay(pytestconfig: pytest.Config) -> Callable[..., Result]:
    """Run an app many times, with random batches and crashes; fail if the outputs differ."""
    from millstream.testing.replay import replay as work  # noqa: PLC0415 - loads when it is used

    options: dict[str, Any] = {
        "batchings": pytestconfig.getoption("--millstream-batchings"),
        "seed": pytestconfig.getoption("--millstream-seed"),
    }
    return partial(work, **options)
