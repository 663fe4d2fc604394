"""The logs that the contract is tested on. A test asks for ``backend`` or, mostly, for ``log``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.client import EventLog, connect

with warnings.catch_warnings():  # kafka-python warns of its own deprecated calls when imported
    warnings.simplefilter("ignore")
    import kafka.partitioner.default  # noqa: F401


class Folder:
    """The embedded log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def connect(self) -> EventLog:
        return connect(self._folder)

    def clean(self, log: EventLog, *, times: int = 1) -> None:
        """Have retention and compaction do what they would do by themselves, later."""
        for _ in range(times):
            log.keep_house()


@pytest.fixture(params=["folder"])
def backend(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "data")


@pytest.fixture
def log(backend: Folder) -> Iterator[EventLog]:
    with backend.connect() as opened:
        yield opened
