"""The contract of every log, on Apache Kafka: the same tests, imported."""

from __future__ import annotations

import pytest
from contract import test_log_contract

pytestmark = pytest.mark.thorough

for _name, _test in vars(test_log_contract).items():
    if _name.startswith("test_"):
        globals()[_name] = _test
del globals()["test_every_requirement_has_a_test_of_its_number"]
