"""Very many clients at the same time."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from broker.broker_process import AsProcess
from broker.raw_client import RawClient, batch, create, fetch, fetched, produce, produced

CONNECTIONS = 2000
FILES = CONNECTIONS + 500
CONNECTION_BYTES_MAX = 64 * 1024


@pytest.fixture
def few_files_at_first() -> Iterator[None]:
    """What a service manager gives a process: few files, and the right to more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"this system lets a process have {hard} files open; {FILES} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory_bytes(process: int) -> int:
    """Return how much of a process is in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_two_thousand_idle_connections_cost_little_and_slow_nobody(
    folder, few_files_at_first, record_property
) -> None:
    with AsProcess(folder) as broker, ExitStack() as idle:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
        before = memory_bytes(broker.process.pid)
        clients = [idle.enter_context(RawClient(broker.address)) for _ in range(CONNECTIONS)]
        for one in clients:
            one.request("ApiVersions", 3, {})
        each = (memory_bytes(broker.process.pid) - before) / CONNECTIONS
        record_property("bytes_each", round(each))
        assert each < CONNECTION_BYTES_MAX
        began_s = time.monotonic()
        with RawClient(broker.address) as client:
            client.request("CreateTopics", 4, create())
            for number in range(50):
                sent = produced(client.request("Produce", 7, produce(batch(b"x"))))
                assert sent["base_offset"] == number
                assert fetched(client.request("Fetch", 11, fetch(number)))["records"]
        assert time.monotonic() - began_s < 20  # tenths of a second, unless each looked at all
        for one in clients[::100]:
            one.request("Metadata", 1, {"topics": None})
