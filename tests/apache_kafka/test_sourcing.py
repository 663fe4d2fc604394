"""Event sourcing on Apache Kafka: the same tests as on every other log, imported."""

from __future__ import annotations

import pytest
from contract import test_sourcing_contract
from contract.test_sourcing_contract import index  # noqa: F401 - a fixture

pytestmark = pytest.mark.thorough

for _name, _test in vars(test_sourcing_contract).items():
    if _name.startswith("test_"):
        globals()[_name] = _test
