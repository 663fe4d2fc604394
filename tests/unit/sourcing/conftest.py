from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from unit.sourcing.ledger import open_store

import millstream as ms
from millstream.sourcing.store import EventStore

settings.register_profile("sourcing", deadline=None)  # a busy machine is not a failure
settings.load_profile("sourcing")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ms.EventLog]:
    with ms.connect(tmp_path / "log") as opened:
        yield opened


@pytest.fixture
def store(log: ms.EventLog) -> Iterator[EventStore]:
    with open_store(log) as opened:
        yield opened
