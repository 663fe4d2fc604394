"""The demo over Apache Kafka: the engine reads from it and writes to it by transactions."""

from __future__ import annotations

from pathlib import Path

import pytest
from spark.test_kafka_demo import check


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_demo_over_apache_kafka_is_right(held, tmp_path: Path) -> None:
    check(f"kafka://{held.address}", tmp_path / "demo")
