"""A transaction whose records several processes send, on Apache Kafka: the same tests, imported."""

from __future__ import annotations

import pytest
from broker import test_shared_transactions
from broker.test_shared_transactions import *  # noqa: F403 - its fixtures

pytestmark = pytest.mark.thorough

for _name, _test in vars(test_shared_transactions).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture
def address(backend) -> str:
    return f"kafka://{backend.address}?timeout=30+seconds"
